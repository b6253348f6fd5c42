"""Every row of docs/coming-from.md and every script of docs/coming-from-scripts.md runs and has
the effect that the page describes.
"""

import contextlib
import dataclasses
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import jobs
import pytest
import torch
import torch.distributed as dist
from coming_from_checks import CHECKS, run_cells

import parallel2d
from parallel2d.base.config import TrainConfig

DOCS = Path(__file__).parent.parent / "docs"
TABLES = (DOCS / "coming-from.md").read_text()
SCRIPTS = (DOCS / "coming-from-scripts.md").read_text()
ORIGINS = ("thunder", "FullySharded", "fully_shard", "Lightning", "transformers", "torchtitan")
WORDS = re.compile(r"[\w.]+=\S*(?: [\w.]+=\S*)*")
ENTRY = re.compile(r"^\*\*([^\n]+)\*\*$(.*?)(?=^\*\*|\Z)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```(?:python)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Row(NamedTuple):
    origin: str
    left: str
    code: tuple[str, ...]
    note: str

    @property
    def is_words(self) -> bool:
        return bool(self.code) and all(WORDS.fullmatch(span) for span in self.code)

    @property
    def name(self) -> str:
        return f"{self.origin}: {self.left}"


def read_rows() -> list[Row]:
    """Return the rows of a section with tables, or the text after each bold entry of a section
    with entries in bold.
    """
    rows: list[Row] = []
    for section in TABLES.split("\n## ")[1:]:
        origin = next((word for word in ORIGINS if section.startswith(word)), None)
        if origin is None:
            continue
        for line in section.splitlines():
            if line.startswith("| ") and not line.startswith("| you wrote"):
                _, left, right, note, _ = (cell.strip() for cell in line.split("|"))
                spans = tuple(re.findall(r"`([^`]+)`", right))
                rows.append(Row(origin, left.replace("`", ""), spans, note))
        for left, body in ENTRY.findall(section):
            blocks = BLOCK.findall(body)
            lines = tuple(line for block in blocks for line in block.splitlines())
            rows.append(Row(origin, left.replace("`", ""), lines, BLOCK.sub("", body).strip()))
    return rows


ROWS = read_rows()
PYTHON = [row for row in ROWS if row.code and not row.is_words]
COMMANDS = [row for row in ROWS if row.is_words]


def test_coming_from_page_has_all_sections():
    assert {row.origin for row in ROWS} == set(ORIGINS)
    assert len(PYTHON) > 35
    assert len(COMMANDS) > 60


@pytest.mark.slow
@pytest.mark.parametrize("origin", ORIGINS[:4])
def test_coming_from_python_cells_run(ranks, origin):
    rows = [row for row in PYTHON if row.origin == origin and "setup(" not in row.code[0]]
    cells = [(row.left, "\n".join(row.code)) for row in rows]
    for checked in ranks.run(4, run_cells, origin, cells):
        assert len(set(checked)) == len([begin for other, begin, _ in CHECKS if other == origin])


def test_coming_from_cells_with_setup_and_teardown_run():
    """Runs without a pool, because this process has no process group."""
    for row in PYTHON:
        if "setup(" in row.code[0]:
            assert not dist.is_initialized()
            names = {"setup": parallel2d.setup, "teardown": parallel2d.teardown}
            exec(compile("\n".join(row.code), row.left, "exec"), names)
            assert names["runtime"].topology.world_size == 1
            assert not dist.is_initialized()


# Overrides of the command line

BASE = (
    "data=text",
    "data.path=corpus.txt",
    "data.cache_dir=cache",
    "train.seq_len=16",
    "train.global_batch_size=32",
    "model.n_layers=2",
    "model.dim=32",
    "model.hidden_dim=48",
    "metrics.console=silent",
)
# the choice of a group replaces its other entries
IMPLIED = {"data": ("data.",), "model": ("model.",)}


def with_base(base: tuple[str, ...], words: list[str]) -> list[str]:
    keys = {word.partition("=")[0] for word in words}
    dropped = tuple(prefix for key in keys for prefix in IMPLIED.get(key, ()))
    kept = [
        word
        for word in base
        if word.partition("=")[0] not in keys and not (dropped and word.startswith(dropped))
    ]
    return [*kept, *words]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("coming-from")
    lines = (" ".join(f"{(7 * i + 3 * k) % 97}" for k in range(12)) for i in range(3000))
    (path / "corpus.txt").write_text("\n".join(lines))
    return path


def select(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    return config


def check_value(config: TrainConfig, word: str) -> None:
    key, _, value = word.partition("=")
    if key in ("model", "experiment") or key.startswith("hydra."):
        return
    found = select(config, key)
    if dataclasses.is_dataclass(found):
        assert found.name == value, word
    elif isinstance(found, list):
        assert str(found).replace(" ", "").replace("'", "") == value, word
    elif isinstance(found, bool):
        assert str(found).lower() == value, word
    else:
        assert str(found) == value or float(found) == float(value), word


@pytest.mark.slow
@pytest.mark.parametrize("origin", ORIGINS)
def test_coming_from_overrides_compose(folder, monkeypatch, origin):
    """The overrides compose, change the values that the page states, and have an effect unless
    they are the default.
    """
    monkeypatch.chdir(folder)
    default = jobs.config_of(BASE)
    for row in COMMANDS:
        if row.origin == origin:
            words = row.code[0].split()
            config = jobs.config_of(with_base(BASE, words))
            for word in words:
                check_value(config, word)
            is_default = row.note.lower().startswith("the default")
            is_default = is_default or row.code[0].startswith("hydra.run.dir")
            assert (config == default) == is_default, row.name


def block(name: str) -> str:
    (found,) = re.findall(rf"<!-- {name} -->\n```\w*\n(.*?)```\n<!-- end -->", SCRIPTS, re.DOTALL)
    return found


def words_of(name: str, program: str) -> list[str]:
    words = shlex.split(block(name).replace("\\\n", " "))
    assert words[:3] == ["python", "-m", program]
    return words[3:]


def execute(folder: Path, *words: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = jobs.run_python("-m", *words, cwd=folder, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def train(folder: Path, name: str, *words: str) -> list[dict[str, Any]]:
    """Return the rows of metrics of exactly these overrides, on a text of this test."""
    small = ["data=text", "data.path=corpus.txt", "data.cache_dir=cache", "train.validate_every=0"]
    given = words_of(name, "parallel2d.train")
    execute(folder, "parallel2d.train", *given, *small, f"hydra.run.dir={name}", *words)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_torchtitan_config_runs_as_a_command(folder):
    """Then its checkpoint as one file."""
    rows = train(folder, "torchtitan")
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert rows[-1]["loss"] < rows[0]["loss"]
    saved = (folder / "torchtitan" / "checkpoints").glob("step-*")
    assert sorted(path.name for path in saved) == ["step-00000005", "step-00000010"]
    layout = json.loads((folder / "torchtitan" / "layout.json").read_text())
    assert layout["mesh"] == {"replicate": 2, "shard": 2, "tensor": 1}

    from parallel2d.checkpoint import main

    command, source, target = words_of("convert", "parallel2d.checkpoint")
    assert main([command, str(folder / "torchtitan"), str(folder / target)]) == 0
    state = torch.load(folder / target, weights_only=True)
    assert sum(tensor.numel() for tensor in state.values()) == layout["parameters"]
    assert source == "RUN_DIR"


@pytest.mark.slow
def test_lightning_script_runs_as_a_module_and_overrides(folder):
    (folder / "char_model.py").write_text(block("lightning module"))
    rows = train(folder, "lightning", "train.seq_len=16", "launch.nproc_per_node=4")
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["comm/shard/bytes"] > 0


@pytest.mark.slow
def test_ddp_script_runs_after_the_move(folder):
    (folder / "moved.py").write_text(block("ddp"))
    ranks = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    said = execute(folder, *ranks, "moved.py")
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", said)]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    with contextlib.chdir(folder):
        names: dict[str, Any] = {}
        exec(block("ddp").partition("runtime =")[0], names)
        saved = torch.load("model.pt", weights_only=True)
        model = names["CharModel"]()
        model.load_state_dict(saved["model"])
        model.configure_optimizers().load_state_dict(saved["optimizer"])
        assert saved["step"] == 10
