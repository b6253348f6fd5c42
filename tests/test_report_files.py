"""Reports on run directories that are incomplete, hostile or large."""

import inspect
import json
import os
import re
import subprocess
import sys
import tracemalloc

import pytest
from jobs import peak_memory
from test_report import FOUR, row, segment, write_run

from parallel2d.instruments.report.page import POLICY, markdown, page
from parallel2d.instruments.report.runs import COLUMNS, NOT_FINITE, read_run
from parallel2d.report import main as report
from parallel2d.training.checkpoint.storage import LocalStore
from parallel2d.training.metrics import metrics_row


def make_run(folder):
    return write_run(folder, [segment(1, 1, FOUR)], [row(n, 1, 0.1 * n) for n in range(1, 11)])


def test_report_of_one_run_is_written_to_its_directory(tmp_path):
    run = make_run(tmp_path / "run")
    for name in ("layout.json", "segments.jsonl", "summary.json"):
        (run / name).unlink()
    assert report([str(run), "--markdown"]) == 0
    assert "| run | - | ? | - | 10 |" in (run / "report.md").read_text()


def test_report_follows_no_symlink_out_of_the_run(tmp_path):
    run, outside = make_run(tmp_path / "run"), tmp_path / "outside"
    outside.write_text("mine")
    (run / "report.md").symlink_to(outside)
    assert report([str(run), "--markdown"]) == 0
    assert outside.read_text() == "mine"
    assert not (run / "report.md").is_symlink()
    assert [path.name for path in run.glob("report*")] == ["report.md"]


@pytest.mark.parametrize("what", ["missing", "empty", "torn", "layout"])
def test_report_of_an_invalid_path_gives_one_message(tmp_path, capsys, what):
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
    *("NaN", "Infinity", "-Infinity", "1e999", "1e-320", "1e308", "1" + "0" * 400, "9" * 5000),
    *("[1]", '"5"', "true", "null", '{"a":1}'),
)


def write_number(run, number):
    with open(run / "metrics.jsonl", "a") as file:
        for step in (11, number):
            values = {key: number for key in COLUMNS if key != "step"}
            pairs = ", ".join(f'"{key}": {value}' for key, value in values.items())
            file.write(f'{{"step": {step}, {pairs}}}\n')
    layout = (
        f'{{"mesh": {number}, "strategy": {number}, "hosts": {number}, "predicted": '
        f'{{"comm/shard/bytes": {number}}}}}'
    )
    (run / "layout.json").write_text(layout)


@pytest.mark.parametrize("number", NUMBERS)
def test_report_skips_invalid_numbers(tmp_path, number, recwarn):
    run = make_run(tmp_path / "run")
    (run / "segments.jsonl").unlink()
    write_number(run, number)
    # A layout with the longest of them is not JSON for Python.
    assert report([str(run), "--markdown"]) in (0, 2)
    assert not recwarn.list
    if number == "1e308":
        assert "| 2.0000 |" not in markdown([read_run(str(run))])


@pytest.mark.extras("plotly")
@pytest.mark.parametrize("number", ["NaN", "1e308", "1e-320"])
def test_page_skips_invalid_numbers(tmp_path, number):
    run = make_run(tmp_path / "run")
    write_number(run, number)
    if report([str(run), "--out", str(tmp_path / "out")]) == 0:
        html = (tmp_path / "out" / "report.html").read_text()
        begin = html.index("Plotly.newPlot", html.index('id="figure-1"'))
        assert "NaN" not in html[begin:]
        assert "Infinity" not in html[begin:]


@pytest.mark.parametrize("name", ["metrics.jsonl", "layout.json"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "deep", "device"])
def test_report_reads_only_regular_files(tmp_path, capsys, name, kind):
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


def hostile_run(folder):
    run = make_run(folder / "\x1b[31m|<b>x`[a](b)")
    layout = {"strategy": "<script>|\x1b[2J", "mesh": {"shard": "`&"}}
    (run / "segments.jsonl").write_text(json.dumps(segment(1, 1, layout, words=("</script>",))))
    return run


def test_names_are_escaped_in_terminal_and_text(tmp_path, capsys):
    run = hostile_run(tmp_path)
    assert report([str(run), "--markdown", "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "report.md").read_text()
    assert "\x1b" not in text + capsys.readouterr().out
    line = next(line for line in text.splitlines() if "script" in line)
    assert "\\<script\\>\\|" in line
    assert "\\`\\[a\\](b)" in line


@pytest.mark.extras("plotly")
def test_names_are_escaped_in_pages_and_figures(tmp_path):
    from parallel2d.instruments.report.drawings import drawings

    hostile = read_run(str(hostile_run(tmp_path)))
    html = page([hostile])
    assert f'Content-Security-Policy content="{POLICY}"' in html
    assert POLICY.startswith("default-src 'none';")
    assert "\x1b" not in html
    plain = page([read_run(str(make_run(tmp_path / "plain")))])
    for tag in ("<script", "</script"):
        assert html.count(tag) == plain.count(tag)
    outside = re.sub("<script.*?</script>", "", html, flags=re.DOTALL)
    assert "<b>" not in outside
    texts = "".join(figure.to_json() for figure in drawings([hostile]).values())
    # plotly writes < as \u003c.
    assert set(re.findall(r"\\u003c(\w+)", texts)) <= {"br"}
    assert "&lt;b&gt;" in texts


# Prints by how many bytes a report makes the process grow
MEASURE = f"""
import sys
from parallel2d.report import main
{inspect.getsource(peak_memory)}
before = peak_memory()
assert main([sys.argv[1], "--markdown"]) == 0
print(peak_memory() - before)
"""


def grown_by_report(tmp_path, rows):
    run = make_run(tmp_path / "run")
    with open(run / "metrics.jsonl", "w") as file:
        for step in range(1, rows + 1):
            file.write(json.dumps({"step": step, "loss": 5 / step, "time/step_s": 0.1}) + "\n")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(run)], capture_output=True, text=True, check=True
    )
    assert f"| {rows} |" in (run / "report.md").read_text()
    return int(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("count", [50_000, pytest.param(10**7, marks=pytest.mark.soak)])
def test_report_memory_does_not_grow_with_rows(tmp_path, count):
    assert grown_by_report(tmp_path, count) < 30 * 2**20


def test_overlong_line_is_not_a_row(tmp_path):
    run = make_run(tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as file:
        for value in ({"step": 11, "x": "a" * 2**17}, {"step": 12, "loss": 1.0}):
            file.write(json.dumps(value) + "\n")
    assert list(read_run(str(run))["step"][-2:]) == [10, 12]


def test_rare_columns_survive_thinning(tmp_path):
    rows = []
    for step in range(1, 10_001):
        rows.append(
            {
                "step": step,
                "loss": 1.0,
                "time/step_s": 0.1,
                "comm/replicate/bytes": 30.0 * (step % 30 == 0),
            }
        )
    rows[6998]["loss"] = None
    rows[2999] |= {"validation/loss": 0.5, "time/checkpoint_s": 1.0}
    run = read_run(str(write_run(tmp_path / "run", [segment(1, 1, FOUR)], rows)))
    assert len(run.table) <= 2_000
    assert run["step"][-1] == 10_000
    assert run.known(NOT_FINITE) == [6999]
    assert run.known("validation/loss") == [0.5]
    assert run["step"][run["time/checkpoint_s"] > 0] == pytest.approx([3000], abs=5)
    assert run.mean("comm/replicate/bytes") == pytest.approx(0.999, abs=0.01)


@pytest.mark.extras("plotly")
def test_report_page_is_built_from_rows_with_only_a_step(tmp_path):
    run = write_run(tmp_path / "run", [segment(1, 1, FOUR)], [{"step": 1}, {"step": 2}])
    assert "Training loss" in page([read_run(str(run))])


def test_a_report_is_written_in_any_locale(tmp_path):
    layout = {**FOUR, "strategy": "日本"}
    run = write_run(tmp_path / "run", [segment(1, 1, layout)], [row(1, 1, 0.1)])
    plain = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [sys.executable, "-m", "parallel2d.report", "--markdown", str(run)]
    subprocess.run(words, env={**os.environ, **plain}, check=True, capture_output=True)
    assert "日本" in (run / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n" * 300, "more than 100 lines are no rows"),
        (b'{"step": 1}\n' * 600, "more than 500 lines"),
        (None, "more than 1 GiB"),
    ],
)
def test_impossible_rows_are_refused_in_bounded_time(
    tmp_path, capsys, monkeypatch, content, message
):
    monkeypatch.setattr(metrics_row, "_MOST_BROKEN", 100)
    monkeypatch.setattr(metrics_row, "_MOST_LINES", 500)
    monkeypatch.setattr(metrics_row, "_LARGEST_FILE", 1 << 30)
    run = make_run(tmp_path / "run")
    rows = run / "metrics.jsonl"
    if content is None:
        os.truncate(rows, 1 << 40)
    else:
        rows.write_bytes(rows.read_bytes() + content)
    assert report([str(run)]) == 2
    assert message in capsys.readouterr().err
    with pytest.raises(OSError, match=message), open(rows, "rb") as file:
        list(metrics_row.read_rows(file))
    if message != "more than 500 lines":  # which are sound rows: a restart moves them
        with pytest.raises(OSError, match=message):
            metrics_row.set_aside_after(str(rows), 0)


def test_a_line_of_gigabytes_is_moved_aside_in_pieces(tmp_path):
    rows = tmp_path / "metrics.jsonl"
    rows.write_bytes(b'{"step": 1}\n')
    os.truncate(rows, 200 << 20)
    tracemalloc.start()
    try:
        assert metrics_row.set_aside_after(str(rows), 1) == ({"step": 1}, {"step": 1})
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert rows.read_bytes() == b'{"step": 1}\n'
    assert (tmp_path / "metrics.before-restart-1.jsonl").stat().st_size == (200 << 20) - 12


def test_folders_nested_thousands_deep_are_removed_and_not_looked_through(tmp_path, capsys):
    store = LocalStore(str(tmp_path / "run" / "checkpoints"))
    deep = tmp_path / "run" / "checkpoints" / ".saving-step-00000001-x"
    deep.mkdir(parents=True)
    nest(deep, 1500)
    assert report([str(tmp_path / "run")]) == 2
    assert "folders nested deeper than 100" in capsys.readouterr().err
    place = store.begin(1, "token")
    assert os.listdir(store.root) == [os.path.basename(place)]
    store.publish(place, 1, b"{}")
    nest(tmp_path / "run" / "checkpoints" / "step-00000001", 1500)
    store.delete(1)
    assert os.listdir(store.root) == []


def nest(folder, depth):
    """Folders inside each other, and a link to the outermost one in the innermost."""
    inside = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("a" * 20, dir_fd=inside)
        outer, inside = inside, os.open("a" * 20, os.O_RDONLY, dir_fd=inside)
        os.close(outer)
    os.symlink(folder, "link", dir_fd=inside)
    os.close(inside)
