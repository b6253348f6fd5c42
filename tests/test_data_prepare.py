"""Preparing token shards: formats, bad input, determinism, and what a kill leaves behind."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallel2d.data import reading as sources
from parallel2d.data import token_shards as store
from parallel2d.data.__main__ import main
from parallel2d.data.cache import files_identity
from parallel2d.data.documents import ReadOptions
from parallel2d.data.prepare import PrepareOptions, prepare
from parallel2d.data.reading import find_files, plan_units
from parallel2d.data.token_shards import ShardWriter, TokenStore, read_manifest, verify
from parallel2d.errors import ConfigError

END = 256
ALL = PrepareOptions(validation_fraction=0)


def run(path: Path, folder: Path, options: PrepareOptions = ALL, workers: int = 1) -> TokenStore:
    units = plan_units(find_files(str(path)))
    return prepare(units, options, folder, source=f"data.path={path}", workers=workers)


def documents(prepared: TokenStore, split: str = "train") -> list[str]:
    part = prepared.splits[split]
    found = []
    for number in range(part.documents):
        begin, end = part.document_span(number)
        tokens = np.concatenate(part.slices(begin, end - begin))
        assert tokens[-1] == END
        found.append(tokens[:-1].astype(np.uint8).tobytes().decode())
    return found


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


def error(path: Path, folder: Path, options: PrepareOptions = ALL) -> str:
    """The message of the error that preparing raises, after checking that nothing was published."""
    with pytest.raises(ConfigError) as caught:
        run(path, folder, options)
    assert not (folder / store.MANIFEST).exists()
    assert not list(folder.glob("*.tmp"))
    return str(caught.value)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """60 small files, one long one, an empty one and a hidden one."""
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    for number in range(60):
        (folder / f"{number:02d}.txt").write_text(
            f"document {number} é\n" * (number + 1), encoding="utf-8"
        )
    (folder / "deep" / "long.txt").write_text(
        "".join(f"line {n} ☃ of the long file\n" for n in range(9000))
    )
    (folder / "empty.txt").touch()
    (folder / ".hidden").write_bytes(b"\0")
    return folder


def test_text_is_kept_to_the_last_character_and_sorted_by_name(
    corpus: Path, tmp_path: Path
) -> None:
    prepared = run(corpus, tmp_path / "out")
    names = sorted(path.relative_to(corpus).as_posix() for path in corpus.rglob("*.txt"))
    assert "".join(documents(prepared)) == "".join(
        (corpus / name).read_text("utf-8") for name in names
    )
    long = [document for document in documents(prepared) if document.startswith("line")]
    assert len(long) > 3  # cut, and at line ends only
    assert all(
        document.endswith("\n") and len(document.encode()) < 2 * (64 << 10) for document in long
    )
    assert prepared.manifest["dtype"] == "<u2"
    assert verify(tmp_path / "out") > 0


@pytest.mark.parametrize("unit_bytes", [5, 13, 1000, 1 << 30])
def test_units_cut_files_without_losing_or_repeating_a_line(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit_bytes: int
) -> None:
    monkeypatch.setattr(sources, "UNIT_BYTES", unit_bytes)
    path = tmp_path / "cut.txt"
    path.write_text("é\n\nlonger line of text\nlast without end ☃" * 3, encoding="utf-8")
    assert "".join(documents(run(path, tmp_path / "out"))) == path.read_text("utf-8")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(20)))
    assert documents(run(rows, tmp_path / "rows")) == [f"row {n}" for n in range(20)]


def test_the_split_depends_on_content_only(tmp_path: Path) -> None:
    options = PrepareOptions(validation_fraction=0.3)
    texts = [f"text {number}" for number in range(200)]
    one, many = tmp_path / "one.jsonl", tmp_path / "many"
    one.write_text("".join(json.dumps({"text": text}) + "\n" for text in reversed(texts)))
    many.mkdir()
    for number, text in enumerate(texts):
        (many / f"{number}.txt").write_text(text)
    first, second = run(one, tmp_path / "a", options), run(many, tmp_path / "b", options)
    assert set(documents(first, "validation")) == set(documents(second, "validation"))
    assert 30 < len(documents(first, "validation")) < 90
    assert sorted(documents(first) + documents(first, "validation")) == sorted(texts)


def test_a_fraction_that_selects_no_document_still_holds_one_out(tmp_path: Path) -> None:
    path = tmp_path / "few.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(3)))
    prepared = run(path, tmp_path / "out", PrepareOptions(validation_fraction=1e-9))
    assert (len(documents(prepared)), len(documents(prepared, "validation"))) == (2, 1)


@pytest.mark.extras
def test_every_format_gives_the_same_documents(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    zstandard = pytest.importorskip("zstandard")
    texts = [f"row {number} ☃\nsecond line" * (number % 5 + 1) for number in range(700)]
    lines = "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    frames = zstandard.compress(lines[:5000]) + zstandard.compress(lines[5000:])
    (tmp_path / "a.jsonl.zst").write_bytes(frames)
    table = pyarrow.table({"id": list(range(700)), "text": texts})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=64)
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"):
        assert documents(run(tmp_path / name, tmp_path / f"out-{name}")) == texts, name


@pytest.mark.extras
def test_parquet_is_cut_at_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(sources, "UNIT_BYTES", 2000)
    texts = [f"row {number}" for number in range(500)]
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet", row_group_size=50)
    assert len(plan_units(find_files(str(tmp_path / "a.parquet")))) > 2
    assert documents(run(tmp_path / "a.parquet", tmp_path / "out")) == texts


@pytest.mark.extras
def test_a_hugging_face_data_set_is_read_like_rows(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    texts = [f"row {number}" for number in range(300)]
    datasets.Dataset.from_dict({"id": list(range(300)), "body": texts}).save_to_disk(
        tmp_path / "set"
    )
    arguments = [
        str(tmp_path / "set"),
        "--from",
        "hf",
        "--text-field",
        "body",
        "--validation-fraction",
        "0",
    ]
    assert main(["prepare", *arguments, "--output", str(tmp_path / "out"), "--workers", "1"]) == 0
    assert documents(TokenStore(tmp_path / "out")) == texts


def test_prompts_and_unmarked_segments_are_no_targets(tmp_path: Path) -> None:
    rows = [
        {"prompt": "ask", "completion": "yes"},
        {"segments": [{"text": "a", "loss": True}, {"text": "bc", "loss": False}]},
        {"text": "plain"},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared = run(tmp_path / "a.jsonl", tmp_path / "out")
    part = prepared.splits["train"]
    mask = part.may_be_target(0, part.tokens).astype(int).tolist()
    assert documents(prepared) == ["askyes", "abc", "plain"]
    assert mask == [0, 0, 0, 1, 1, 1, 1] + [1, 0, 0, 0] + [1] * 6


def make_tokenizer(path: Path, special: list[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 20], trainer)
    tokenizer.save(str(path))


@pytest.mark.extras
def test_any_tokenizer_json_gives_its_own_ids_and_end(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "tokenizer.json", ["<|endoftext|>"])
    library = pytest.importorskip("tokenizers").Tokenizer.from_file(
        str(tmp_path / "tokenizer.json")
    )
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "the quick dog"}) + "\n")
    options = PrepareOptions(str(tmp_path / "tokenizer.json"), validation_fraction=0)
    prepared = run(tmp_path / "a.jsonl", tmp_path / "out", options)
    part = prepared.splits["train"]
    end = library.token_to_id("<|endoftext|>")
    expected = [*library.encode("the quick dog", add_special_tokens=False).ids, end]
    assert np.concatenate(part.slices(0, part.tokens)).tolist() == expected
    assert prepared.manifest["tokenizer"]["end_id"] == end


@pytest.mark.extras
def test_a_tokenizer_without_an_end_gets_one_more_id_in_the_smallest_type(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "tokenizer.json", [])
    (tmp_path / "a.txt").write_text("the quick dog")
    options = PrepareOptions(str(tmp_path / "tokenizer.json"), validation_fraction=0)
    manifest = run(tmp_path / "a.txt", tmp_path / "out", options).manifest
    assert manifest["tokenizer"]["end_id"] == manifest["tokenizer"]["vocab_size"] - 1
    assert manifest["dtype"] == "|u1"
    assert [store.token_dtype(size) for size in (256, 257, 65536, 65537)] == [
        "|u1",
        "<u2",
        "<u2",
        "<u4",
    ]


@pytest.mark.extras
@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ("nowhere.json", "must be 'bytes' or the path of a tokenizer.json"),
        ("broken.json", "is not a readable tokenizer.json"),
    ],
)
def test_a_wrong_tokenizer_is_named(tmp_path: Path, tokenizer: str, message: str) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "broken.json").write_text("{}")
    (tmp_path / "a.txt").write_text("text")
    options = PrepareOptions(str(tmp_path / tokenizer), validation_fraction=0)
    assert message in error(tmp_path / "a.txt", tmp_path / "out", options)


GOOD = json.dumps({"text": "good"}).encode() + b"\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", GOOD + b"{broken\n" + GOOD, "a.jsonl:2: not JSON"),
        ("a.jsonl", GOOD + b'["list"]\n', "a.jsonl:2: a row must be an object, got list"),
        (
            "a.jsonl",
            GOOD + b'{"body": "x"}\n',
            "a.jsonl:2: no field data.text_field=text; fields: body",
        ),
        ("a.jsonl", GOOD + b'{"text": 3}\n', "a.jsonl:2: the text is not a string"),
        (
            "a.jsonl",
            GOOD + b'{"text": "\\ud800"}\n',
            "a.jsonl:2: the text has half a surrogate pair",
        ),
        ("a.jsonl", GOOD + b'{"text": "\xff"}\n', "a.jsonl:2: not UTF-8"),
        ("a.jsonl", GOOD + b"[" * 100_000 + b"\n", "a.jsonl:2: not JSON"),
        ("a.jsonl", GOOD + b'{"segments": [1]}\n', "a.jsonl:2: segments must be"),
        (
            "a.jsonl",
            GOOD * 2 + b'{"text": "' + b"x" * 5000 + b'"}\n',
            "a.jsonl:3: the line is longer than 4096 bytes",
        ),
        ("a.txt", b"fine\nthen \xe9 latin\n", "a.txt:2: not UTF-8: byte 0xe9"),
        ("a.bin", b"\x7fELF\0\0\n\0", "a.bin:1: binary: it has zero bytes"),
        ("a.txt", "\ufeffwide".encode("utf-16"), "a.txt:1: not UTF-8"),
        ("a.jsonl.gz", gzip.compress(GOOD * 3000)[:-20], "a.jsonl.gz:"),
        (
            "a.txt.gz",
            b"not gzip at all",
            "a.txt.gz:1: the compressed file is damaged: Not a gzipped file",
        ),
    ],
)
def test_bad_input_is_reported_with_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, message: str
) -> None:
    monkeypatch.setattr(sources, "ROW_BYTES", 4096)
    if b"[[[" in content:
        monkeypatch.setattr(sources, "ROW_BYTES", 1 << 20)
    (tmp_path / name).write_bytes(content)
    text = error(tmp_path / name, tmp_path / "out")
    assert text.startswith(
        f"data.path={tmp_path / name} has 1 bad rows, data.max_bad_rows=0 are allowed: "
    )
    assert message in text


def test_the_line_of_a_bad_row_is_counted_from_the_start_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "UNIT_BYTES", 50)
    (tmp_path / "a.jsonl").write_bytes(GOOD * 40 + b"{broken\n" + GOOD * 9)
    assert "a.jsonl:41: not JSON" in error(tmp_path / "a.jsonl", tmp_path / "out")
    (tmp_path / "a.txt").write_bytes(b"a line\n" * 40 + b"\xff\n" + b"a line\n" * 9)
    assert "a.txt:41: not UTF-8" in error(tmp_path / "a.txt", tmp_path / "out2")


@pytest.mark.extras
@pytest.mark.parametrize("cut", [0.02, 0.5, 0.97])
def test_a_cut_off_zstandard_file_is_noticed(tmp_path: Path, cut: float) -> None:
    data = pytest.importorskip("zstandard").compress(
        b"".join(b'{"text": "%d"}\n' % n for n in range(40_000))
    )
    (tmp_path / "a.jsonl.zst").write_bytes(data[: int(len(data) * cut)])
    assert "the compressed file is damaged" in error(tmp_path / "a.jsonl.zst", tmp_path / "out")
    (tmp_path / "b.jsonl.zst").write_bytes(bytes(20) + data[20:])
    assert "the compressed file is damaged" in error(tmp_path / "b.jsonl.zst", tmp_path / "out")


def test_allowed_bad_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD + b"{broken\n" + GOOD + b"3\n" + GOOD)
    options = PrepareOptions(validation_fraction=0, max_bad_rows=2)
    assert "has 2 bad rows, data.max_bad_rows=1" in error(
        tmp_path / "a.jsonl",
        tmp_path / "out",
        PrepareOptions(validation_fraction=0, max_bad_rows=1),
    )
    prepared = run(tmp_path / "a.jsonl", tmp_path / "out", options)
    assert documents(prepared) == ["good"] * 3
    assert prepared.manifest["bad_rows"] == 2


def test_a_line_longer_than_a_document_is_cut_between_characters(tmp_path: Path) -> None:
    text = "é☃𝄞" * 30_000
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    prepared = run(
        tmp_path / "a.txt",
        tmp_path / "out",
        PrepareOptions(validation_fraction=0, read=ReadOptions("", 1000)),
    )
    assert "".join(documents(prepared)) == text
    assert max(len(document.encode()) for document in documents(prepared)) <= 2003


@pytest.mark.parametrize(
    ("content", "fraction", "message"),
    [
        ({}, 0, "is a folder without files"),
        ({"a.txt": ""}, 0, "has no document with text"),
        ({"a.jsonl": '{"text": ""}\n\n'}, 0, "has no document with text"),
        (
            {"a.txt": "one"},
            0.1,
            "is one document, which cannot be split; data.validation_fraction=0.1 must be 0 here",
        ),
        pytest.param(
            {"a.parquet": "not a table"},
            0,
            "a.parquet is not a readable Parquet file",
            marks=pytest.mark.extras,
        ),
    ],
)
def test_input_without_text_is_refused(
    tmp_path: Path, content: dict[str, str], fraction: float, message: str
) -> None:
    if "a.parquet" in content:
        pytest.importorskip("pyarrow")
    (tmp_path / "in").mkdir()
    for name, text in content.items():
        (tmp_path / "in" / name).write_text(text)
    assert message in error(
        tmp_path / "in", tmp_path / "out", PrepareOptions(validation_fraction=fraction)
    )


def test_a_path_that_is_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"nowhere/\*.txt is no file, no folder, and as a glob it matches no file"
    ):
        find_files(str(tmp_path / "nowhere" / "*.txt"))


def test_shards_do_not_depend_on_the_number_of_workers(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "UNIT_BYTES", 60_000)
    options = PrepareOptions(validation_fraction=0.2)
    assert len(plan_units(find_files(str(corpus)))) >= 5
    run(corpus, tmp_path / "one", options, workers=1)
    run(corpus, tmp_path / "two", options, workers=2)
    assert files(tmp_path / "one") == files(tmp_path / "two")


@pytest.mark.extras
def test_an_error_in_a_worker_is_the_same_error(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name in ("a", "b"):
        parquet.write_table(pyarrow.table({"body": ["x"]}), corpus / f"{name}.parquet")
    with pytest.raises(ConfigError, match=r"has no column data\.text_field=text; columns: body"):
        run(corpus, tmp_path / "out", workers=2)
    assert not (tmp_path / "out" / store.MANIFEST).exists()


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    peaks = []
    for megabytes in (3, 12):
        path = tmp_path / f"{megabytes}.txt"
        path.write_text("a line of a long text file\n" * (megabytes * 1_000_000 // 27))
        tracemalloc.start()
        files_identity(find_files(str(path)))
        run(path, tmp_path / f"out-{megabytes}")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]


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
        os.replace, os.fsync = count(os.replace), count(os.fsync)
        try:
            run(path, folder, PrepareOptions(validation_fraction=0.2))
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def test_a_kill_at_any_write_leaves_a_folder_that_is_resumed_to_identical_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "UNIT_BYTES", 500)
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {n}" * (n % 9)}) + "\n" for n in range(40)))
    options = PrepareOptions(validation_fraction=0.2)
    run(path, tmp_path / "whole", options)
    event, kills = 1, 0
    while True:
        folder = tmp_path / f"out-{event}"
        if not _killed_at(event, path, folder):
            break
        kills += 1
        if (folder / store.MANIFEST).exists():
            assert verify(folder) > 0  # published means whole
        _killed_at(event // 2 + 1, path, folder)  # and once more while it resumes
        run(path, folder, options)
        assert files(folder) == files(tmp_path / "whole"), event
        event += 5
    assert kills >= 10


def test_finished_units_are_kept_when_preparing_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "UNIT_BYTES", 500)
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(200)))
    read: list[int] = []
    real = sources.read_unit

    def broken(unit: sources.Unit, options: ReadOptions) -> Any:
        read.append(unit.start)
        if len(read) == 4:
            raise KeyboardInterrupt
        return real(unit, options)

    monkeypatch.setattr("parallel2d.data.prepare.read_unit", broken)
    with pytest.raises(KeyboardInterrupt):
        run(path, tmp_path / "out")
    with pytest.raises(ConfigError, match="is unfinished"):
        TokenStore(tmp_path / "out")
    run(path, tmp_path / "out")
    assert sorted(read) == sorted(
        [*(unit.start for unit in plan_units(find_files(str(path)))), read[3]]
    )


def test_a_finished_folder_is_kept_and_other_input_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").write_text("other")
    run(tmp_path / "a.txt", tmp_path / "out")
    before = (tmp_path / "out" / store.MANIFEST).stat().st_mtime_ns
    run(tmp_path / "a.txt", tmp_path / "out")
    assert (tmp_path / "out" / store.MANIFEST).stat().st_mtime_ns == before
    with pytest.raises(
        ConfigError, match="already holds data prepared from other input or with other options"
    ):
        run(tmp_path / "b.txt", tmp_path / "out")
    assert documents(TokenStore(tmp_path / "out")) == ["text"]


def test_damage_is_found(tmp_path: Path) -> None:
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
    (tmp_path / "out" / store.MANIFEST).write_text("{")
    with pytest.raises(ConfigError, match=r"manifest.json cannot be read"):
        read_manifest(tmp_path / "out")
    (tmp_path / "out" / store.MANIFEST).write_text("[]")
    with pytest.raises(ConfigError, match="is not of the format"):
        read_manifest(tmp_path / "out")


def test_the_command_prepares_inspects_and_verifies(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert (
        main(
            [
                "prepare",
                str(corpus),
                "--output",
                out,
                "--workers",
                "1",
                "--validation-fraction",
                "0.2",
            ]
        )
        == 0
    )
    assert "train" in capsys.readouterr().out
    assert main(["inspect", out]) == 0
    assert '"vocab_size": 257' in capsys.readouterr().out
    assert main(["verify", out]) == 0
    assert "every checksum is right" in capsys.readouterr().out


def test_the_command_reports_one_message_and_a_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--output", str(tmp_path / "out")]
    for arguments, message in (
        (["prepare", "nowhere", *out], "data.path=nowhere is no file"),
        (["prepare", *out], "data.path is required with data=text"),
        (
            ["prepare", "x", "--validation-fraction", "2", *out],
            "data.validation_fraction=2.0 must be at least 0",
        ),
        (
            ["prepare", "x", "--workers", "many", *out],
            "data.workers=many must be a whole number",
        ),
        (["verify", str(tmp_path)], "is not a prepared folder"),
    ):
        assert main(arguments) == 2
        text = capsys.readouterr().err
        assert text.startswith("error: ")
        assert message in text
        assert "Traceback" not in text


@pytest.mark.soak
def test_fifty_random_kills_of_the_command_end_in_identical_shards(tmp_path: Path) -> None:
    """SIGKILL to the command with two workers at a random moment of its life, then run to the end."""
    generator = np.random.default_rng(0)
    corpus = tmp_path / "in"
    corpus.mkdir()
    for part in range(10):  # each compressed file is a unit
        with gzip.open(corpus / f"{part}.jsonl.gz", "wt", compresslevel=1) as file:
            for number in range(1500):
                file.write(
                    json.dumps({"text": f"row {number} " * int(generator.integers(1, 300))}) + "\n"
                )
    command = [
        sys.executable,
        "-m",
        "parallel2d.data",
        "prepare",
        str(corpus),
        "--workers",
        "2",
        "--output",
    ]
    subprocess.run([*command, str(tmp_path / "whole")], check=True, capture_output=True)
    begin = time.monotonic()
    subprocess.run([*command, str(tmp_path / "again")], check=True, capture_output=True)
    duration = time.monotonic() - begin
    kills, moments = 0, []
    while kills < 50:
        folder = tmp_path / f"out-{len(moments)}"
        moments.append(float(generator.uniform(0, duration)))
        process = subprocess.Popen(
            [*command, str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            process.wait(timeout=moments[-1])
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kills += not (folder / store.MANIFEST).exists()  # a kill after the end proves nothing
        subprocess.run([*command, str(folder)], check=True, capture_output=True)
        assert files(folder) == files(tmp_path / "whole"), moments[-1]
        for path in folder.iterdir():
            path.unlink()
    print(f"{kills} kills before the end in {len(moments)} runs of {duration:.1f} s")
