"""The report of three runs, one of which was restarted and went on with another layout: its drawings, its page, and that
page in a browser."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from browser import Browser, find_chromium

from parallel2d.report import __main__ as command
from parallel2d.report.drawings import drawings
from parallel2d.report.events import events_of
from parallel2d.report.page import page
from parallel2d.report.runs import find_runs, read_run

HOSTS = ["node-a/1", "node-a/1", "node-b/2", "node-b/2"]
FOUR = {
    "strategy": "hybrid", "mesh": {"replicate": 2, "shard": 2, "tensor": 1}, "ranks": [[[0], [1]], [[2], [3]]], "hosts": HOSTS,
    "parameters": 1000, "predicted": {"comm/replicate/bytes": 1e6, "comm/shard/bytes": 2e6, "comm/tensor/bytes": 0.0},
}  # fmt: skip
TWO = {
    **FOUR, "mesh": {"replicate": 1, "shard": 2, "tensor": 1}, "ranks": [[[0], [1]]], "hosts": HOSTS[:2],
    "predicted": {"comm/replicate/bytes": 0.0, "comm/shard/bytes": 2e6, "time/step_s": 0.08},
}  # fmt: skip
ZERO3 = {**FOUR, "strategy": "zero3", "mesh": {"replicate": 1, "shard": 4, "tensor": 1}, "ranks": [[[0], [1], [2], [3]]],
         "predicted": {"comm/shard/bytes": 4e6}}  # fmt: skip
LONG = "a-name-that-is-much-longer-than-a-legend-has-room-for-at-four-hundred-pixels-" + "x" * 30


def row(step, segment, wall_s, loss=None):
    found = {
        "step": step, "segment": segment, "loss": loss or 4.0 - 0.05 * step, "grad_norm": 1.0, "learning_rate": 0.1, "tokens": 100 * step,
        "skipped_steps": 0, "goodput/wall_s": wall_s, "goodput/useful_s": 0.08 * step, "goodput/fraction": 0.08 * step / wall_s,
        "goodput/lost_first_step_s": 0.5, "goodput/lost_restart_s": 2.0 if segment > 1 else 0.0, "goodput/lost_repeated_s": 0.1,
        "goodput/lost_data_s": 0.1, "goodput/lost_checkpoint_s": 0.1, "goodput/lost_validation_s": 0.1, "memory/peak_rss_gib": 0.5,
    }  # fmt: skip
    if step == 1:
        return found
    found |= {
        "time/step_s": 0.1, "time/data_s": 0.01, "time/checkpoint_s": 0.02 if step % 10 == 0 else 0.0, "throughput/tokens_per_s": 1000.0,
        "comm/replicate/bytes": 1e6 if segment < 3 else 0.0, "comm/shard/bytes": 2e6, "comm/tensor/bytes": 0.0,
        "comm/replicate/exposed_seconds": 0.02, "comm/shard/exposed_seconds": 0.04, "comm/tensor/exposed_seconds": 0.0,
    }  # fmt: skip
    return found | ({"validation/loss": 4.1 - 0.05 * step} if step % 10 == 0 else {})


def segment(number, first_step, layout, restarted=False, words=("train.steps=30",)):
    config = {"optimizer": {"lr": 0.1}, "mesh": layout["mesh"], "strategy": {"name": layout["strategy"]}}  # fmt: skip
    return {
        "number": number, "first_step": first_step, "restarted": restarted, "begun": f"2026-11-22 10:0{number}:00 +0000", "command": list(words),
        "config": config, "layout": layout, "versions": {"parallel2d": "0.1.0", "torch": "2.13.0", "python": "3.12.1"},
    }  # fmt: skip


def write_run(folder, starts, rows, stopped=False):
    folder.mkdir(parents=True)
    lines = {"metrics.jsonl": rows, "segments.jsonl": starts}
    for name, values in lines.items():
        (folder / name).write_text("".join(json.dumps(value) + "\n" for value in values))
    (folder / "layout.json").write_text(json.dumps(starts[-1]["layout"]))
    (folder / "summary.json").write_text(json.dumps({"stopped": stopped, "reason": None}))


@pytest.fixture
def folder(tmp_path):
    """Of three runs. One has a restart at step 11, and at step 21 another layout."""
    base = tmp_path / "runs"
    steps = range(1, 31)
    write_run(base / "zero3", [segment(1, 1, ZERO3)], [row(n, 1, 0.2 + 0.1 * n) for n in steps])
    starts = [segment(1, 1, FOUR), segment(2, 11, FOUR, restarted=True), segment(3, 21, TWO)]
    rows = [row(n, 1 + (n - 1) // 10, 0.2 + 0.2 * n) for n in steps]
    write_run(base / "hybrid", starts, rows, stopped=True)
    words = ("data.path=" + "/a/very/long/path" * 12,)
    write_run(base / LONG, [segment(1, 1, FOUR, words=words)], [row(n, 1, 0.1 * n) for n in steps])
    return base


def read(folder):
    return [read_run(path) for path in find_runs([str(folder)])]


def drawn(folder):
    return {each.title: each for each in drawings(read(folder))}


def by_name(drawing):
    return {trace["name"]: trace for trace in drawing.data}


def test_a_folder_stands_for_the_runs_below_it(folder, capsys):
    assert [run.name for run in read(folder)] == [LONG, "hybrid", "zero3"]
    (folder / "sweep" / "0").mkdir(parents=True)
    (folder / "sweep" / "0" / "metrics.jsonl").write_text("")
    assert command.main([str(folder), "--markdown"]) == 0
    told = capsys.readouterr()
    assert "sweep/0/metrics.jsonl: no finished step in it" in told.err
    assert told.out.split() == [str(folder / "report.md")]
    # Named by itself it is an error.
    assert command.main([str(folder / "sweep" / "0"), "--markdown"]) == 2


def test_more_runs_than_a_page_can_show_are_refused(folder, capsys):
    for number in range(24):
        write_run(folder / f"more-{number}", [segment(1, 1, FOUR)], [row(1, 1, 1.0)])
    assert command.main([str(folder), "--markdown"]) == 2
    assert "27 runs are too many for one page" in capsys.readouterr().err


def test_events_of_a_run(folder):
    _, hybrid, zero3 = read(folder)
    found = [(event.kind, event.step) for event in events_of(hybrid)]
    assert found == [
        ("restart", 11), ("resume", 21), ("change of layout", 21), ("save", 10), ("save", 20), ("save", 30), ("stop", 30)
    ]  # fmt: skip
    assert {event.kind for event in events_of(zero3)} == {"save"}


def test_events_and_starts_are_told_apart_on_the_curves(folder):
    loss = drawn(folder)["Training loss"]
    lines = [trace for trace in loss.data if trace["name"] == "hybrid"]
    assert [line["line"]["dash"] for line in lines] == ["solid", "dot"]
    solid, dotted = ([x for x in line["x"] if x is not None] for line in lines)
    # A line ends at the first row of the next start, where that begins.
    assert solid == [*range(1, 12), *range(21, 31)]
    assert dotted == list(range(11, 22))
    marks = by_name(loss)
    assert marks["restart"]["x"] == [11]
    assert marks["restart"]["y"] == [pytest.approx(4.0 - 0.05 * 11)]
    assert marks["change of layout"]["x"] == [21]
    assert marks["stop"]["x"] == [30]


def test_curves_may_be_over_steps_tokens_or_hours(folder):
    loss = drawn(folder)["Training loss"]
    assert loss.over
    line = by_name(loss)["zero3"]
    assert line["meta"]["steps"] == line["x"] == list(range(1, 31))
    assert line["meta"]["tokens"] == [100 * step for step in range(1, 31)]
    assert line["meta"]["hours"][-1] == pytest.approx(3.2 / 3600)


def test_the_bar_of_a_step_adds_up_to_it(folder):
    bars = by_name(drawn(folder)["Where a step's time goes"])
    # The means of each of the four layouts, in milliseconds
    assert len(bars["waits for shard"]["y"]) == 4
    assert bars["waits for shard"]["y"][0] == pytest.approx(40)
    assert bars["waits for replicate"]["y"][0] == pytest.approx(20)
    assert bars["waits for data"]["y"][0] == pytest.approx(10)
    assert sum(bar["y"][0] for bar in bars.values()) == pytest.approx(100)
    assert "waits for tensor" not in bars


def test_a_step_is_not_split_where_communication_was_not_measured(tmp_path):
    rows = [{"step": step, "loss": 1.0, "time/step_s": 0.1} for step in range(1, 4)]
    write_run(tmp_path / "run", [segment(1, 1, FOUR)], rows)
    (bar,) = drawn(tmp_path)["Where a step's time goes"].data
    assert bar["name"] == "communication was not measured"
    assert bar["y"] == [pytest.approx(100)]


def test_bytes_are_measured_beside_predicted(folder):
    bars = by_name(drawn(folder)["Bytes by axis"])
    assert list(bars) == ["replicate", "replicate (predicted)", "shard", "shard (predicted)"]
    assert bars["shard"]["y"] == [2.0] * 4
    assert bars["shard (predicted)"]["y"] == [2.0, 2.0, 2.0, 4.0]
    assert bars["replicate (predicted)"]["y"] == [1.0, 1.0, 0.0, None]


def test_the_waterfall_ends_at_the_useful_time(folder):
    falls = by_name(drawn(folder)["Goodput: from wall time to useful time"])
    fall = falls["hybrid"]
    places = dict(zip(fall["x"], fall["y"], strict=True))
    assert places["wall time"] == pytest.approx(6.2)
    assert places["restarts"] == pytest.approx(-2.0)
    assert sum(fall["y"]) == pytest.approx(0.08 * 30)
    assert (fall["measure"][0], fall["measure"][-1]) == ("absolute", "total")


def test_each_mesh_is_drawn_once_with_its_hosts(folder):
    titles = [title for title in drawn(folder) if "host" in title]
    assert [title.split(":")[0] for title in titles] == [
        "hybrid 2 x 2 x 1, 2 hosts", "hybrid 1 x 2 x 1, 1 host", "zero3 1 x 4 x 1, 2 hosts"
    ]  # fmt: skip
    (cells,) = drawn(folder)[titles[0]].data
    assert cells["text"] == [["0", "1"], ["2", "3"]]
    assert cells["z"] == [[0, 0], [1, 1]]
    assert cells["hovertext"][1][0] == "rank 2 on node-b/2<br>replicate 1, shard 0, tensor 0"


@pytest.mark.parametrize("ranks", [[[0, 1]], [[[0], [9]]], "x", [[[0], [True]]], [], [[[0]], [[1], [2]]]])  # fmt: skip
def test_a_mesh_that_is_none_is_not_drawn(tmp_path, ranks):
    write_run(tmp_path / "run", [segment(1, 1, {**FOUR, "ranks": ranks})], [row(1, 1, 1.0)])
    assert not any("host" in title for title in drawn(tmp_path))


def test_whatever_is_predicted_is_shown_beside_what_was_measured(folder):
    command.main([str(folder / "hybrid"), "--markdown"])
    text = (folder / "hybrid" / "report.md").read_text()
    assert "| hybrid: steps 21 to 30 | step s | 0.1 | 0.08 | +25.00% |" in text
    assert "| hybrid: steps 21 to 30 | shard MB | 2 | 2 | +0.00% |" in text


def test_names_are_no_tags_in_drawings(tmp_path):
    hostile = {**FOUR, "hosts": ["<i>host</i>"] * 4, "strategy": "<b>x</b>"}
    rows = [row(n, 1, 0.1 * n) for n in range(1, 5)]
    write_run(tmp_path / "<a href=x>run", [segment(1, 1, hostile)], rows)
    texts = json.dumps([each.data for each in drawings(read(tmp_path))])
    assert "&lt;a href=x&gt;run" in texts
    assert "&lt;i&gt;host&lt;" in texts
    # The only tags are line breaks of our own, and where plotly.js puts a name.
    for ours in ("<br>", "<extra>", "</extra>"):
        texts = texts.replace(ours, "")
    assert "<" not in texts


def test_settings_versions_and_the_command_are_shown(folder):
    html = page(read(folder), "")
    assert "<h2>Settings that differ</h2>" in html
    assert "<td>strategy.name<td>hybrid<td>hybrid<td>zero3" in html
    assert "optimizer.lr" not in html
    assert "<td>2.13.0" in html
    assert "parallel2d train train.steps=30" in html


def test_without_plotly_one_message_says_how_to_install_it(folder):
    # A module that cannot be imported, as if it were not there
    words = (
        "import sys; sys.modules['plotly'] = None; from parallel2d.report.__main__ import main; "
        f"sys.exit(main([{str(folder)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "parallel2d: report.html is drawn with plotly: pip install 'parallel2d[report]' "
        "(--markdown writes report.md alone, without it)\n"
    )
    assert not list(folder.glob("report*"))


@pytest.mark.extras("plotly")
def test_plotly_knows_every_property_of_the_drawings(folder):
    from plotly import graph_objects

    for drawing in drawings(read(folder)):
        graph_objects.Figure(data=drawing.data, layout=drawing.layout)


# Right edges of all that is not in a box that scrolls by itself
OVERFLOWING = """[...document.querySelectorAll('body *')]
  .filter(each => each.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .filter(each => !each.closest('.table')).map(each => each.outerHTML.slice(0, 80))"""
DRAWN = "document.querySelectorAll('.main-svg').length / 2"
LABELS = (
    """[...document.querySelectorAll('#drawing-0 .xtick text')].map(each => each.textContent)"""
)
BUTTONS = "[...document.querySelectorAll('#drawing-0 .modebar-btn')].map(each => each.dataset.title)"  # fmt: skip
CHOOSE = """(() => {{ const over = document.getElementById('over'); over.value = '{0}';
  over.dispatchEvent(new Event('change')); }})()"""


@pytest.mark.extras("plotly")
def test_a_page_loads_nothing_and_fits_a_screen(folder, tmp_path):
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("needs a chromium to look at the report with: apt-get install chromium")
    assert command.main([str(folder), "--out", str(tmp_path / "out")]) == 0
    kept = os.environ.get("REPORT_PICTURES")  # a folder, to look at them oneself
    browser = Browser(chromium, tmp_path / "profile")
    try:
        for width in (1200, 800, 400):
            browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)  # fmt: skip
            browser.open((tmp_path / "out" / "report.html").as_uri())
            browser.wait_for(DRAWN, lambda count: count >= len(drawings(read(folder))))
            assert browser.ask("document.documentElement.scrollWidth") <= width
            assert browser.ask(OVERFLOWING) == []
            if kept:
                browser.photograph(f"{kept}/report-{width}.png")
        assert browser.ask("performance.getEntriesByType('resource').length") == 0
        # None that sends the data to a service
        assert browser.ask(BUTTONS) == ["Download plot as a PNG", "Zoom", "Pan", "Reset axes"]
        assert browser.ask(LABELS)[-1] == "30"
        browser.ask(CHOOSE.format("tokens"))
        assert browser.wait_for(LABELS, lambda labels: "30" not in labels)[-1] in ("3000", "3k")
        browser.ask("document.getElementById('logarithmic').click()")
        kind = "document.getElementById('drawing-0')._fullLayout.yaxis.type"
        browser.wait_for(kind, lambda found: found == "log")
        assert browser.said == []
    finally:
        browser.close()
