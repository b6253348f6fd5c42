"""Every key is explained, and ``--help`` shows it; the command ``parallel2d`` has the others."""

import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jobs
import pytest

from parallel2d import ConfigError, __main__
from parallel2d.__main__ import COMMANDS
from parallel2d.base.config.composition import compose
from parallel2d.base.config.help_page import information, sections
from parallel2d.base.config.model_and_data import FAMILIES
from parallel2d.base.config.options import REQUIRED
from parallel2d.train import main as train

ROOT = Path(__file__).resolve().parents[1]
NEEDED = {"custom": ["model=custom", "model.target=a:b"], "hf": ["model=hf", "model.path=a"]}


def keys_of(config, prefix=""):
    for name, value in vars(config).items():
        if hasattr(value, "__dataclass_fields__"):
            yield from keys_of(value, f"{prefix}{name}.")
        else:
            yield prefix + name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_has_a_one_line_help_text(family):
    """The keys are those in a composed configuration, so that every key is covered."""
    config = compose(NEEDED.get(family, [])).config
    found = [part for part in sections() if part.family in ("", family)]
    documented = {each.key: each.summary for part in found for each in part.keys}
    assert sorted(documented) == sorted(keys_of(config))
    texts = {**documented, **{part.key: part.summary for part in found}}
    assert {key: text for key, text in texts.items() if len(text) < 10} == {}
    assert {key: text for key, text in documented.items() if len(text) > 110} == {}


def test_help_of_key_has_type_constraint_choices_readers_and_default():
    found = {(part.family, each.key): each for part in sections() for each in part.keys}
    steps = found["", "train.steps"]
    assert (steps.allowed, steps.default, steps.choices) == ("a whole number, at least 1", 300, ())
    for key, allowed in {
        "mesh.shard": "a whole number, at least 1, or auto",
        "sync.mix": "a number, at least 0 and at most 1, or auto",
        "optimizer.clip_norm": "a number, above 0, or inf",
        "checkpoint.folder": "text or null",
        "data.packing": "packed, padded or fitted",
        "metrics.tensorboard": "true or false",
    }.items():
        assert found["", key].allowed == allowed
    assert found["custom", "model.target"].default == REQUIRED
    assert found["", "sync.delay"].text.startswith("diloco: Steps of training")
    assert found["", "optimizer.betas"].text.startswith("adamw, adam, muon: Decay")
    assert found["", "sync.name"].text == "Set by the group: sync=diloco"


def test_help_shows_every_key_with_its_overridden_value():
    page = information(
        ["--help", "all", "model=hf", "strategy=zero3", "train.steps=7"], "program", "Why."
    )
    for key in keys_of(compose(NEEDED["hf"]).config):
        assert re.search(rf"^ +{re.escape(key)}=", page, re.MULTILINE), key
    assert "train.steps=7 " in page
    assert "strategy.name=zero3 " in page
    assert "model.dim" not in page  # of another family
    assert max(map(len, page.splitlines())) <= 100


def test_help_lists_groups_options_and_examples_that_compose():
    page = information(["--help"], "program", "Why it is there.")
    assert page.startswith("usage: program [OPTION ...]")
    assert "Why it is there." in page
    choices = "auto ddp hybrid hybrid_full hybrid_zero2 zero2 zero3"
    assert re.search(rf"strategy=hybrid +{choices}\n", page)
    assert "schema" not in page
    assert len(page.splitlines()) <= 50
    for option in ("-m, --multirun", "--cfg job", "--config-dir", "-sc install", "--hydra-help"):
        assert option in page
    examples = re.findall(r"^  program (.*)$", page, re.MULTILINE)
    assert len(examples) == 4
    for name, told in {
        "scheduler": "constant cosine linear wsd",
        "train.hooks": "and its arguments} (docs/hooks.md) (a list",
        "train.stop": "train.stop.patience=5",
    }.items():
        explained = " ".join(information(["--help", name], "program", "").split())
        assert told in explained
        assert "mesh.shard" not in explained
    with pytest.raises(ConfigError, match="--help optimiser: no such key; did you mean optimizer"):
        information(["--help", "optimiser"], "program", "")
    for example in examples:
        words = [word.strip("'").replace("='", "=") for word in example.split()]
        information(["--help", *words], "program", "")


def test_help_shows_required_values_and_custom_choices_and_refuses_sweeps(tmp_path):
    assert "model.target (required)" in information(
        ["--help", "all", "model=custom"], "program", ""
    )
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ntrain:\n  steps: 11\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    words = ["-h", "-m", f"--config-dir={tmp_path}", "+experiment=mine", "strategy=ddp,zero3"]
    page = information(words, "program", "") + information([*words, "all"], "program", "")
    assert re.search(r"experiment=mine +mine none\n", page)
    assert "train.steps=11" in page
    assert "strategy.name=hybrid " in page
    with pytest.raises(ConfigError, match="strategy=ddb is not one of"):
        information(["--help", "strategy=ddb"], "program", "")


def test_help_ends_on_a_closed_pipe_and_loads_no_torch():
    program = (
        "import sys, parallel2d.data\n"  # every process that prepares would pay for torch
        "from parallel2d.__main__ import main\n"
        "assert main(['--help']) == main(['train', '--help', 'model=hf']) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    line = f'{sys.executable} -c "{program}" | head -n 1'
    command, found = ["bash", "-o", "pipefail", "-c", line], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=found, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "usage: parallel2d COMMAND [ARGUMENT ...]\n"


def test_options_may_stand_between_overrides(capsys):
    assert train(["strategy=zero3", "--cfg", "job", "train.steps=17"]) == 0
    shown = capsys.readouterr().out
    assert "name: zero3" in shown
    assert "steps: 17" in shown


def test_completion_equals_hydra(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("COMP_LINE", "python train.py strategy=z")
    assert train(["-sc", "query=bash"]) == 0
    assert capsys.readouterr().out.split() == ["strategy=zero2", "strategy=zero3"]


def test_parallel2d_without_arguments_lists_commands(capsys):
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["parallel2d"].partition(":")
    assert getattr(importlib.import_module(module), name)(["--help"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("usage: parallel2d COMMAND")
    for name, purpose in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(purpose)}$", page, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["trian"], "trian is not one of train, certify, .*; did you mean train?"),
        ([], "a command is missing\nusage: parallel2d COMMAND"),
        (["--nonsense"], "--nonsense is not one of train"),
        (["train", "--help", "model=hff"], "model=hff is not one of custom, hf"),
        (["train", "train.stepz=4"], ".*did you mean train.steps?"),
    ],
)
def test_wrong_command_gives_one_clear_message(words, told, capsys):
    assert __main__.main(words) == 2
    assert re.match(f"parallel2d: {told}", capsys.readouterr().err)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow)
        if name in ("plan", "certify", "preflight")
        else name
        for name in COMMANDS
    ],
)
def test_usage_names_the_called_entry_point(name, capsys):
    module = importlib.import_module(f"parallel2d.{name}")
    for main, words, program in (
        (__main__.main, [name], f"parallel2d {name}"),
        (module.main, [], f"python -m parallel2d.{name}"),
    ):
        try:
            code = main([*words, "--help"])
        except SystemExit as end:  # of argparse
            code = end.code
        assert code == 0
        page = capsys.readouterr().out
        assert page.startswith(f"usage: {program} ")
        assert "``" not in page


def test_entry_point_returns_exit_code_of_the_module(tmp_path):
    assert __main__.main(["certify", "train.stepz=4"]) == 1
    assert __main__.main(["report", str(tmp_path)]) == 2
    assert __main__.main(["checkpoint", "verify", str(tmp_path)]) == 1


@pytest.mark.parametrize("main", [__main__.main, train])
def test_version_option_prints_the_package_version(main, capsys, monkeypatch):
    from importlib import metadata

    monkeypatch.setattr(metadata, "version", lambda name: f"7.8.9 of {name}")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "parallel2d 7.8.9 of parallel2d\n"


@pytest.mark.slow
def test_command_finds_a_model_in_the_current_folder(tmp_path):
    """`python -m` searches the current folder; the script of a package searches its own folder
    instead.
    """
    (tmp_path / "here.py").write_text("from torch.nn import Embedding")
    words = ["model=custom", "model.target=here:Embedding", "plan.dry_run=true"]
    words += ["model.arguments={num_embeddings: 320, embedding_dim: 320}", "plan.verify=false"]
    done = jobs.run_python("-P", "-m", "parallel2d", "train", *words, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "model       Embedding: 102,400 parameters" in done.stdout
