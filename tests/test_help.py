"""Every key is explained, and ``--help`` shows it; the command ``parallel2d`` has the others."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from parallel2d import ConfigError, __main__
from parallel2d.__main__ import COMMANDS
from parallel2d.config.composition import compose
from parallel2d.config.documentation import REQUIRED, first_sentence, sections
from parallel2d.config.help_page import help_page
from parallel2d.config.serialization import FAMILIES
from parallel2d.train import main as train

ROOT = Path(__file__).resolve().parents[1]


def execute(*words, environment=None, folder=None):
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )


def keys_of(config, prefix=""):
    for name, value in vars(config).items():
        if hasattr(value, "__dataclass_fields__"):
            yield from keys_of(value, f"{prefix}{name}.")
        else:
            yield prefix + name


MODELS = {"llama": "model=llama_debug", "custom": "model=custom", "hf": "model=hf"}
NEEDED = {"custom": ["model.target=a:b"], "hf": ["model.architecture=llama"]}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_has_a_text(family):
    """Compared with the keys of a composed configuration, so that none can be left out."""
    config = compose([MODELS[family], *NEEDED.get(family, [])]).config
    documented = {
        each.key: each for part in sections() if part.family in ("", family) for each in part.keys
    }
    assert sorted(documented) == sorted(keys_of(config))
    assert [key for key, each in documented.items() if len(each.summary) < 10] == []


def test_every_section_has_a_text():
    assert [part.key for part in sections() if len(part.summary) < 10] == []


def test_one_line_is_short_enough_to_be_one():
    long = {each.key: each.summary for part in sections() for each in part.keys}
    assert {key: text for key, text in long.items() if len(text) > 110} == {}


def test_a_key_has_its_type_constraint_choices_and_default():
    found = {(part.family, each.key): each for part in sections() for each in part.keys}
    steps = found["", "train.steps"]
    assert (steps.allowed, steps.default, steps.choices) == ("a whole number, at least 1", 300, ())
    assert found["", "mesh.shard"].allowed == "a whole number, at least 1, or auto"
    assert found["", "sync.mix"].allowed == "a number, at least 0 and at most 1, or auto"
    assert found["", "optimizer.clip_norm"].allowed == "a number, above 0, or inf"
    assert found["", "data.packing"].choices == ("packed", "padded")
    assert found["", "checkpoint.folder"].allowed == "text or null"
    assert found["", "metrics.tensorboard"].choices == ("true", "false")
    assert found["custom", "model.target"].default == REQUIRED
    assert "head.*" in found["", "optimizer.groups"].text


def test_the_first_sentence_of_a_text():
    assert first_sentence("Reads a.jsonl; or b.c. Then more. And more") == "Reads a.jsonl; or b.c"
    assert first_sentence("One only.") == "One only"


def test_help_shows_every_key_with_the_value_that_the_words_give():
    page = help_page(["--help", "model=hf", "strategy=zero3", "train.steps=7"], "program", "Why.")
    config = compose(["model=hf", "model.architecture=llama"]).config
    for key in keys_of(config):
        assert re.search(rf"^ +{re.escape(key)}=", page, re.MULTILINE), key
    assert "train.steps=7 " in page
    assert "strategy.name=zero3 " in page
    assert "model.dim" not in page  # of another family
    assert max(map(len, page.splitlines())) <= 100


def test_help_lists_groups_options_and_examples():
    page = help_page(["--help"], "program", "Why it is there.")
    assert page.startswith("usage: program [OPTION ...]")
    assert "Why it is there." in page
    assert re.search(
        r"strategy=hybrid +auto ddp hybrid hybrid_full hybrid_zero2 zero2 zero3\n", page
    )
    assert "schema" not in page
    for option in ("-m, --multirun", "--cfg job", "--config-dir", "-sc install", "--hydra-help"):
        assert option in page
    assert "program --help model=hf strategy=zero3" in page
    assert "docs/launching.md" in page


def test_the_examples_of_the_help_compose():
    page = help_page(["--help"], "program", "")
    examples = re.findall(r"^  program (.*)$", page, re.MULTILINE)
    assert len(examples) == 4
    for example in examples:
        words = [word.strip("'").replace("='", "=") for word in example.split()]
        help_page(words, "program", "")


def test_help_shows_a_required_value_and_ones_own_choices(tmp_path):
    assert "model.target (required)" in help_page(["--help", "model=custom"], "program", "")
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ntrain:\n  steps: 11\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    page = help_page(["-h", f"--config-dir={tmp_path}", "+experiment=mine"], "program", "")
    assert re.search(r"experiment=mine +mine none\n", page)
    assert "train.steps=11" in page


def test_help_with_a_wrong_word_is_one_clear_message(capsys):
    assert train(["--help", "model=hff"]) == 2
    assert "model=hff is not one of custom, hf" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("-m", "parallel2d", "--help"),
        ("-m", "parallel2d", "train", "--help"),
        ("-m", "parallel2d.train", "--help", "model=hf"),
        ("-m", "parallel2d.train", "-sc", "install=bash"),
    ],
)
def test_help_does_not_load_torch(words):
    program = (
        "import runpy, sys\n"
        "module, sys.argv = sys.argv[2], sys.argv[2:]\n"
        "try:\n"
        "    runpy.run_module(module, run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules\n"
        "print('without torch')\n"
    )
    done = execute("-c", program, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("without torch\n")


def test_a_reader_that_ends_early_is_no_error():
    line = f"{sys.executable} -m parallel2d.train --help | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "usage: python -m parallel2d.train [OPTION ...] [GROUP=CHOICE ...] [KEY=VALUE ...]\n"
    )


def test_options_may_stand_between_overrides(capsys):
    assert train(["strategy=zero3", "--cfg", "job", "train.steps=17"]) == 0
    shown = capsys.readouterr().out
    assert "name: zero3" in shown
    assert "steps: 17" in shown


def test_the_command_lists_the_commands(capsys):
    assert __main__.main(["--help"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("usage: parallel2d COMMAND")
    for name, command in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(command.purpose)}$", page, re.MULTILINE)


def test_the_script_of_the_package_is_the_command():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["parallel2d"].partition(":")
    assert getattr(importlib.import_module(module), name) is __main__.main


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["trian"], "trian is not one of train, certify, .*; did you mean train?"),
        ([], "a command is missing\nusage: parallel2d COMMAND"),
        (["--nonsense"], "--nonsense is not one of train"),
        (["-sc", "install=tcsh"], "-sc install=tcsh: it takes install=SHELL"),
    ],
)
def test_a_wrong_command_is_one_clear_message(words, told, capsys):
    assert __main__.main(words) == 2
    assert re.match(f"parallel2d: {told}", capsys.readouterr().err)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_commands_usage_names_the_way_it_was_called(name, capsys):
    module = importlib.import_module(f"parallel2d.{COMMANDS[name].module}")
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


@pytest.mark.parametrize("name", [name for name in COMMANDS if COMMANDS[name].subcommands])
def test_the_subcommands_are_those_that_the_command_has(name, capsys):
    with pytest.raises(SystemExit):
        __main__.main([name, "--help"])
    usage = capsys.readouterr().out.partition("\n\n")[0]
    listed = re.search(r"\[-h\] \{?(.*?)\}? \.\.\.", usage)[1]
    assert tuple(re.split(r"\W+", listed)) == COMMANDS[name].subcommands


def test_exit_codes_are_those_of_the_modules(capsys, tmp_path):
    assert __main__.main(["train", "train.stepz=4"]) == 2
    assert "did you mean train.steps?" in capsys.readouterr().err
    assert __main__.main(["certify", "train.stepz=4"]) == 1
    assert __main__.main(["report", str(tmp_path)]) == 2
    assert __main__.main(["checkpoint", "verify", str(tmp_path)]) == 1


@pytest.mark.parametrize("main", [__main__.main, train])
def test_the_version_is_that_of_the_package(main, capsys, monkeypatch):
    from importlib import metadata

    monkeypatch.setattr(metadata, "version", lambda name: f"7.8.9 of {name}")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "parallel2d 7.8.9 of parallel2d\n"


def test_a_sweep_is_described_by_its_defaults():
    page = help_page(["--help", "-m", "strategy=ddp,zero3"], "program", "")
    assert "strategy.name=hybrid " in page
    with pytest.raises(ConfigError, match="strategy=ddb is not one of"):
        help_page(["--help", "strategy=ddb"], "program", "")


@pytest.mark.slow
def test_the_command_finds_a_model_of_the_current_folder(tmp_path):
    """As `python -m` does; the script of a package has its own folder in the place of this one."""
    (tmp_path / "here.py").write_text("from torch.nn import Embedding")
    words = ["model=custom", "model.target=here:Embedding", "model.arguments={num_embeddings: 320, embedding_dim: 320}"]  # fmt: skip
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "parallel2d",
            "train",
            *words,
            "plan.dry_run=true",
            "plan.verify=false",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "model       Embedding: 102,400 parameters" in done.stdout
