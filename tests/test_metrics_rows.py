"""Rows, warnings, console lines and event files from given numbers."""

import contextlib
import fcntl
import functools
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from training import loss_of_logits

from parallel2d import build_on_meta
from parallel2d.parallel.cost.flops import count_flops
from parallel2d.training.data.batch import token_sequences
from parallel2d.training.metrics import keys, recorder
from parallel2d.training.metrics.console import describe
from parallel2d.training.metrics.keys import COMMUNICATION_KEYS
from parallel2d.training.metrics.late_ranks import describe_late
from parallel2d.training.metrics.recorder import WINDOW, Goodput, Recorder, Stragglers
from parallel2d.training.metrics.tags import OF_AN_AXIS, derived, description
from parallel2d.training.metrics.writer import LAYOUT, OPTIONAL, MetricsWriter
from parallel2d.training.progress import Progress, RankReport, RankReports, StepOutcome

HOSTS = ["node-a/1", "node-a/1", "node-b/2", "node-b/2"]


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

        def time(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(recorder, "time", clock)
    return clock


def test_goodput_divides_wall_time_by_cause(clock):
    ledger = Goodput()
    ledger.add({"step_s": 5.0}, first=True)
    ledger.add(
        {"step_s": 2.0, "data_s": 0.5, "checkpoint_s": 1.0, "validation_s": 1.5}, first=False
    )
    # Half of the ranks are left; they began the step again after 2 s.
    ledger.add({"step_s": 4.0, "data_s": 0.4}, first=False, live=0.5, lost_s=2.0)
    clock.now += 14.0
    row = ledger.row()
    assert row["goodput/fraction"] == pytest.approx((1.5 + 0.8) / 14)
    lost = {name: row[f"goodput/lost_{name}_s"] for name in keys.LOSSES}
    expected = {"first_step": 5.0, "data": 0.9, "checkpoint": 1.0, "validation": 1.5}
    expected |= {"restart": 0.0, "repeated": 0.0, "replicas": 2.8}
    assert lost == pytest.approx(expected)


@pytest.mark.parametrize(
    ("step", "kept", "useful"), [(0, None, 0.0), (4, 4, 8.0), (6, 4, 12.0), (8, 8, 16.0)]
)
def test_steps_that_a_restart_repeats_are_lost_and_named(clock, step, kept, useful):
    before, rows = Goodput(), {}
    for number in range(1, 9):
        clock.now += 2.0
        before.add({"step_s": 2.0}, first=False)
        rows[number] = {"step": number, **before.row()}
    after = Goodput()
    after.resume(step, rows[8], rows.get(kept))
    row = after.row()
    assert row["goodput/useful_s"] == pytest.approx(useful)
    assert row["goodput/lost_repeated_s"] == pytest.approx(16.0 - useful)
    assert row["goodput/fraction"] == pytest.approx(useful / 16.0)


def test_straggler_is_compared_with_the_other_ranks():
    watch = Stragglers(HOSTS[:2])
    # 1.4 times the mean of the two is not half speed.
    (line,) = [line for _ in range(WINDOW) for line in watch.check([1.0, 1.8])]
    assert line.startswith("rank 1 on node-a is slow: 1.8 times")


def test_noise_and_single_pauses_are_not_stragglers():
    watch = Stragglers(HOSTS)
    for step in range(200):
        busy = [1.0 + 0.3 * ((7 * step + 3 * rank) % 5) / 4 for rank in range(4)]
        busy[step % 4] *= 5 if step % 3 == 0 else 1  # now this rank, now that one
        assert watch.check(busy) == []
    assert WINDOW < 20


def test_stopped_rank_and_slow_rank_are_distinguished():
    where = "all_reduce over the replicate axis"
    before = [[10, 7, 5, where] for _ in HOSTS]
    after = [[12, 7, 5, where] for _ in HOSTS]
    after[2] = before[2]
    said = describe_late(before, after, HOSTS, 0)
    assert said.startswith("rank 0 waited in all_reduce over the replicate axis of step 7; ")
    assert "late: rank 2 on node-b, which timed out" in said
    after[2] = [12, 7, 3, where]
    said = describe_late(before, after, HOSTS, 0)
    assert "late: rank 2 on node-b, alive but behind, at step 7 after 3 collectives" in said
    after[2] = [12, 7, 5, where]
    assert "no rank is behind" in describe_late(before, after, HOSTS, 0)


SHOWN = {
    "loss": 2.34567,
    "throughput/tokens_per_s": 1234567.0,
    "throughput/mfu": 0.412,
    "comm/between_hosts/bytes": 3.2e9,
    "memory/peak_gib": 61.25,
}


def on_a_terminal(mode, row):
    """Return the output of a display of that mode on a terminal of 80 columns, without its control
    sequences.
    """
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    script = (
        "from parallel2d.training.metrics.console import ConsoleDisplay\n"
        f"display = ConsoleDisplay({mode!r}, 200000)\n"
        "display.begin(0)\n"
        f"display.step({{**{row!r}, 'step': 1}}, 43200.0, 3700.0)\n"
        f"display.step({{**{row!r}, 'step': 200000}}, None, 3700.0)\n"
        "display.close()\n"
    )
    environment = {
        key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")
    } | {"TERM": "xterm"}
    process = subprocess.Popen([sys.executable, "-c", script], stderr=child, env=environment)
    os.close(child)
    said = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while part := os.read(parent, 4096):
            said += part
    os.close(parent)
    assert process.wait() == 0
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said.decode()).replace("\r", "\n").split("\n")


@pytest.mark.parametrize("mode", ["rich", "plain", "silent"])
def test_terminal_of_80_columns_shows_all_metrics(mode):
    lines = on_a_terminal(mode, SHOWN)
    assert all(len(line) <= 80 for line in lines)
    text = "\n".join(lines)
    for wanted in (*describe(SHOWN, 3700.0), "saved 1:01:40 ago", "ETA 12:00:00"):
        assert (wanted in text) == (mode != "silent"), wanted
    assert ("\u2501" in text) == (mode == "rich")


def test_throughput_and_mfu_of_a_model_of_matrix_products_are_exact(tmp_path):
    width, hidden, words, seq, batch, ranks, seconds, peak = 64, 128, 320, 32, 8, 4, 0.25, 1e9
    with build_on_meta():
        layers = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, words, bias=False)
        model = nn.Sequential(nn.Embedding(words, width), *layers)
    per_sequence = count_flops(
        model, functools.partial(token_sequences(seq).example, 1), loss_of_logits
    )
    # 2 forward, 4 backward, per weight and token
    assert per_sequence == 6 * seq * (width * hidden + hidden * words)
    writer = MetricsWriter(str(tmp_path), {}, tensorboard=False)
    recorder = Recorder(
        log_every=1,
        steps=3,
        ranks=ranks,
        tokens_per_step=batch * seq,
        flops_per_step=per_sequence * batch,
        peak_flops=peak,
        writer=writer,
        display=None,
        hosts=HOSTS,
    )
    recorder.begin(0)
    measured = RankReports([seconds] * ranks, {}, {})
    outcome = StepOutcome(
        joins=False,
        preempted_ranks=[],
        ready_ranks=set(),
        replicas_lost_s=0.0,
        store_ends=False,
        gives_way=False,
        loss=1.0,
        grad_norm=1.0,
        tokens=batch * seq,
        batch_hash=0,
        own_norm=1.0,
        outer_norm=None,
        finite=True,
        preempted=False,
        save_is_due=False,
        reports=measured,
    )
    for step, step_s in enumerate((seconds, 2 * seconds, seconds), 1):
        is_last = step == 3
        recorder.record(
            Progress(step=step),
            outcome,
            0.1,
            {"step_s": step_s},
            None,
            last=is_last,
            lost_s=seconds / 4 if is_last else 0.0,
            given={},
        )
    recorder.close()
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["goodput/lost_replicas_s"] == pytest.approx(seconds / 4)
    assert row["throughput/tokens_per_s"] * row["time/step_s"] == pytest.approx(batch * seq)
    assert row["throughput/mfu"] == pytest.approx(per_sequence * batch / (seconds * ranks * peak))
    assert row["throughput/model_tflops_per_rank"] * 1e12 == pytest.approx(
        row["throughput/mfu"] * peak
    )


@pytest.mark.extras("transformers")
def test_the_flops_of_a_model_that_refuses_meta_tensors_are_counted():
    from parallel2d.models import huggingface

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 320,
        "num_key_value_heads": 4,
    }
    with build_on_meta():
        model = huggingface.build(None, "llama", sizes, "causal_lm")
    seq = 32
    products = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    # two layers; queries with keys, and weights with values, without the causal half
    attention = 2 * 2 * seq * 64
    example = functools.partial(token_sequences(seq).example, 1)
    assert count_flops(model, example, loss_of_logits) == 6 * seq * (products + attention)


ROW = {
    "loss": 3.0, "grad_norm": 1.0, "validation/loss": 3.1, "tokens": 100, "throughput/tokens_per_s": 50.0,
    "throughput/tokens_per_s_per_rank": 25.0, "throughput/model_tflops_per_rank": 0.1,
    "goodput/fraction": 0.5,
    "goodput/lost_data_s": 1.0, "memory/peak_rss_gib": 1.0, "rank/skew": 1.0, "time/step_s": 2.0,
    "time/data_s": 0.0,
    "time/forward_backward_s": 1.5, "time/sync_s": 0.3, "time/optimizer_s": 0.2,
    "learning_rate": 0.1, "throughput/mfu": 0.4, "comm/between_hosts/bytes": 8.0, "memory/peak_gib": 1.0,
    "replicas/present": 2,
    **dict.fromkeys(COMMUNICATION_KEYS, 10.0),
}  # fmt: skip


def test_event_files_hold_every_scalar_the_layout_the_texts_and_the_hyperparameters(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    texts, hparams = {"config": "a: 1", "mesh": "0 1"}, {"strategy": "hybrid", "lr": 0.1}
    options = {"tensorboard": True, "hparams": hparams, "axes": ("replicate", "shard")}
    options |= {"charts": ("hosts", "device"), "device_gib": 4.0}
    writer = MetricsWriter(str(tmp_path), texts, **options)
    writer.begin(0)
    for step in range(1, 11):
        writer.write({**ROW, "step": step, "loss": 3.0 / step}, [1.0, 2.0])
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tags = events.Tags()
    of_one_rank = {
        f"comm/{axis}/{what}" for axis in ("context", "tensor") for what in keys.QUANTITIES
    }
    assert set(tags["scalars"]) == {"loss", *ROW, *derived(ROW, 4.0)} - of_one_rank
    for tag in tags["scalars"]:
        assert events.summary_metadata[tag].summary_description == description(tag)
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(
        [3.0 / step for step in range(1, 11)]
    )
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 11))
    assert "rank/busy_s" in tags["histograms"]
    assert {"config/text_summary", "mesh/text_summary", "custom_scalars__config__"} <= set(
        tags["tensors"]
    )
    assert events.summary_metadata.keys() >= {
        "_hparams_/experiment",
        "_hparams_/session_start_info",
    }
    # Each axis with several ranks has a separate folder, and thus a separate colour.
    folders = [path.name for path in (tmp_path / "tensorboard").iterdir() if path.is_dir()]
    assert sorted(folders) == ["replicate", "shard"]
    for axis in folders:
        events = EventAccumulator(str(tmp_path / "tensorboard" / axis))
        events.Reload()
        assert sorted(events.Tags()["scalars"]) == sorted(tag for tag, _ in OF_AN_AXIS.values())
        megabytes = [event.value for event in events.Scalars("axis/megabytes")]
        assert megabytes == pytest.approx([10.0 / 1e6] * 10)


CHARTS = [*LAYOUT.items(), *OPTIONAL.values()]


def test_derived_values_are_percent_and_rates_of_a_row():
    found = derived(ROW, 4.0)
    assert found["time_percent/forward_backward"] == 75
    assert found["comm/between_hosts/bytes_per_s"] == 4
    assert found["memory/percent_of_device"] == 25
    assert derived({"step": 1, "memory/peak_gib": 1.0}, None) == {}


def test_every_key_of_a_row_has_a_description():
    names = [getattr(keys, name) for name in vars(keys) if name.isupper()]
    found = [each for each in names if isinstance(each, str) and each not in ("step", "segment")]
    assert [key for key in found if description(key) == description("of a hook")] == []


@pytest.mark.parametrize("chart", [item for _, charts in CHARTS for item in charts.items()])
def test_no_panel_of_the_dashboard_is_empty(chart):
    for pattern in chart[1]:
        tags = [*ROW, *derived(ROW, 4.0), *(tag for tag, _ in OF_AN_AXIS.values())]
        assert any(re.match(pattern, key) for key in tags), pattern


def began(folder, from_step):
    writer = MetricsWriter(str(folder), {}, tensorboard=False)
    found = writer.begin(from_step)
    writer.close()
    return found


def test_restart_moves_only_the_rows_of_undone_steps(tmp_path):
    path, aside = tmp_path / "metrics.jsonl", tmp_path / "metrics.before-restart-1.jsonl"
    assert began(tmp_path, 0) == (None, None)
    lines = [json.dumps({"step": step, "text": "x" * (step % 5)}) + "\n" for step in range(1, 11)]
    path.write_text("".join(lines))
    assert [row["step"] for row in began(tmp_path, 10)] == [10, 10]
    assert not aside.exists()
    path.write_text("".join(lines) + '{"step": 1')  # torn by a kill
    inode = path.stat().st_ino
    assert [row["step"] for row in began(tmp_path, 7)] == [10, 7]
    assert path.read_text() == "".join(lines[:7])
    assert path.stat().st_ino == inode, "what stands was not written again"
    assert aside.read_text() == "".join(lines[7:]) + '{"step": 1'
    last, standing = began(tmp_path, 0)
    assert (last["step"], standing, path.read_text()) == (7, None, "")
    assert (tmp_path / "metrics.before-restart-2.jsonl").read_text() == "".join(lines[:7])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ('{"step": 26}\n', "it begins at step 1 again, 26 steps are lost"),
        ("", None),
    ],
)
def test_restart_logs_the_number_of_lost_steps(tmp_path, rows, message):
    (tmp_path / "metrics.jsonl").write_text(rows)
    said = []
    display = SimpleNamespace(begin=lambda step: None, log=said.append)
    recorder = Recorder(
        log_every=1,
        steps=40,
        ranks=1,
        tokens_per_step=8,
        flops_per_step=None,
        peak_flops=None,
        writer=MetricsWriter(str(tmp_path), {}, tensorboard=False),
        display=display,
    )
    recorder.begin(0)
    assert [line for line in said if message and message in line] == said
    assert len(said) == (message is not None)


def test_reports_of_more_ranks_need_no_more_calls():
    own = RankReport(1.0, {"memory": 2.0}, {"bytes": 3.0, "calls": 4.0})

    def calls(ranks):
        values = torch.tensor([own.floats()] * ranks, dtype=torch.float64)
        counted = []
        sys.setprofile(lambda _frame, event, _argument: counted.append(event))
        try:
            reports = own.of_all(values)
        finally:
            sys.setprofile(None)
        assert reports.busy_s == [1.0] * ranks
        assert reports.memory == {"memory": 2.0}
        assert reports.communication == {"bytes": 3.0 * ranks, "calls": 4.0 * ranks}
        return len(counted)

    assert calls(1024) == calls(8)
