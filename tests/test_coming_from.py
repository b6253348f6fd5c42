"""docs/coming-from.md is true: every equivalent and every script of ours in it runs, and does what its row says.

Rows come from the document itself. Python cells run on four ranks, with the checks of `coming_from_checks`; words of the command line
are composed and checked as the command does it, and some really train.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jobs
import pytest
import torch
import torch.distributed as dist
from coming_from_checks import CHECKS, run_cells

import parallel2d
from parallel2d.config import TrainConfig

DOCUMENT = (Path(__file__).parent.parent / "docs" / "coming-from.md").read_text()
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
    """Of a section with tables, its rows; of one with entries in bold, what follows each of them."""
    rows: list[Row] = []
    for section in DOCUMENT.split("\n## ")[1:]:
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


def test_the_document_was_read():
    assert {row.origin for row in ROWS} == set(ORIGINS)
    assert len(PYTHON) > 35
    assert len(COMMANDS) > 60


@pytest.mark.parametrize("origin", ORIGINS[:4])
def test_python(ranks, origin):
    rows = [row for row in PYTHON if row.origin == origin and "setup(" not in row.code[0]]
    cells = [(row.left, "\n".join(row.code)) for row in rows]
    for checked in ranks.run(4, run_cells, origin, cells):
        assert len(set(checked)) == len([begin for other, begin, _ in CHECKS if other == origin])


def test_python_that_starts_and_ends_the_process_group():
    """In this process, which has none; alone."""
    for row in PYTHON:
        if "setup(" in row.code[0]:
            assert not dist.is_initialized()
            names = {"setup": parallel2d.setup, "teardown": parallel2d.teardown}
            exec(compile("\n".join(row.code), row.left, "exec"), names)
            assert names["runtime"].topology.world_size == 1
            assert not dist.is_initialized()


# Words of the command line

BASE = (
    "data=text", "data.path=corpus.txt", "data.cache_dir=cache", "train.seq_len=16", "train.global_batch_size=32", "model.n_layers=2",
    "model.dim=32", "model.hidden_dim=48", "metrics.console=silent",
)  # fmt: skip
SHORT = (
    "train.steps=2",
    "train.validate_every=0",
    "checkpoint.enabled=false",
    "metrics.tensorboard=false",
)
# a choice of a group replaces what is said of it
IMPLIED = {
    "data": ("data.",),
    "model": ("model.",),
}


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
    """An empty folder with a text and a small saved Llama."""
    path = tmp_path_factory.mktemp("coming-from")
    lines = (" ".join(f"{(7 * i + 3 * k) % 97}" for k in range(12)) for i in range(3000))
    (path / "corpus.txt").write_text("\n".join(lines))
    return path


def select(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    return config


def check_value(config: TrainConfig, word: str) -> None:
    """The key has the value, or the group the choice."""
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


@pytest.mark.parametrize("origin", ORIGINS)
def test_words(folder, monkeypatch, origin):
    """They compose, change what they say, and more than nothing unless they are the default."""
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


def run_words(folder: str, run_dir: str, words: list[str]) -> dict[str, Any]:
    """On a rank: two steps of the job; the second row of its metrics and facts about its model."""
    from parallel2d.assemble import build_trainer
    from parallel2d.config import Job
    from parallel2d.data import BatchFeed
    from parallel2d.launch import RankIdentity
    from parallel2d.mesh import Topology
    from parallel2d.runtime import Runtime

    os.chdir(folder)
    sys.path.insert(0, folder)
    try:
        config = jobs.config_of(with_base((*BASE, *SHORT), words))
        os.makedirs(run_dir, exist_ok=True)
        rank, world = dist.get_rank(), dist.get_world_size()
        runtime = Runtime(
            RankIdentity(rank, world, rank, 0, 1, "torchrun"),
            torch.device("cpu"),
            Topology.gather(),
        )
        trainer = build_trainer(Job(config, run_dir, ()), runtime)
        feed = BatchFeed(trainer.training, trainer.plan, "cpu", start=trainer.progress.samples)
        trainer.begin(feed)
        for _ in range(2):
            trainer.step(feed)
        trainer.checkpointer.finish()
        feed.close()
        trainer.recorder.close()
        dist.barrier()
        lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
        return {
            **json.loads(lines[-1]),
            "rows": len(lines),
            "storage": str(next(trainer.model.parameters()).dtype),
            "optimizer": type(trainer.optimizer).__name__,
            "accumulation": trainer.plan.accumulation,
        }
    finally:
        sys.path.remove(folder)


def row_of(origin: str, left: str) -> Row:
    (found,) = (row for row in COMMANDS if row.origin == origin and row.left.startswith(left))
    return found


@pytest.fixture(scope="module")
def trained(ranks, folder):
    """Two steps of a row's words on four ranks, once per row."""

    @functools.cache
    def train(origin: str, left: str) -> dict[str, Any]:
        words = list(row_of(origin, left).code[0].split())
        return ranks.run(
            4, run_words, str(folder), str(folder / re.sub(r"\W+", "-", f"{origin} {left}")), words
        )[0]

    return train


def sent(row: dict[str, Any], axis: str) -> float:
    return row.get(f"comm/{axis}/bytes") or 0.0


@pytest.mark.slow
def test_strategies_move_what_they_say(trained):
    zero3, zero2, ddp, hybrid, hybrid_zero2 = (
        trained("FullySharded", f"ShardingStrategy.{name}")
        for name in (
            "FULL_SHARD",
            "SHARD_GRAD_OP",
            "NO_SHARD",
            "HYBRID_SHARD",
            "_HYBRID_SHARD_ZERO2",
        )
    )
    losses = {round(row["loss"], 4) for row in (zero3, zero2, ddp, hybrid, hybrid_zero2)}
    assert len(losses) == 1
    assert sent(zero3, "replicate") == sent(zero2, "replicate") == sent(ddp, "shard") == 0
    assert sent(zero3, "shard") > sent(zero2, "shard") > 0
    assert sent(hybrid, "shard") > sent(hybrid_zero2, "shard") > 0
    assert sent(ddp, "replicate") > sent(hybrid, "replicate") > 0


# Whole scripts


def block(name: str) -> str:
    (found,) = re.findall(rf"<!-- {name} -->\n```\w*\n(.*?)```\n<!-- end -->", DOCUMENT, re.DOTALL)
    return found


def words_of(name: str, program: str) -> list[str]:
    words = shlex.split(block(name).replace("\\\n", " "))
    assert words[:3] == ["python", "-m", program]
    return words[3:]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_the_torchtitan_config_as_a_command(folder):
    """The very words, on a text of ours; then its checkpoint as one file."""
    small = [
        "data=text",
        "data.path=corpus.txt",
        "data.cache_dir=cache",
        "hydra.run.dir=titan",
        "train.validate_every=0",
    ]
    command = [
        sys.executable,
        "-m",
        "parallel2d.train",
        *words_of("torchtitan", "parallel2d.train"),
        *small,
    ]
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    rows = [
        json.loads(line) for line in (folder / "titan" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert sorted(path.name for path in (folder / "titan" / "checkpoints").glob("step-*")) == [
        "step-00000005",
        "step-00000010",
    ]
    layout = json.loads((folder / "titan" / "layout.json").read_text())
    assert layout["mesh"] == {"replicate": 2, "shard": 2, "tensor": 1}

    from parallel2d.checkpoint.__main__ import main

    command, source, target = words_of("convert", "parallel2d.checkpoint")
    assert main([command, str(folder / "titan"), str(folder / target)]) == 0
    state = torch.load(folder / target, weights_only=True)
    assert sum(tensor.numel() for tensor in state.values()) == layout["parameters"]
    assert source == "RUN_DIR"


@pytest.mark.slow
def test_the_lightning_script_as_a_module_and_words(ranks, folder):
    (folder / "char_model.py").write_text(block("lightning module"))
    words = words_of("lightning", "parallel2d.train")
    row = ranks.run(4, run_words, str(folder), str(folder / "lightning"), words)[0]
    assert (row["rows"], row["accumulation"]) == (2, 2)
    assert row["loss"] < 6
    assert sent(row, "shard") > 0


@pytest.mark.slow
def test_the_fsdp1_script_moved_over(folder):
    (folder / "moved.py").write_text(block("fsdp1"))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "moved.py",
    ]
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    with contextlib.chdir(folder):
        names: dict[str, Any] = {}
        exec(block("fsdp1").partition("runtime =")[0], names)
        names["build_model"]().load_state_dict(torch.load("model.pt", weights_only=True))
