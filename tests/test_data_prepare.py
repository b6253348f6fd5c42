"""Preparing token shards: formats, bad input, determinism, and the files after a kill."""

import base64
import gzip
import hashlib
import http.server
import json
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallel2d.base.config import DataConfig
from parallel2d.base.errors import ConfigError
from parallel2d.data import main
from parallel2d.training.data import data_set_folder, reading
from parallel2d.training.data import prepare as preparation
from parallel2d.training.data import token_shards as store
from parallel2d.training.data.token_shards import ShardWriter, TokenStore, read_manifest, verify

END = 256


def run(path: Path, folder: Path, **options: Any) -> TokenStore:
    """Prepare with one worker and without a held-out part, unless ``options`` change it."""
    given = {"validation_fraction": 0.0, "workers": 1, **options}
    config = DataConfig(name="text", path=str(path), **given)
    with preparation.folder_lock(folder) as lock:
        return preparation.prepare(config, *reading.find_units(config), folder, lock)


def units(path: Path) -> list[reading.Unit]:
    return reading.plan_units(reading.find_files(str(path)))


def documents(prepared: TokenStore, split: str = "train") -> list[str]:
    part = prepared.splits[split]
    found = []
    for number in range(part.documents):
        begin, end = part.document_span(number)
        tokens = part.ids(begin, end - begin)
        assert tokens[-1] == END
        found.append(tokens[:-1].astype(np.uint8).tobytes().decode())
    return found


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


def error(path: Path, folder: Path, **options: Any) -> str:
    """The message of the error that preparing raises, after checking that nothing was published."""
    with pytest.raises(ConfigError) as caught:
        run(path, folder, **options)
    assert not (folder / store.MANIFEST).exists()
    assert not list(folder.glob("*.tmp"))
    return str(caught.value)


def write_rows(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """60 small files, one long one, one of a single line, an empty one and a hidden one."""
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    for number in range(60):
        (folder / f"{number:02d}.txt").write_text(f"document {number} é\n" * (number + 1))
    long = "".join(f"line {number} ☃ of the long file\n" for number in range(9000))
    (folder / "deep" / "long.txt").write_text(long)
    (folder / "deep" / "one.txt").write_text("é☃𝄞" * 30_000)
    (folder / "empty.txt").touch()
    (folder / ".hidden").write_bytes(b"\0")
    return folder


def test_text_is_complete_and_sorted_by_name(corpus, tmp_path):
    found = documents(run(corpus, tmp_path / "out"))
    names = sorted(path.relative_to(corpus).as_posix() for path in corpus.rglob("*.txt"))
    assert "".join(found) == "".join((corpus / name).read_text() for name in names)
    # A long file is cut at line ends, and a longer line between characters.
    cut = [document for document in found if document.startswith("line")]
    assert len(cut) > 3
    assert all(document.endswith("\n") for document in cut)
    assert len([document for document in found if "𝄞" in document]) > 1
    assert max(len(document.encode()) for document in found) < 2 * (64 << 10) + 3
    assert verify(tmp_path / "out") > 0


@pytest.mark.parametrize("unit_bytes", [5, 13, 1000])
def test_units_cut_files_without_losing_or_repeating_a_line(tmp_path, monkeypatch, unit_bytes):
    monkeypatch.setattr(reading, "UNIT_BYTES", unit_bytes)
    path = tmp_path / "cut.txt"
    path.write_text("é\n\nlonger line of text\nlast without end ☃" * 3)
    assert "".join(documents(run(path, tmp_path / "out"))) == path.read_text()
    rows = write_rows(tmp_path / "rows.jsonl", [f"row {n}" for n in range(20)])
    assert documents(run(rows, tmp_path / "rows")) == [f"row {n}" for n in range(20)]


def test_the_split_depends_on_content_only(tmp_path):
    texts = [f"text {number}" for number in range(200)]
    one, many = write_rows(tmp_path / "one.jsonl", texts[::-1]), tmp_path / "many"
    many.mkdir()
    for number, text in enumerate(texts):
        (many / f"{number}.txt").write_text(text)
    first = run(one, tmp_path / "a", validation_fraction=0.3)
    second = run(many, tmp_path / "b", validation_fraction=0.3)
    assert set(documents(first, "validation")) == set(documents(second, "validation"))
    assert 30 < len(documents(first, "validation")) < 90
    assert sorted(documents(first) + documents(first, "validation")) == sorted(texts)


def test_a_fraction_that_selects_no_document_still_holds_one_out(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "UNIT_BYTES", 30)
    path = write_rows(tmp_path / "few.jsonl", ["row 0", "row 1", "row 2"])
    prepared = run(path, tmp_path / "out", validation_fraction=1e-9)
    assert (len(documents(prepared)), len(documents(prepared, "validation"))) == (2, 1)


@pytest.mark.extras
def test_every_format_gives_the_same_documents(tmp_path, monkeypatch):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    datasets = pytest.importorskip("datasets")
    texts = [f"row {number} ☃\nsecond line" * (number % 5 + 1) for number in range(700)]
    lines = write_rows(tmp_path / "a.jsonl", texts).read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    frames = [pyarrow.compress(part, "zstd", asbytes=True) for part in (lines[:5000], lines[5000:])]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    table = pyarrow.table({"id": list(range(700)), "text": texts})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=64)
    datasets.Dataset.from_dict({"id": table["id"], "text": texts}).save_to_disk(tmp_path / "set")
    for unit_bytes in (1 << 30, 2000):
        monkeypatch.setattr(reading, "UNIT_BYTES", unit_bytes)
        for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"):
            assert documents(run(tmp_path / name, tmp_path / f"{unit_bytes} {name}")) == texts, name
    assert len(units(tmp_path / "a.parquet")) == 11  # a row group each
    words = ["--from", "hf", "--validation-fraction", "0", "--output", str(tmp_path / "out")]
    assert main(["prepare", str(tmp_path / "set"), *words]) == 0
    assert documents(TokenStore(tmp_path / "out")) == texts


def test_prompts_and_unmarked_segments_are_not_targets(tmp_path):
    rows = [
        {"text": "plain"},
        {"prompt": "ask", "completion": "yes"},
        {"segments": [{"text": "a", "loss": True}, {"text": "bc", "loss": False}]},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared = run(tmp_path / "a.jsonl", tmp_path / "out")
    part = prepared.splits["train"]
    mask = part.may_be_target(0, part.tokens).astype(int).tolist()
    assert documents(prepared) == ["plain", "askyes", "abc"]
    assert mask == [1] * 6 + [0, 0, 0, 1, 1, 1, 1] + [1, 0, 0, 0]


def make_tokenizer(path: Path, special: list[str]) -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 20], trainer)
    tokenizer.save(str(path))
    return tokenizer


@pytest.mark.extras
def test_any_tokenizer_json_gives_its_own_ids_and_end(tmp_path):
    (tmp_path / "a.txt").write_text("the quick dog")
    library = make_tokenizer(tmp_path / "own.json", ["<|endoftext|>"])
    prepared = run(tmp_path / "a.txt", tmp_path / "out", tokenizer=str(tmp_path / "own.json"))
    part, end = prepared.splits["train"], library.token_to_id("<|endoftext|>")
    expected = [*library.encode("the quick dog", add_special_tokens=False).ids, end]
    assert part.ids(0, part.tokens).tolist() == expected
    assert prepared.manifest["tokenizer"]["end_id"] == end
    # A vocabulary without an end token gets one more id, in the smallest type that holds it.
    make_tokenizer(tmp_path / "none.json", [])
    manifest = run(
        tmp_path / "a.txt", tmp_path / "b", tokenizer=str(tmp_path / "none.json")
    ).manifest
    assert manifest["tokenizer"]["end_id"] == manifest["tokenizer"]["vocab_size"] - 1
    assert manifest["dtype"] == "|u1"
    sizes = (256, 257, 65536, 65537)
    assert [store.token_dtype(size) for size in sizes] == ["|u1", "<u2", "<u2", "<u4"]


@pytest.mark.extras("tokenizers")
def test_a_wrong_tokenizer_is_named(tmp_path):
    (tmp_path / "broken.json").write_text("{}")
    (tmp_path / "a.txt").write_text("text")
    for name, message in (
        ("nowhere.json", "must be 'bytes' or the path of a tokenizer.json"),
        ("broken.json", "is not a readable tokenizer.json"),
    ):
        assert message in error(
            tmp_path / "a.txt", tmp_path / "out", tokenizer=str(tmp_path / name)
        )


GOOD = json.dumps({"text": "good"}).encode() + b"\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", GOOD + b"{broken\n" + GOOD, "a.jsonl:2: not JSON"),
        ("a.jsonl", GOOD + b'\n["list"]\n', "a.jsonl:3: a row must be an object, got list"),
        ("a.jsonl", b'{"body": "x"}\n', "a.jsonl:1: no field data.text_field=text; fields: body"),
        ("a.jsonl", GOOD + b'{"text": 3}\n', "a.jsonl:2: the text is not a string"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "a.jsonl:1: the text has half of a surrogate pair"),
        ("a.jsonl", GOOD + b'{"text": "\xff"}\n', "a.jsonl:2: not UTF-8"),
        ("a.jsonl", GOOD + b"[" * 100_000 + b"\n", "a.jsonl:2: not JSON"),
        ("a.jsonl", GOOD + b'{"segments": [1]}\n', "a.jsonl:2: segments must be"),
        ("a.jsonl", GOOD * 2 + b"x" * (1 << 20), "a.jsonl:3: the line is longer than 524288 bytes"),
        ("a.txt", b"fine\nthen \xe9 latin\n", "a.txt:2: not UTF-8: byte 0xe9"),
        ("a.bin", b"\x7fELF\n\0\n\0", "a.bin:2: binary: it has zero bytes"),
        ("a.jsonl.gz", gzip.compress(GOOD * 3000)[:-20], "a.jsonl.gz:"),
        ("a\nparallel2d: \x1b[2J.jsonl", b"{", "a\\nparallel2d: \\x1b[2J.jsonl:1: not JSON"),
        ("a.jsonl", b'{"\\n\\u001b[2J": 1}\n', "fields: \\n\\x1b[2J"),
        ("a.txt.gz", b"not gzip", "a.txt.gz:1: cannot be read from here on: Not a gzipped file"),
    ],
)
def test_bad_input_is_reported_with_file_and_line(tmp_path, monkeypatch, name, content, message):
    monkeypatch.setattr(reading, "ROW_BYTES", 1 << 19)
    (tmp_path / name).write_bytes(content)
    text = error(tmp_path / name, tmp_path / "out")
    allowed = "has 1 bad rows, data.max_bad_rows=0 are allowed: "
    assert text.startswith(f"data.path={tmp_path / name} {allowed}")
    assert message in text


def test_the_line_of_a_bad_row_is_counted_from_the_start_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "UNIT_BYTES", 50)
    (tmp_path / "a.jsonl").write_bytes(GOOD * 40 + b"{broken\n" + GOOD * 9)
    assert "a.jsonl:41: not JSON" in error(tmp_path / "a.jsonl", tmp_path / "out")
    (tmp_path / "a.txt").write_bytes(b"a line\n" * 40 + b"\xff\n" + b"a line\n" * 9)
    assert "a.txt:41: not UTF-8" in error(tmp_path / "a.txt", tmp_path / "out2")


@pytest.mark.extras
def test_bad_tables_and_damaged_zstandard_files_are_reported(tmp_path, monkeypatch):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(reading, "UNIT_BYTES", 100)
    (tmp_path / "a.parquet").write_text("not a table")
    assert "is not a readable Parquet file" in error(tmp_path / "a.parquet", tmp_path / "out")
    table = pyarrow.table({"text": [*["good"] * 40, None]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    for workers in (1, 2):
        with pytest.raises(ConfigError, match="a.parquet:41: the text is not a string"):
            run(tmp_path / "a.parquet", tmp_path / "out", workers=workers)
    parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "a.parquet")
    found = error(tmp_path / "a.parquet", tmp_path / "out")
    assert "a.parquet:1: no field data.text_field=text; fields: body" in found
    rows = b"".join(b'{"text": "%d"}\n' % number for number in range(40_000))
    data = pyarrow.compress(rows, "zstd", asbytes=True)
    for damaged in (data[:400], data[: len(data) // 2], data[:-3], bytes(20) + data[20:]):
        (tmp_path / "a.jsonl.zst").write_bytes(damaged)
        assert "cannot be read from here on" in error(tmp_path / "a.jsonl.zst", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("a.txt.gz", b"a line\n", "a.txt.gz:"),
        ("a.txt.gz", b"a", "a.txt.gz:1: cannot be read from here on: it expands to more than 100"),
        (
            "a.jsonl.gz",
            b"{\n",
            "has 1001 bad rows, data.max_bad_rows=0 are allowed: a.jsonl.gz:1: not",
        ),
    ],
)
def test_unbounded_text_gives_one_message(tmp_path, monkeypatch, name, line, message):
    monkeypatch.setattr(reading, "_FREE_BYTES", 1 << 20)
    (tmp_path / name).write_bytes(gzip.compress(line * (8 << 20)))
    assert message in error(tmp_path / name, tmp_path / "out")


def test_allowed_bad_rows_are_omitted_and_counted(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(GOOD + b"{broken\n" + GOOD + b"3\n\n" + GOOD)
    found = error(tmp_path / "a.jsonl", tmp_path / "out", max_bad_rows=1)
    assert "has 2 bad rows, data.max_bad_rows=1" in found
    prepared = run(tmp_path / "a.jsonl", tmp_path / "out", max_bad_rows=2)
    assert documents(prepared) == ["good"] * 3
    assert (prepared.manifest["bad_rows"], prepared.manifest["empty_documents"]) == (2, 0)
    # A damaged file counts once, and rows before the damage are kept.
    lines = b"".join(b"%d is a line\n" % number for number in range(60_000))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(lines)[:-2000])
    kept = documents(run(tmp_path / "b.txt.gz", tmp_path / "cut", max_bad_rows=1))
    assert len("".join(kept)) > len(lines) // 2
    assert lines.decode().startswith("".join(kept))


@pytest.mark.parametrize(
    ("content", "fraction", "message"),
    [
        ({}, 0.0, "has no document with text"),
        ({"a.jsonl": '{"text": ""}\n\n'}, 0.0, "has no document with text"),
        (
            {"a.txt": "one"},
            0.1,
            "is one document, which cannot be split; data.validation_fraction=0.1",
        ),
    ],
)
def test_input_without_text_is_refused(tmp_path, content, fraction, message):
    (tmp_path / "in").mkdir()
    for name, text in content.items():
        (tmp_path / "in" / name).write_text(text)
    assert message in error(tmp_path / "in", tmp_path / "out", validation_fraction=fraction)


def test_shards_do_not_depend_on_the_number_of_workers(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "UNIT_BYTES", 60_000)
    assert len(units(corpus)) >= 5
    run(corpus, tmp_path / "one", validation_fraction=0.2)
    run(corpus, tmp_path / "two", validation_fraction=0.2, workers=2)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    # Workers that end leave their units to the parent. A kill is not taken for an end.
    monkeypatch.setattr(sys, "executable", "/bin/false")
    run(corpus, tmp_path / "ended", validation_fraction=0.2, workers=2)
    assert files(tmp_path / "one") == files(tmp_path / "ended")
    (tmp_path / "killed").write_text("#!/bin/sh\nkill -9 $$\n")
    (tmp_path / "killed").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "killed"))
    with pytest.raises(RuntimeError, match="was killed by signal 9; finished units are kept"):
        run(corpus, tmp_path / "out", workers=2)


def _killed_at(event: int, path: Path, folder: Path) -> bool:
    """Prepares in a child that kills itself at its n-th write, rename or record; whether it was killed."""
    child = os.fork()
    if child == 0:
        seen = 0

        def count(function: Any) -> Any:
            def counted(*arguments: Any) -> Any:
                nonlocal seen
                seen += 1
                if seen == event:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments)

            return counted

        ShardWriter._append = count(ShardWriter._append)  # type: ignore[method-assign]
        os.replace, os.fsync, os.unlink = count(os.replace), count(os.fsync), count(os.unlink)
        try:
            run(path, folder, validation_fraction=0.2)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def test_a_kill_at_any_write_is_resumed_to_identical_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "UNIT_BYTES", 500)
    path = write_rows(tmp_path / "in.jsonl", [f"row {n}" * (n % 9) for n in range(40)])
    run(path, tmp_path / "whole", validation_fraction=0.2)
    event, kills = 1, 0
    while _killed_at(event, path, folder := tmp_path / f"out-{event}"):
        kills += 1
        if (folder / store.MANIFEST).exists():
            assert verify(folder) > 0  # a published shard is complete
        _killed_at(event // 2 + 1, path, folder)  # and once more while it resumes
        run(path, folder, validation_fraction=0.2)
        assert files(folder) == files(tmp_path / "whole"), event
        event += 7
    assert kills >= 8


def test_finished_units_are_kept_when_preparing_is_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "UNIT_BYTES", 500)
    path = write_rows(tmp_path / "in.jsonl", [f"row {n}" for n in range(200)])
    read: list[int] = []
    real = preparation.run_unit

    def broken(job: preparation.UnitJob, tokenizer: Any) -> None:
        read.append(job.number)
        if len(read) == 4:
            raise KeyboardInterrupt
        real(job, tokenizer)

    monkeypatch.setattr(preparation, "run_unit", broken)
    with pytest.raises(KeyboardInterrupt):
        run(path, tmp_path / "out")
    with pytest.raises(ConfigError, match="is unfinished"):
        TokenStore(tmp_path / "out")
    run(path, tmp_path / "out", max_bad_rows=5)  # which changes no unit
    assert read == [0, 1, 2, 3, *range(3, len(units(path)))]


def test_a_finished_folder_is_kept_and_other_input_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").write_text("other")
    run(tmp_path / "a.txt", tmp_path / "out")
    before = (tmp_path / "out" / store.MANIFEST).stat().st_mtime_ns
    run(tmp_path / "a.txt", tmp_path / "out")
    assert (tmp_path / "out" / store.MANIFEST).stat().st_mtime_ns == before
    for path, options in (("b.txt", {}), ("a.txt", {"validation_fraction": 0.5})):
        with pytest.raises(ConfigError, match="already holds data prepared from other input or"):
            run(tmp_path / path, tmp_path / "out", **options)
    assert documents(TokenStore(tmp_path / "out")) == ["text"]


def test_verify_finds_damage(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    run(tmp_path / "a.txt", tmp_path / "out")
    tokens = tmp_path / "out" / "train-00000.tokens"
    whole = tokens.read_bytes()
    tokens.write_bytes(b"X" + whole[1:])
    with pytest.raises(ConfigError, match=r"train-00000.tokens is damaged: sha256"):
        verify(tmp_path / "out")
    tokens.write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match=r"has 9 bytes, the manifest says 10"):
        TokenStore(tmp_path / "out")
    tokens.unlink()
    with pytest.raises(ConfigError, match="is missing"):
        TokenStore(tmp_path / "out")
    for text, message in (("{", "manifest.json cannot be read"), ("{}", "is not of the format")):
        (tmp_path / "out" / store.MANIFEST).write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_manifest(tmp_path / "out")


def test_the_command_prepares_inspects_and_verifies(corpus, tmp_path, capsys):
    out = str(tmp_path / "out")
    words = ["--output", out, "--workers", "1", "--validation-fraction", "0.2"]
    assert main(["prepare", str(corpus), *words]) == 0
    assert "documents, validation" in capsys.readouterr().out
    assert main(["inspect", out]) == 0
    assert '"vocab_size": 257' in capsys.readouterr().out
    assert main(["verify", out]) == 0
    assert "every checksum is right" in capsys.readouterr().out


def test_the_command_reports_one_message_and_a_code(tmp_path, capsys):
    out = ["--output", str(tmp_path / "out")]
    glob = str(tmp_path / "no" / "*.txt")
    for arguments, message in (
        (["prepare", glob, *out], f"data.path={glob} is not a file or folder, and as a glob"),
        (["prepare", "x", "--validation-fraction", "2", *out], "data.validation_fraction=2.0 must"),
        (["prepare", "x", "--workers", "many", *out], "data.workers=many must be a whole number"),
        (["verify", str(tmp_path)], "is not a prepared folder"),
    ):
        assert main(arguments) == 2
        text = capsys.readouterr().err
        assert text.startswith("parallel2d: ")
        assert message in text
        assert "Traceback" not in text


SECRET = "the private key"
CARD = "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: {}\n---\n"


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A folder next to a private file; no address may be contacted."""
    (tmp_path / "set").mkdir()
    (tmp_path / "private.jsonl").write_text(json.dumps({"text": SECRET}) + "\n")
    (tmp_path / "set" / "train.jsonl").write_bytes(GOOD)

    def refuse(_socket: Any, address: Any) -> None:
        raise AssertionError(f"{address} was contacted")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", lambda *address, **_: refuse(None, address))
    return tmp_path / "set"


def prepare_data_set(folder: Path, out: Path) -> TokenStore:
    config = DataConfig(name="hf", path=str(folder), validation_fraction=0.0, workers=1)
    with preparation.folder_lock(out) as lock:
        return preparation.prepare(config, *reading.find_units(config), out, lock)


@pytest.mark.extras("datasets")
@pytest.mark.parametrize(
    "pattern",
    [
        "{outside}/private.jsonl",
        "../private.jsonl",
        "'**/../../private.jsonl'",
        "http://a.example/x.jsonl",
        "'file:{outside}/private.jsonl'",
        "hf://datasets/a/b/x.jsonl",
        "~/private.jsonl",
        "link.jsonl",
        "'*.jsonl'",
        "'zip://x.jsonl::a.zip'",
    ],
)
def test_a_readme_names_files_inside_the_folder_only(hostile, tmp_path, pattern):
    (hostile / "README.md").write_text(CARD.format("train.jsonl"))
    assert documents(prepare_data_set(hostile, tmp_path / "good")) == ["good"]
    (hostile / "README.md").write_text(CARD.format(pattern.format(outside=tmp_path)))
    (hostile / "link.jsonl").symlink_to("../private.jsonl")
    with pytest.raises(ConfigError, match="outside of it|leads out of its folder"):
        prepare_data_set(hostile, tmp_path / "out")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A server with the addresses of the Hub. Returns the files of its data set ``a/b``, by name,
    and the names of the downloaded files."""
    constants = pytest.importorskip("huggingface_hub.constants")
    files: dict[str, bytes] = {}
    downloaded: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.partition("/resolve/")[2].partition("/")[2]
            siblings = [{"rfilename": each} for each in files]
            revision = hashlib.sha256(repr(files).encode()).hexdigest()[:40]
            described: Any = {"id": "a/b", "sha": revision, "siblings": siblings}
            if "/tree/" in self.path:
                described = []
                for each, value in files.items():
                    entry = {"type": "file", "path": each, "size": len(value), "oid": "0" * 40}
                    described.append(entry)
            content = json.dumps(described).encode()
            if name:
                content = files.get(name)
                downloaded.extend([name] * (self.command == "GET"))
            self.send_response(404 if content is None else 200)
            self.send_header("X-Repo-Commit", revision)
            self.send_header("ETag", f'"{hashlib.sha256(content or b"").hexdigest()}"')
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content or b"")

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    data_set_folder.download.cache_clear()
    yield files, downloaded
    data_set_folder.download.cache_clear()
    server.shutdown()


@pytest.mark.extras("datasets")
def test_data_sets_on_the_hub_are_read_as_folders(hub, tmp_path, monkeypatch):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    files, downloaded = hub
    files |= {"data/train-0.jsonl": GOOD, "data/test-0.jsonl": b"other", "more/x.bin": b"0"}
    assert documents(prepare_data_set("a/b", tmp_path / "good")) == ["good"]
    assert downloaded == ["data/train-0.jsonl"]
    # A table that expands ends as in a folder.
    monkeypatch.setattr(reading, "_FREE_BYTES", 1 << 20)
    value = pyarrow.DictionaryArray.from_arrays([0] * 9999, ["a" * (1 << 16)])
    parquet.write_table(pyarrow.table({"text": value}), tmp_path / "x", compression="zstd")
    files.clear()
    files["train.parquet"] = (tmp_path / "x").read_bytes()
    data_set_folder.download.cache_clear()
    with pytest.raises(ConfigError, match="it expands to more than 100 times its size"):
        prepare_data_set("a/b", tmp_path / "out")
    files["../../x.jsonl"] = GOOD
    data_set_folder.download.cache_clear()
    with pytest.raises(ConfigError, match=r"it has a file ../../x.jsonl"):
        prepare_data_set("a/b", tmp_path / "out")


@pytest.mark.extras("datasets")
def test_a_saved_data_set_names_files_inside_the_folder_only(hostile, tmp_path):
    datasets = pytest.importorskip("datasets")
    for name, text in (("private", SECRET), ("set", "good")):
        datasets.Dataset.from_dict({"text": [text]}).save_to_disk(tmp_path / name)
    assert documents(prepare_data_set(hostile, tmp_path / "good")) == ["good"]
    state = json.loads((hostile / "state.json").read_text())
    for name in ("../private/data-00000-of-00001.arrow", str(tmp_path / "private/state.json")):
        state["_data_files"] = [{"filename": name}]
        (hostile / "state.json").write_text(json.dumps(state))
        with pytest.raises(ConfigError, match="leads out of its folder"):
            prepare_data_set(hostile, tmp_path / "out")


@pytest.mark.parametrize("pattern", ["", "*.txt"])
def test_links_out_of_a_folder_of_text_are_not_followed(hostile, tmp_path, pattern):
    (hostile / "a.txt").write_text("good")
    (hostile / "b.txt").symlink_to("a.txt")
    assert documents(run(hostile / "*.txt", tmp_path / "good")) == ["good", "good"]
    (hostile / "b.txt").unlink()
    (hostile / "b.txt").symlink_to("../private.jsonl")
    assert "leads out of its folder" in error(hostile / pattern, tmp_path / "out")


@pytest.mark.extras("pyarrow")
def test_tables_that_expand_take_bounded_memory_and_end(tmp_path, monkeypatch):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(reading, "ROW_BYTES", 1 << 20)
    monkeypatch.setattr(reading, "_FREE_BYTES", 1 << 20)
    value = "a" * (1 << 19)
    indices = pyarrow.array([0] * 10_000, pyarrow.int32())
    shared = pyarrow.DictionaryArray.from_arrays(indices, [value])
    parquet.write_table(pyarrow.table({"text": shared}), tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 5000
    found = error(tmp_path / "a.parquet", tmp_path / "out")
    assert "a.parquet:3: cannot be read from here on: it expands to more than 100 times" in found
    assert pyarrow.default_memory_pool().max_memory() < 64 << 20
    # A single row of many parts
    parts = pyarrow.StructArray.from_arrays(
        [shared, pyarrow.array([True] * 10_000)], ["text", "loss"]
    )
    rows = pyarrow.ListArray.from_arrays([0, 10_000], parts)
    parquet.write_table(pyarrow.table({"segments": rows}), tmp_path / "a.parquet")
    assert "it expands to more than 100" in error(tmp_path / "a.parquet", tmp_path / "out")


CHARSMAP = base64.b64encode((4).to_bytes(4, "little") + bytes(4) + b"a" * 9000).decode()


@pytest.mark.extras("tokenizers")
@pytest.mark.parametrize(("change", "message"), [
    ({"normalizer": {"type": "Replace", "pattern": {"String": "q"}, "content": "a" * 5000}},
        "5000 times longer"),
    ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "a" * 99}] * 3}},
        "times longer"),
    ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}},
        "is not a readable|times longer"),
    ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated",
        "invert": False}}, "is not a"),
    ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["x", "y"]]}}, "is not a readable"),
])  # fmt: skip
def test_hostile_tokenizer_gives_one_message(tmp_path, capfd, change, message):
    make_tokenizer(tmp_path / "t.json", [])
    settings = json.loads((tmp_path / "t.json").read_text())
    (tmp_path / "t.json").write_text(json.dumps({**settings, **change}))
    (tmp_path / "a.txt").write_text("the quick dog")
    found = error(tmp_path / "a.txt", tmp_path / "out", tokenizer=str(tmp_path / "t.json"))
    assert re.search(message, found), found
    assert "panicked" not in capfd.readouterr().err


def test_a_link_in_a_prepared_folder_is_not_followed(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    run(tmp_path / "a.txt", tmp_path / "out")
    tokens = tmp_path / "out" / "train-00000.tokens"
    tokens.rename(tmp_path / "private")
    tokens.symlink_to("../private")
    with pytest.raises(ConfigError, match="leads out of its folder"):
        TokenStore(tmp_path / "out")
