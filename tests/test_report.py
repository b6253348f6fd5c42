"""The report of three runs, one of them restarted and resumed on another layout: tables, figures,
the page.
"""

import json
import subprocess
import sys

import pytest
from browser import Browser, find_chromium

from parallel2d import report as command
from parallel2d.instruments.report.overview import events_of, tables
from parallel2d.instruments.report.runs import find_runs, read_run

HOSTS = ["node-a/1", "node-a/1", "node-b/2", "node-b/2"]
FOUR = {
    "strategy": "hybrid",
    "mesh": {"replicate": 2, "shard": 2, "tensor": 1},
    "hosts": HOSTS,
    "predicted": {"comm/replicate/bytes": 1e6, "comm/shard/bytes": 2e6, "comm/tensor/bytes": 0.0},
}
TWO = {
    **FOUR,
    "mesh": {"replicate": 1, "shard": 2, "tensor": 1},
    "hosts": HOSTS[:2],
    "predicted": {"comm/replicate/bytes": 0.0, "comm/shard/bytes": 2e6, "time/step_s": 0.08},
}
ZERO3 = {
    **FOUR,
    "strategy": "zero3",
    "mesh": {"replicate": 1, "shard": 4, "tensor": 1},
    "predicted": {"comm/shard/bytes": 4e6},
}
LONG = "a-name-that-is-much-longer-than-a-legend-has-room-for-at-four-hundred-pixels-" + "x" * 30


def row(step, segment, wall_s):
    found = {
        "step": step,
        "segment": segment,
        "loss": 4.0 - 0.05 * step,
        "grad_norm": 1.0,
        "learning_rate": 0.1,
        "tokens": 100 * step,
        "skipped_steps": 0,
        "goodput/wall_s": wall_s,
        "goodput/useful_s": 0.08 * step,
        "goodput/fraction": 0.08 * step / wall_s,
        "goodput/lost_first_step_s": 0.5,
        "goodput/lost_restart_s": 2.0 if segment > 1 else 0.0,
        "memory/peak_rss_gib": 0.5,
    }
    if step == 1:
        return found
    found |= {
        "time/step_s": 0.1,
        "time/data_s": 0.01,
        "time/checkpoint_s": 0.02 if step % 10 == 0 else 0.0,
        "throughput/tokens_per_s": 1000.0,
        "comm/replicate/bytes": 1e6 if segment < 3 else 0.0,
        "comm/shard/bytes": 2e6,
        "comm/tensor/bytes": 0.0,
        "comm/replicate/exposed_seconds": 0.02,
        "comm/shard/exposed_seconds": 0.04,
        "comm/tensor/exposed_seconds": 0.0,
    }
    return found | ({"validation/loss": 4.1 - 0.05 * step} if step % 10 == 0 else {})


def segment(number, first_step, layout, restarted=False, words=("train.steps=30",)):
    config = {
        "optimizer": {"lr": 0.1},
        "mesh": layout["mesh"],
        "strategy": {"name": layout["strategy"]},
    }
    return {
        "number": number,
        "first_step": first_step,
        "restarted": restarted,
        "begun": f"2026-11-22 10:0{number}:00 +0000",
        "command": list(words),
        "config": config,
        "layout": layout,
        "versions": {"parallel2d": "0.1.0", "torch": "2.14.1"},
    }


def write_run(folder, starts, rows, stopped=False):
    folder.mkdir(parents=True)
    for name, values in {"metrics.jsonl": rows, "segments.jsonl": starts}.items():
        (folder / name).write_text("".join(json.dumps(value) + "\n" for value in values))
    (folder / "layout.json").write_text(json.dumps(starts[-1]["layout"]))
    (folder / "summary.json").write_text(json.dumps({"stopped": stopped, "reason": None}))
    return folder


@pytest.fixture
def folder(tmp_path):
    """A folder of three runs. One run has a restart at step 11, and another layout at step 21."""
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


def figures(folder):
    from parallel2d.instruments.report.drawings import drawings

    return drawings(read(folder))


def bars(figure):
    return {bar.name: list(bar.x) for bar in figure.data}


def test_report_of_a_folder_covers_its_runs(folder, capsys):
    assert [run.name for run in read(folder)] == [LONG, "hybrid", "zero3"]
    (folder / "sweep" / "0").mkdir(parents=True)
    (folder / "sweep" / "0" / "metrics.jsonl").write_text("")
    assert command.main([str(folder), "--markdown"]) == 0
    told = capsys.readouterr()
    assert "omitted: " in told.err
    assert "sweep/0/metrics.jsonl: no finished step in it" in told.err
    assert told.out.split() == [str(folder / "report.md")]
    # The run is an error if it is named directly or is the only run.
    assert command.main([str(folder / "sweep" / "0"), "--markdown"]) == 2
    assert command.main([str(folder / "sweep"), "--markdown"]) == 2


def test_runs_of_one_name_are_distinguished_by_folder(tmp_path):
    for name in ("a/0", "b/0"):
        write_run(tmp_path / name, [segment(1, 1, FOUR)], [row(1, 1, 1.0)])
    assert command.main([str(tmp_path), "--markdown"]) == 0
    lines = (tmp_path / "report.md").read_text().splitlines()
    assert [line[:20] for line in lines if "| hybrid | 2" in line] == [
        "| a/0 | hybrid | 2 x",
        "| b/0 | hybrid | 2 x",
    ]


def test_more_runs_than_a_page_can_show_are_refused(folder, capsys):
    for number in range(24):
        write_run(folder / f"more-{number}", [segment(1, 1, FOUR)], [row(1, 1, 1.0)])
    assert command.main([str(folder), "--markdown"]) == 2
    assert "27 runs exceed the 24 runs of one page" in capsys.readouterr().err


def test_report_lists_events_of_a_run(folder):
    _, hybrid, zero3 = read(folder)
    events = events_of(hybrid)
    assert [(kind, step) for kind, step, _ in events] == [
        ("start", 1),
        ("restart", 11),
        ("start", 21),
        ("changed settings", 21),
        ("checkpoint", 10),
        ("checkpoint", 20),
        ("checkpoint", 30),
        ("stop", 30),
    ]
    assert events[0][2] == (
        "start 1, 2026-11-22 10:01:00 +0000, parallel2d 0.1.0 torch 2.14.1: parallel2d train train.steps=30"
    )
    assert "mesh.replicate: 2 -> 1" in events[3][2]
    assert {kind for kind, _, _ in events_of(zero3)} == {"start", "checkpoint"}
    shown = [(each["event"], each["step"]) for each in tables([hybrid])["Events"]]
    assert shown == [
        ("start", "1"),
        ("restart", "11"),
        ("start", "21"),
        ("changed settings", "21"),
        ("stop", "30"),
    ]


def test_failed_and_joining_replicas_are_events(tmp_path):
    names = (
        "step",
        "replicas/present",
        "replicas/joined",
        "replicas/repeated_samples",
        "replicas/lost_s",
    )
    rows = [
        dict(zip(names, each, strict=True))
        for each in ((1, 2, 0, 0, 0.0), (2, 1, 0, 8, 0.5), (3, 2, 1, 8, 0.5))
    ]
    run = read_run(str(write_run(tmp_path / "run", [segment(1, 1, FOUR)], rows)))
    assert [(step, text) for kind, step, text in events_of(run) if kind == "replicas"] == [
        (2, "1 live, 0 joined; 8 samples recomputed, 0.5 s lost"),
        (3, "2 live, 1 joined; 0 samples recomputed, 0 s lost"),
    ]


def test_report_and_figures_show_equal_means(tmp_path):
    seconds = [0.1] * 9 + [1.1]
    rows = [
        {"step": n, "loss": 1.0, "time/step_s": s, "throughput/tokens_per_s": 100 / s}
        for n, s in enumerate(seconds, 1)
    ]
    run = read_run(str(write_run(tmp_path / "run", [segment(1, 1, TWO)], rows)))
    (compared,) = tables([run])["Runs"]
    assert compared["time of a step (mean)"] == "200 ms"
    assert compared["time of a step (median)"] == "100 ms"
    assert compared["tokens/s (mean)"] == "500"  # 1,000 tokens in 2 seconds
    beside, _ = tables([run])["Measured and predicted"]
    assert (beside["measured"], beside["predicted"], beside["difference"]) == (
        "200 ms",
        "80 ms",
        "+150.00%",
    )


def test_each_layout_of_a_run_has_separate_rows(folder):
    found = tables(read(folder))
    hybrid = [each for each in found["Runs"] if each["run"].startswith("hybrid")]
    assert [each["mesh"] for each in hybrid] == ["2 x 2 x 1", "1 x 2 x 1"]
    # Fractions of the seconds since the previous row: 10 steps, 0.08 of 0.2 s of each useful
    assert [each["goodput"] for each in hybrid] == ["38.1%", "40.0%"]
    beside = {(each["run"], each["mean"]): each for each in found["Measured and predicted"]}
    assert beside["hybrid: steps 21 to 30", "time of a step"]["difference"] == "+25.00%"
    assert beside["zero3", "shard per step"]["difference"] == "-50.00%"
    assert beside["zero3", "replicate per step"]["predicted"] == "-"
    assert ("zero3", "tensor per step") not in beside
    (shares, *_) = found["Where time goes"]
    assert shares["waits for shard (of a step)"] == "40.0%"


def test_differing_settings_are_shown(folder):
    settings = {each[""]: each for each in tables(read(folder))["Settings that differ"]}
    assert set(settings) == {"mesh.replicate", "mesh.shard", "strategy.name"}
    assert settings["strategy.name"]["zero3"] == "zero3"
    (folder / "zero3" / "segments.jsonl").unlink()
    assert "Settings that differ" not in tables(read(folder))


def test_without_plotly_one_message_says_how_to_install_it(folder):
    # A module that cannot be imported, as if it were not there
    words = (
        "import sys; sys.modules['plotly'] = None; from parallel2d.report import main; "
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
def test_curves_have_a_line_for_each_run_and_marks_for_its_events(folder):
    curves = figures(folder)["Curves"]
    titles = [each.text for each in curves.layout.annotations]
    assert titles[:3] == ["Training loss", "Validation loss", "Throughput (tokens/s)"]
    assert "Peak memory of a device (GiB)" not in titles
    loss, *others = [trace for trace in curves.data if trace.name == "hybrid"]
    assert (loss.showlegend, {trace.showlegend for trace in others}) == (True, {False})
    assert list(loss.x) == list(range(1, 31))
    assert loss.y[-1] == pytest.approx(2.5)
    marks = [trace for trace in curves.data if trace.hovertext][1]
    assert list(marks.x) == [1, 11, 21, 21, 10, 20, 30, 30]
    assert list(marks.y) == [pytest.approx(4.0 - 0.05 * step) for step in marks.x]
    assert marks.hovertext[1].startswith("restart of hybrid: start 2,")


@pytest.mark.extras("plotly")
def test_bars_add_up_to_the_wall_time(folder):
    drawn = figures(folder)
    step = bars(drawn["Where a step's time goes (means)"])
    # Each of the four layouts, in milliseconds
    assert step["waits for shard"] == pytest.approx([40] * 4)
    assert [sum(each) for each in zip(*step.values(), strict=True)] == pytest.approx([100] * 4)
    assert "waits for tensor" not in step
    wall = bars(drawn["Where the wall time goes"])
    # Of each of the three runs, in seconds
    assert [sum(each) for each in zip(*wall.values(), strict=True)] == pytest.approx(
        [3.0, 6.2, 3.2]
    )
    assert wall["useful"] == pytest.approx([2.4] * 3)
    assert wall["restart"] == pytest.approx([0.0, 2.0, 0.0])


@pytest.mark.extras("plotly")
def test_measured_and_predicted_bytes_are_shown(folder):
    moved = bars(figures(folder)["Bytes that a rank sends per step (means)"])
    assert list(moved) == ["replicate", "replicate, predicted", "shard", "shard, predicted"]
    assert moved["shard"] == [2.0] * 4  # MB
    assert moved["shard, predicted"] == [2.0, 2.0, 2.0, 4.0]
    assert moved["replicate, predicted"] == [1.0, 1.0, 0.0, 0.0]


# Right edges of all elements outside of a scrolling box
OVERFLOWING = """[...document.querySelectorAll('body *')]
  .filter(each => each.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .filter(each => !each.closest('.table')).map(each => each.outerHTML.slice(0, 80))"""
# Axis labels that begin left of the page, where a run's name would be cut
CUT = """[...document.querySelectorAll('.ytick text')]
  .filter(each => each.getBoundingClientRect().left < 0).map(each => each.textContent)"""
DRAWN = "[...document.querySelectorAll('.plotly-graph-div')].filter(each => each._fullLayout?._size).length"
CURVES = "document.getElementById('figure-0')"
BUTTONS = f"[...{CURVES}.querySelectorAll('.modebar-btn')].map(each => each.dataset.title)"
X = f"{CURVES}.calcdata[0].at(-1).x"
CHOOSE = (
    CURVES
    + """.querySelectorAll('.updatemenu-header')[{0}].dispatchEvent(new MouseEvent('click'))"""
)
PRESS = (
    CURVES
    + """.querySelectorAll('.updatemenu-dropdown-button')[{0}].dispatchEvent(new MouseEvent('click'))"""
)


@pytest.mark.extras("plotly")
def test_report_page_has_no_external_resources_and_fits_a_screen(folder, tmp_path):
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("needs a chromium to look at the report with: apt-get install chromium")
    assert command.main([str(folder), "--out", str(tmp_path / "out")]) == 0
    browser = Browser(chromium, tmp_path / "profile")
    try:
        for width in (1200, 400):
            browser.call(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=900,
                deviceScaleFactor=1,
                mobile=False,
            )
            browser.ask("window.isOld = true")
            browser.open((tmp_path / "out" / "report.html").as_uri())
            browser.wait_for(f"window.isOld ? -1 : {DRAWN}", lambda count: count == 4)
            assert browser.ask("document.documentElement.scrollWidth") <= width
            assert browser.ask(OVERFLOWING) == []
            assert browser.ask(CUT) == []
        assert browser.ask("performance.getEntriesByType('resource').length") == 0
        # No button sends the data to a service
        assert browser.ask(BUTTONS) == ["Download plot as a PNG", "Zoom", "Pan", "Reset axes"]
        assert browser.ask(X) == 30
        browser.ask(CHOOSE.format(0))
        browser.ask(PRESS.format(1))
        browser.wait_for(X, lambda x: x == 3000)
        browser.ask(CHOOSE.format(1))
        browser.ask(PRESS.format(1))
        browser.wait_for(f"{CURVES}._fullLayout.yaxis2.type", lambda found: found == "log")
        assert browser.said == []
    finally:
        browser.close()
