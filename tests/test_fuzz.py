"""Untrusted files, changed at random: any content gives one message, in bounded time and memory.

`MUTATIONS` of each kind run by default; ``PARALLEL2D_MUTATIONS`` sets the number for the soak
test. A failure prints the seed that makes the same file again.
"""

import contextlib
import copy
import functools
import json
import os
import random
import shutil
import struct
import warnings
from pathlib import Path

import pytest
import torch
from jobs import peak_memory
from test_checkpoint_hostile import DATA, reseal
from test_checkpoint_policy import Small

from parallel2d.base.config import DataConfig
from parallel2d.base.errors import ConfigError
from parallel2d.checkpoint import main as checkpoint_command
from parallel2d.instruments.report.page import markdown, page
from parallel2d.instruments.report.runs import read_run
from parallel2d.training.data.opening import OpenData, open_data
from parallel2d.training.data.token_shards import verify
from parallel2d.training.metrics.recorder import Goodput
from parallel2d.training.metrics.writer import MetricsWriter

MUTATIONS = 40  # of each kind
MANY = int(os.environ.get("PARALLEL2D_MUTATIONS", "1700"))
REPORTS = (markdown,)
LONGEST_S, MOST_BYTES = 2.0, 200 * 2**20
ODD = (
    None, True, False, 0, -1, -64, 1, 2**31, 2**53, 2**62, 2**63, 2**64, 10**30, -(2**63), 0.5, -0.0,
    1e-320, 1e308, float("nan"),
    float("inf"), float("-inf"), "", "nan", "0", "../../x", "/etc/passwd", "\x1b[31mred", "a" * 100_000,
    "\ud800", [], {}, [[]], [None],
    {"": ""}, [1] * 10_000, {"__class__": "os"},
)  # fmt: skip
PIECES = (
    b"\0",
    b"\xff" * 8,
    b"[" * 50_000,
    b"{",
    b"}",
    b'"',
    b",",
    b"NaN",
    b"1e999",
    b"9" * 5000,
    b"\n",
    b"\\u0000",
    b"-",
    b"\x80\x02cos\n",
)


def mutated_bytes(data: bytes, random: random.Random) -> bytes:
    for _ in range(random.choice((1, 1, 2, 5))):
        at = random.randrange(len(data) + 1)
        kind = random.randrange(6)
        if kind == 0 and data:
            at = min(at, len(data) - 1)
            data = data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
        elif kind == 1:
            data = data[:at]
        elif kind == 2:
            data = data[:at] + random.choice(PIECES) + data[at:]
        elif kind == 3:
            data = data[:at] + data[at + random.randrange(1, 100) :]
        elif kind == 4:
            data = data[:at] + data[at : at + 200] + data[at:]
        else:
            data = data[:at] + random.choice(PIECES) + data[at + random.randrange(1, 20) :]
    return data


def mutated_value(value: object, random: random.Random) -> object:
    """JSON with some of its values replaced, moved, taken out or doubled."""
    value = json.loads(json.dumps(value))
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        places = list(_places(value))
        if not places:
            return random.choice(ODD)
        holder, key = random.choice(places)
        kind = random.randrange(8)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[random.choice(("x", "", "__proto__", "\x1b[2J", "a" * 5000))] = holder.pop(key)
        elif kind == 2 and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        elif kind == 3:
            other, place = random.choice(places)
            is_there = place in (other if isinstance(other, dict) else range(len(other)))
            holder[key] = json.loads(json.dumps(other[place])) if is_there else 0
        elif kind == 4 and isinstance(holder[key], int | float):
            holder[key] += random.choice((1, -1, 0.5))
        elif kind == 5:
            holder[key] = _nested(random.choice((3, 40, 900)))
            break
        else:
            holder[key] = copy.deepcopy(random.choice(ODD))
    return value


def _nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value] if depth % 2 else {"a": value}
    return value


def _places(value: object):
    items = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    for key, item in items:
        yield value, key
        yield from _places(item)


def changed_json(path: Path, random: random.Random) -> None:
    if random.random() < 0.3:
        path.write_bytes(mutated_bytes(path.read_bytes(), random))
    else:
        path.write_text(json.dumps(mutated_value(json.loads(path.read_bytes()), random)))


def manifest(folder: Path, random: random.Random) -> None:
    step = folder / "checkpoints" / "step-00000001"

    def change(told: dict) -> None:
        new = mutated_value(told, random)
        told.clear()
        told.update(new if isinstance(new, dict) else {})

    if random.random() < 0.2:
        path = step / "manifest.json"
        path.write_bytes(mutated_bytes(path.read_bytes(), random))
    else:
        with contextlib.suppress(KeyError):
            reseal(step, change)
    for command in ("verify", "inspect"):
        assert checkpoint_command([command, str(step)]) in (0, 1, 2)
    small = Small(folder / "other", resume=str(step))
    try:
        small.restore()
    except ConfigError:
        return
    # The save must have ended before the folder is removed.
    small.train(1).checkpointer.finish()


def header(folder: Path, random: random.Random) -> None:
    path = folder / "checkpoints" / "step-00000001" / DATA
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    if random.random() < 0.5:
        text = json.dumps(mutated_value(json.loads(data[8 : 8 + length]), random)).encode()
        data = struct.pack("<Q", len(text)) + text + data[8 + length :]
    else:
        data = mutated_bytes(data[: 8 + length], random) + data[8 + length :]
    path.write_bytes(data)
    (folder / "alone.safetensors").write_bytes(data)
    reseal(path.parent)
    assert checkpoint_command(["verify", str(path.parent)]) in (0, 1, 2)
    assert checkpoint_command(["inspect", str(folder / "alone.safetensors")]) in (0, 1, 2)
    assert checkpoint_command(
        ["convert", str(folder / "alone.safetensors"), str(folder / "out.pt")]
    ) in (0, 1, 2)


def saved(folder: Path, random: random.Random) -> None:
    path = random.choice((folder / "archive.pt", folder / "stream.pt"))
    path.write_bytes(mutated_bytes(path.read_bytes(), random))
    # Each file is read in a separate process.
    convert = ["convert", str(path), str(folder / "out.safetensors")]
    assert checkpoint_command(random.choice((["inspect", str(path)], convert))) in (0, 1, 2)


def make_report(folder: Path) -> None:
    try:
        runs = [read_run(str(folder))]
    except ConfigError:
        return
    for make in REPORTS:
        assert make(runs)


def layout(folder: Path, random: random.Random) -> None:
    changed_json(folder / "layout.json", random)
    make_report(folder)


def rows(folder: Path, random: random.Random) -> None:
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for number in random.sample(range(len(lines)), 3):
        if random.random() < 0.4:
            lines[number] = mutated_bytes(lines[number], random)
        else:
            lines[number] = (
                json.dumps(mutated_value(json.loads(lines[number]), random)).encode() + b"\n"
            )
    path.write_bytes(b"".join(lines))
    make_report(folder)
    writer, goodput = MetricsWriter(str(folder), {}, tensorboard=False), Goodput()
    goodput.resume(5, *writer.begin(5))
    json.dumps(goodput.row(), allow_nan=False)
    writer.close()


def open_tokens(folder: Path) -> OpenData:
    config = DataConfig(name="tokens", path=str(folder), intra_document_masking=True)
    return open_data(config, seq_len=16, seed=1)


def tokens(folder: Path, random: random.Random) -> None:
    path = folder / "tokens" / "manifest.json"
    ends = next(path.parent.glob("*.ends"))
    if random.random() < 0.25:
        size = ends.stat().st_size
        ends.write_bytes(mutated_bytes(ends.read_bytes(), random)[:size].ljust(size, b"\1"))
    else:
        changed_json(path, random)
    with contextlib.suppress(ConfigError):
        data = open_tokens(path.parent)
        for start in range(0, min(len(data.train), 64), 8):
            data.train.read(range(start, min(start + 8, len(data.train))))
        verify(path.parent)


KINDS = {f.__name__: f for f in (manifest, header, saved, layout, rows, tokens)}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """By kind: a folder to change copies of, made when first asked for."""

    @functools.cache
    def made(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        _MAKE[kind](folder)
        return folder

    return made


def _save(folder: Path) -> None:
    Small(folder).train(1).checkpointer.finish()


def _save_for_torch(folder: Path) -> None:
    weights = {"a.weight": torch.randn(3, 4), "a.bias": torch.zeros(4, dtype=torch.bfloat16)}
    torch.save({**weights, "tied": weights["a.weight"]}, folder / "archive.pt")
    torch.save(weights, folder / "stream.pt", _use_new_zipfile_serialization=False)


def _record(folder: Path) -> None:
    row = {
        "throughput/tokens_per_s": 50.0,
        "time/step_s": 0.1,
        "time/sync_s": 0.01,
        "memory/peak_gib": 1.5,
        "comm/shard/bytes": 10,
        "goodput/fraction": 0.5,
        "goodput/useful_s": 4.0,
        "goodput/lost_data_s": 1.0,
        "validation/loss": None,
    }
    lines = [
        {**row, "step": n, "loss": 5.0 / n, "goodput/wall_s": 9.0 * n, "goodput/unix_s": 1.7e9 + n}
        for n in range(1, 11)
    ]
    described = {
        "mesh": {"replicate": 2, "shard": 2, "tensor": 1},
        "strategy": "hybrid",
        "predicted": {"comm/shard/bytes": 8},
    }
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "layout.json").write_text(
        json.dumps(described | {"ranks": [[[0], [1]], [[2], [3]]], "hosts": ["a"] * 4})
    )


def _prepare(folder: Path) -> None:
    from parallel2d.data import main as data_command

    for number in range(20):
        (folder / f"{number}.txt").write_text(f"document {number} " * 20)
    words = ["prepare", f"{folder}/*.txt", "--output", str(folder / "tokens")]
    assert data_command(words) == 0


_MAKE = {
    "manifest": _save,
    "header": _save,
    "saved": _save_for_torch,
    "layout": _record,
    "rows": _record,
    "tokens": _prepare,
}


def fuzzed(kind: str, original: Path, folder: Path, seed: int, number: int) -> tuple[float, int]:
    """Processor seconds of the slowest file, with its child's, and the largest growth of memory in
    bytes.
    """
    slowest, before = 0.0, peak_memory(from_now=True)
    for index in range(number):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(original, folder)
        begin = sum(os.times()[:4])
        try:
            KINDS[kind](folder, random.Random(f"{seed}/{kind}/{index}"))
        except Exception as error:
            error.add_note(f"PARALLEL2D_SEED={seed}, {kind} {index}")
            raise
        slowest = max(slowest, sum(os.times()[:4]) - begin)
    return slowest, peak_memory() - before


def check(kind: str, original: Path, folder: Path, number: int) -> None:
    seed = int(os.environ.get("PARALLEL2D_SEED", "1"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        KINDS[kind](shutil.copytree(original, folder), random.Random(1))  # loads its imports
        slowest, grown = fuzzed(kind, original, folder, seed, number)
    print(
        f"{kind}: {number} mutations, slowest {slowest:.2f} s, {grown / 2**20:.0f} MiB more memory"
    )
    assert slowest < LONGEST_S
    assert grown < MOST_BYTES


@pytest.mark.parametrize("number", [MUTATIONS, pytest.param(MANY, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", KINDS)
def test_mutated_files_are_refused_or_equal(original, tmp_path, kind, number):
    check(kind, original(kind), tmp_path / "run", number)


@pytest.mark.parametrize("ends", [[0, 5], [9, 3], [4, 4]])
def test_unsorted_document_ends_are_refused(original, tmp_path, ends):
    folder = shutil.copytree(original("tokens"), tmp_path / "run") / "tokens"
    path = next(folder.glob("train-*.ends"))
    data = bytearray(path.read_bytes())
    data[:16] = struct.pack("<2Q", *ends)
    path.write_bytes(data)
    says = f"{path} is damaged: its documents do not end one after the other"
    with pytest.raises(ConfigError, match=says):
        open_tokens(folder).train.read(range(8))


@pytest.mark.extras("plotly")
@pytest.mark.parametrize("kind", ["layout", "rows"])
def test_report_of_mutated_files_is_built_or_refused(original, tmp_path, kind, monkeypatch):
    monkeypatch.setitem(globals(), "REPORTS", (page,))
    fuzzed(kind, original(kind), tmp_path / "run", 1, 10)  # raises the exceptions of page
