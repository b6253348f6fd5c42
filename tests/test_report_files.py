"""What reports say of given rows, and of directories that are incomplete, hostile or large."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from html import escape
from html.parser import HTMLParser

import pytest
from test_metrics_rows import ROW, make_run

from parallel2d.report.__main__ import main as report
from parallel2d.report.drawings import drawings
from parallel2d.report.page import page
from parallel2d.report.runs import read_run


class Loads(HTMLParser):
    """Collects what a page would load from elsewhere."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        self.found += [value for name, value in attributes if name in ("src", "href", "xlink:href")]
        if tag in ("link", "iframe", "img"):
            self.found.append(tag)


def test_a_report_compares_runs_and_needs_no_network(tmp_path, capsys):
    runs = [make_run(tmp_path / "first"), make_run(tmp_path / "second", "zero3", 2.0)]
    assert report([*map(str, runs), "--markdown", "--out", str(tmp_path / "out")]) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.md"]
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| first | hybrid | 2 x 2 x 1 | - | 10 | 0.3000 | 50 |" in text
    assert "| second | zero3 | 2 x 2 x 1 | - | 10 | 0.6000 | 50 |" in text
    assert "| first | shard MB | 1e-05 | 8e-06 | +25.00% |" in text
    assert "75.0%" in text
    html = page([read_run(str(run)) for run in runs], "")
    loads = Loads()
    loads.feed(html)
    assert loads.found == []
    for title in ("Training loss", "Throughput", "Bytes by axis", "Where a step's time goes"):
        assert f"<figcaption>{escape(title)}</figcaption>" in html
    assert "shard (predicted)" in html


def test_a_report_shows_the_predicted_time_of_a_step_where_there_is_one(tmp_path):
    runs = [make_run(tmp_path / "planned"), make_run(tmp_path / "unplanned")]
    layout = json.loads((runs[0] / "layout.json").read_text())
    layout["predicted"] |= {"time/step_s": ROW["time/step_s"] / 2, "throughput/tokens_per_s": 2 * ROW["throughput/tokens_per_s"]}  # fmt: skip
    (runs[0] / "layout.json").write_text(json.dumps(layout))
    assert report([*map(str, runs), "--out", str(tmp_path / "out"), "--markdown"]) == 0
    text = (tmp_path / "out" / "report.md").read_text()
    _, _, table = text.partition("## Measured and predicted")
    lines = table.partition("##")[0].splitlines()
    rows = [line.split(" | ") for line in lines if "planned" in line]
    assert [row[-1].rstrip(" |") for row in rows if "step" in row[1]] == ["+100.00%"]
    assert [row[-1].rstrip(" |") for row in rows if "tokens" in row[1]] == ["-50.00%"]


def test_a_report_of_one_run_lies_in_it(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "layout.json").unlink()  # an older run
    assert report([str(run), "--markdown"]) == 0
    assert "| run | - | ? x ? x ? | - | 10 |" in (run / "report.md").read_text()


def test_a_report_follows_no_link_out_of_the_run(tmp_path):
    run, outside = make_run(tmp_path / "run"), tmp_path / "outside"
    outside.write_text("mine")
    (run / "report.md").symlink_to(outside)
    assert report([str(run), "--markdown"]) == 0
    assert outside.read_text() == "mine"
    assert not (run / "report.md").is_symlink()
    assert [path.name for path in run.glob("report*")] == ["report.md"]


@pytest.mark.parametrize("what", ["missing", "empty", "torn", "layout"])
def test_a_report_of_something_else_is_one_message(tmp_path, capsys, what):
    folder = tmp_path / "run"
    if what != "missing":
        folder.mkdir()
    if what == "torn":
        (folder / "metrics.jsonl").write_text('{"step": 1, "lo')
    if what == "layout":
        (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
        (folder / "layout.json").write_text("{")
    assert report([str(folder), "--markdown"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"parallel2d: {folder}")
    assert len(said.splitlines()) == 1


NUMBERS = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "1" + "0" * 400,
    "9" * 5000,
    "[1]",
    '"5"',
    "true",
    "null",
    "1e-320",
    "1e308",
    '{"a":1}',
)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_report_takes_no_number_that_is_none(tmp_path, number):
    run = make_run(tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as file:
        file.write(
            f'{{"step": 11, "loss": {number}, "throughput/tokens_per_s": {number}, "comm/shard/bytes": {number}}}\n'
        )
        file.write(f'{{"step": {number}, "loss": 1.0}}\n')
    (run / "layout.json").write_text(
        f'{{"mesh": {number}, "strategy": "hybrid", "predicted": {{"comm/shard/bytes": {number}}}}}'
    )
    if report([str(run), "--markdown"]) == 0:
        drawn = drawings([read_run(str(run))])
        assert drawn
        # Raises ValueError for a number that JSON does not have
        json.dumps([dataclasses.asdict(each) for each in drawn], allow_nan=False)


@pytest.mark.parametrize("name", ["metrics.jsonl", "layout.json"])
@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "deep", "device"])
def test_a_report_reads_files_alone(tmp_path, capsys, name, kind):
    run = make_run(tmp_path / "run")
    (run / name).unlink()
    if kind == "pipe":
        os.mkfifo(run / name)
    elif kind == "link":
        (tmp_path / "secret").write_text('{"step": 1, "loss": 77.0}\n')
        (run / name).symlink_to(tmp_path / "secret")
    elif kind == "device":
        (run / name).symlink_to("/dev/zero")
    elif kind == "folder":
        (run / name).mkdir()
    else:
        (run / name).write_text("[" * 100_000 + "\n")
    assert report([str(run), "--markdown"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"parallel2d: {run}/{name}")
    assert len(said.splitlines()) == 1
    assert sorted(path.name for path in run.glob("report*")) == []


def test_names_reach_neither_terminal_nor_page_as_they_are(tmp_path, capsys):
    run = make_run(tmp_path / "\x1b[31m|<b>x`[a](b)")
    (run / "layout.json").write_text(
        json.dumps({"strategy": "<script>|\x1b[2J", "mesh": {"shard": "`&"}})
    )
    assert report([str(run), "--markdown", "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "report.md").read_text()
    html = page([read_run(str(run))], "")
    assert "\x1b" not in text + html + capsys.readouterr().out
    assert "<b>" not in html
    # That of the library and that of the drawings
    assert html.count("<script>") == 2
    row = next(line for line in text.splitlines() if "script" in line)
    assert "\\<script\\>\\|" in row
    assert "\\`\\[a\\](b)" in row


def grown_by_report(tmp_path, rows):
    run = make_run(tmp_path / "run")
    with open(run / "metrics.jsonl", "w") as file:
        for step in range(1, rows + 1):
            file.write(
                f'{{"step": {step}, "loss": {5 / step:.6f}, "throughput/tokens_per_s": 50.0, "time/step_s": 0.1}}\n'
            )
    words = f"import resource; from parallel2d.report.__main__ import main; main([{str(run)!r}, '--markdown']); "
    words += "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    code = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert f"| {rows} |" in (run / "report.md").read_text()
    return 1024 * int(code.stdout.splitlines()[-1])


def test_memory_of_a_report_does_not_grow_with_its_rows(tmp_path):
    assert (
        grown_by_report(tmp_path / "many", 200_000) - grown_by_report(tmp_path / "few", 10)
        < 60 * 2**20
    )


def test_numbers_that_a_report_does_not_show_are_not_kept(tmp_path):
    run = make_run(tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as file:
        file.write(
            json.dumps(
                {"step": 11, "loss": 1.0} | {f"key-{number}": number for number in range(3000)}
            )
            + "\n"
        )
    assert set(read_run(str(run)).rows[-1]) == {"step", "loss"}


def test_a_report_is_written_in_any_locale(tmp_path):
    run = make_run(tmp_path / "run", "日本")
    plain = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run(
        [sys.executable, "-m", "parallel2d.report", "--markdown", str(run)],
        env={**os.environ, **plain},
        check=True,
        capture_output=True,
    )
    assert "日本" in (run / "report.md").read_text(encoding="utf-8")


@pytest.mark.soak
def test_memory_of_a_report_of_ten_million_rows(tmp_path):
    assert (
        grown_by_report(tmp_path / "many", 10**7) - grown_by_report(tmp_path / "few", 10)
        < 60 * 2**20
    )
