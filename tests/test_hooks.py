"""Hooks: their arguments and requests on every rank; an error on one rank; samples of text from
the model.
"""

import dataclasses
import functools
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import jobs
import pytest
import torch
import torch.distributed as dist
from test_command_line import execute
from training import full_tensor_of
from workers import WorkerError

from parallel2d.base.errors import ConfigError
from parallel2d.training.hooks import Hook, HookCalls, HookResult, SampleText, build_hooks
from parallel2d.training.trainer_parts import LoopCallbacks


class Giving(Hook):
    """Return custom metrics, on all ranks, on one rank, and after a validation."""

    def start(self, run, step):
        return {"begun_on": float(run.rank), "level": -1.0}

    def step(self, run, step, metrics):
        given = {"rank": run.rank, "loss_twice": 2 * metrics["loss"], "level": float(step)}
        # Of 1 and 3 samples, 1 and 0 are right.
        given["accuracy"] = (1 - run.rank, 1 + 2 * run.rank)
        return given if run.rank == 0 else HookResult({**given, "only": torch.tensor(step)})

    def validation(self, run, step, metrics):
        return {"validation/worst": max(metrics.values())}


def test_hook_metric_is_the_mean_over_reporting_ranks(ranks, folder):
    words = ("train.hooks=[test_hooks:Giving]", "train.steps=4", "train.validate_every=2")
    ranks.run(2, jobs.run_to_the_end, str(folder), str(folder / "run"), words)
    rows = jobs.rows(folder / "run")
    assert [row["rank"] for row in rows] == [0.5] * 4
    assert [row["accuracy"] for row in rows] == [1 / 4] * 4
    assert [row["only"] for row in rows] == [1.0, 2.0, 3.0, 4.0]
    assert [row["loss_twice"] for row in rows] == [2 * row["loss"] for row in rows]
    # Metrics from before the first step count in it, unless the step returns them too.
    assert [row.get("begun_on") for row in rows] == [0.5, None, None, None]
    assert [row["level"] for row in rows] == [1.0, 2.0, 3.0, 4.0]
    worst = [row.get("validation/worst") for row in rows]
    assert worst == [row.get("validation/loss") for row in rows]
    assert worst.count(None) == 2


class Noting(Hook):
    """Notes its calls in a file per rank."""

    def note(self, run, *what):
        with open(os.path.join(run.run_dir, f"calls-{run.rank}.jsonl"), "a") as file:
            file.write(json.dumps(what) + "\n")

    def start(self, run, step):
        self.note(run, "start", step)

    def step(self, run, step, metrics):
        self.note(run, "step", step)

    def validation(self, run, step, metrics):
        self.note(run, "validation", step, sorted(metrics))

    def row(self, run, step, row):
        assert step == row["step"]
        with open(os.path.join(run.run_dir, f"rows-{run.rank}.jsonl"), "a") as file:
            file.write(json.dumps(row) + "\n")

    def save(self, run, step, path):
        assert os.path.exists(os.path.join(path, "manifest.json"))
        self.note(run, "save", step, os.path.basename(path))

    def end(self, run, step, reason):
        self.note(run, "end", step, reason)


def calls_of(folder, rank):
    lines = (folder / "run" / f"calls-{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


class Asking(Hook):
    """Rank 1 asks for a save after step 3 and for an end after step 5."""

    def step(self, run, step, metrics):
        if run.rank != 1 or step not in (3, 5):
            return None
        return HookResult(save=step == 3, stop="enough" if step == 5 else None)


def test_request_of_one_rank_is_followed_by_all(ranks, folder):
    words = ("checkpoint.every=0", "train.validate_every=4", "metrics.log_every=2")
    words += ("train.hooks=[test_hooks:Asking, test_hooks:Giving, test_hooks:Noting]",)
    ends = ranks.run(2, jobs.run_to_the_end, str(folder), str(folder / "run"), words)
    assert ends == [(5, "stopped after step 5 by a hook: enough")] * 2
    saved = sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())
    assert saved == ["step-00000003", "step-00000005"]
    # Each rank is notified of an asynchronous save once it is published.
    for rank in (0, 1):
        assert [call[1] for call in calls_of(folder, rank) if call[0] == "save"] == [3, 5]
    rows = jobs.rows(folder / "run")
    # A row holds the newest value of each metric, and the last step is validated.
    assert [(row["step"], row["only"]) for row in rows] == [(1, 1), (2, 2), (4, 4), (5, 5)]
    assert [row["step"] for row in rows if "validation/loss" in row] == [4, 5]


def run_until_asked_to_end(folder, run_dir, words, step):
    trainer = jobs.build(folder, run_dir, words)
    trainer.run(LoopCallbacks(lambda: trainer.progress.step >= step))
    trainer.recorder.close()
    return trainer.preempted, trainer.progress.step


def test_stop_request_writes_a_row_for_the_last_step(ranks, folder):
    words = ("metrics.log_every=50", "train.steps=12")
    ends = ranks.run(2, run_until_asked_to_end, str(folder), str(folder / "run"), words, 3)
    was_asked, last = ends[0]
    assert was_asked
    assert 3 <= last < 12
    assert jobs.rows(folder / "run")[-1]["step"] == last


def test_hooks_run_in_one_order_on_every_rank_and_after_resume(ranks, folder):
    words = (
        "train.hooks=[test_hooks:Noting]",
        "train.validate_every=3",
        "checkpoint.asynchronous=false",
        "train.steps=6",
    )
    ranks.run(2, jobs.run, str(folder), str(folder / "run"), words, 5)
    ranks.run(2, jobs.run_to_the_end, str(folder), str(folder / "run"), words)
    calls = calls_of(folder, 0)
    assert calls == calls_of(folder, 1)
    validation = ["validation", 3, ["validation/loss"]]
    first = [
        ["start", 0],
        ["step", 1],
        ["step", 2],
        ["save", 2, "step-00000002"],
        validation,
        ["step", 3],
        ["step", 4],
        ["save", 4, "step-00000004"],
        ["step", 5],
    ]
    second = [
        ["start", 4],
        ["step", 5],
        ["validation", 6, ["validation/loss"]],
        ["step", 6],
        ["save", 6, "step-00000006"],
        ["end", 6, "finished"],
    ]
    assert calls == first + second
    noted = [json.loads(row) for row in (folder / "run" / "rows-0.jsonl").read_text().splitlines()]
    assert [row["step"] for row in noted] == [1, 2, 3, 4, 5, 5, 6]
    assert noted[-2:] == jobs.rows(folder / "run")[-2:], "hooks get whole rows"


class Failing(Hook):
    def __init__(self, method, rank=1):
        self.method, self.rank = method, rank

    def fail(self, run, method):
        if method == self.method and run.rank == self.rank:
            raise ValueError("no luck\nin two lines")
        if method == "step" and self.method == "leave" and run.rank == self.rank:
            sys.exit(7)

    def start(self, run, step):
        self.fail(run, "start")

    def step(self, run, step, metrics):
        self.fail(run, "step")

    def validation(self, run, step, metrics):
        self.fail(run, "validation")

    def save(self, run, step, path):
        self.fail(run, "save")

    def end(self, run, step, reason):
        self.fail(run, "end")


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("start", "start failed on rank 1 at step 0: ValueError: no luck ("),
        ("leave", "step failed on rank 1 at step 1: SystemExit: 7"),
        ("save", "save failed on rank 1 at step 2: ValueError: no luck ("),
    ],
)
def test_hook_exception_on_one_rank_gives_one_message_on_all(ranks, folder, method, told):
    words = (
        f"train.hooks=[{{hook: 'test_hooks:Failing', method: {method}}}]",
        "train.steps=4",
        "train.validate_every=3",
        "checkpoint.asynchronous=false",
    )
    with pytest.raises(WorkerError) as caught:
        ranks.run(2, jobs.run_to_the_end, str(folder), str(folder / "run"), words)
    assert caught.value.everywhere
    assert caught.value.kind == "HookError"
    assert caught.value.message.startswith(f"train.hooks: test_hooks:Failing.{told}")
    assert "\n" not in caught.value.message


class Returning(Hook):
    def __init__(self, what, method="step"):
        self.what = what
        if method == "save":
            self.save = self.step

    def step(self, run, step, metrics):
        return self.what


def call_once(hooks):
    """Call the hooks as the trainer does after a saved step."""
    config = SimpleNamespace(data=SimpleNamespace(validation={"wiki": {}}))
    calls = HookCalls(hooks, SimpleNamespace(rank=dist.get_rank(), config=config))
    calls.saved(2, "step-00000002")
    calls.step(2, {}, None, True)


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ([Returning({"loss": 1.0})], "the metric loss is one that the trainer measures"),
        ([Returning({"validation/wiki/loss": 1})], "loss is one that the trainer measures"),
        ([Returning({"a": 1}), Returning({"a": 2})], "the metric a is given by two hooks"),
        ([Returning({"a": "b"})], "could not convert string to float: 'b'"),
        ([Returning({"a": (1, -1)})], "the metric a has the count -1, which must be at least 0"),
        ([Returning({1: 1})], "a metric has the name 1, which is not a string"),
        ([Returning(7)], "it may return a dict of metrics, a HookResult or None"),
        ([Returning({}, "save")], "save returned {}; it may return nothing"),
    ],
)
def test_invalid_hook_return_value_ends_the_run(ranks, hooks, message):
    with pytest.raises(WorkerError) as caught:
        ranks.run(2, call_once, hooks)
    assert caught.value.everywhere
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["nowhere:Hook"], "train.hooks=nowhere:Hook cannot be imported"),
        (["test_hooks:Nothing"], "has no attribute 'Nothing'"),
        (["test_hooks:SAMPLE"], "is not callable"),
        (["test_hooks:call_once"], "is not a class derived from parallel2d.hooks.Hook"),
        (["test_hooks:Misspelt"], r"has a method on_step, which .* did you mean step\?"),
        ([{"hook": "test_hooks:Failing"}], "missing a required argument: 'method'"),
        ([{"hook": "test_hooks:Noting", "x": 1}], "unexpected keyword argument 'x'|too many"),
        (
            [{"hook": "parallel2d.hooks:SampleText", "every": 0}],
            r"SampleText: ConfigError: every=0 and tokens=64 must be at least 1",
        ),
    ],
)
def test_invalid_hook_gives_one_message(entries, message):
    with pytest.raises(ConfigError, match=message):
        build_hooks(entries)


class Misspelt(Hook):
    def send(self, text):
        """A custom method."""

    def on_step(self, run, step, metrics):
        pass


class Keeping(SampleText):
    """Record the displayed values by step, on every rank."""

    shown: dict

    def step(self, run, step, metrics):
        self.shown = getattr(self, "shown", {})

        def keep(tag, text, at):
            self.shown[at] = text

        super().step(dataclasses.replace(run, show_text=keep), step, metrics)


SAMPLE = {"every": 2, "prompt": "12 times", "tokens": 20}
LAYOUTS = {
    "hybrid": ("strategy=hybrid", "mesh.replicate=2"),
    "split updates": ("strategy=hybrid_full", "mesh.replicate=2"),
    "tensor": ("strategy=hybrid", "mesh.tensor=2"),
}
TRAINED = ("optimizer.lr=0.02", "train.steps=6", "checkpoint.enabled=false")


def samples(folder, run_dir, words, **arguments):
    hook = Keeping(**{**SAMPLE, **arguments})
    jobs.run_to_the_end(folder, run_dir, (*TRAINED, *words), [hook])
    return hook.shown


def greedy(folder, run_dir, words):
    """After the last step, from whole logits of rows without padding, as one would write it down."""
    trainer = jobs.build(folder, run_dir, (*TRAINED, *words))
    trainer.run()
    trainer.recorder.close()
    ids = list(SAMPLE["prompt"].encode())
    with torch.no_grad():
        for _ in range(SAMPLE["tokens"]):
            logits = trainer.model(torch.tensor([ids[-16:]]))
            ids.append(int(logits[0, -1, :257].argmax()))
    return bytes(token for token in ids if token < 256).decode(errors="replace")


@pytest.mark.slow
def test_generated_sample_is_equal_on_every_layout_and_rank(ranks, folder):
    (expected,) = ranks.run(1, samples, str(folder), str(folder / "one"), ())
    assert list(expected) == [2, 4, 6]
    assert ranks.run(1, greedy, str(folder), str(folder / "plain"), ()) == [expected[6]]
    for layout, words in LAYOUTS.items():
        found = ranks.run(4, samples, str(folder), str(folder / layout), words)
        assert found == [expected] * 4, layout


@pytest.mark.slow
def test_sampled_tokens_depend_only_on_seed_and_step(ranks, folder):
    def drawn(name, *words):
        arguments = (str(folder), str(folder / name), words)
        first, second = ranks.run(2, samples, *arguments, temperature=1.0)
        assert first == second
        return first

    one = drawn("one", "strategy=ddp")
    assert len(set(one.values())) == 3
    assert drawn("two", "strategy=zero2") == one
    assert drawn("seed", "strategy=ddp", "train.seed=1") != one


class Dropping(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(320, 16)
        self.drop = torch.nn.Dropout(0.5)
        self.head = torch.nn.Linear(16, 320)

    def forward(self, tokens):
        return self.head(self.drop(self.table(tokens)))


def losses_and_weights(folder, run_dir, words, hooks):
    trainer = jobs.build(folder, run_dir, words, hooks)
    trainer.model.head.eval()
    trainer.run()
    trainer.recorder.close()
    weights = [
        full_tensor_of(parameter).detach().numpy() for parameter in trainer.model.parameters()
    ]
    return weights, torch.get_rng_state().numpy(), [m.training for m in trainer.model.modules()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [("strategy=zero2",), ("sync=diloco", "sync.every=3", "strategy=ddp")]
)
def test_hooks_and_samples_change_no_weights_or_losses(ranks, folder, layout):
    words = (
        "model=custom",
        "model.target=test_hooks:Dropping",
        "precision=fp32",
        "train.steps=7",
        "checkpoint.enabled=false",
        *layout,
    )
    plain = ranks.run(2, losses_and_weights, str(folder), str(folder / "plain"), words, ())
    hooks = [SampleText(every=2, tokens=9, temperature=0.7), Giving()]
    other = ranks.run(2, losses_and_weights, str(folder), str(folder / "hooked"), words, hooks)
    for (weights, state, modes), (same, state_after, modes_after) in zip(plain, other, strict=True):
        assert all((left == right).all() for left, right in zip(weights, same, strict=True))
        assert (state == state_after).all()
        assert modes == modes_after
    losses = [[row["loss"] for row in jobs.rows(folder / name)] for name in ("plain", "hooked")]
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 7


def test_samples_are_in_tensorboard(ranks, folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = ("metrics.tensorboard=true", "train.steps=4", "checkpoint.enabled=false")
    hook = SampleText(every=2, tokens=3, prompt="12 times")
    ranks.run(2, jobs.run_to_the_end, str(folder), str(folder / "run"), words, [hook])
    board = EventAccumulator(str(folder / "run" / "tensorboard"))
    board.Reload()
    events = board.Tensors("sample/text_summary")
    assert [event.step for event in events] == [2, 4]
    assert b"12 times" in events[0].tensor_proto.string_val[0]


def test_samples_of_another_tokenizer_than_that_of_the_data_are_refused(ranks, folder):
    hook = SampleText(tokenizer="nowhere.json")
    with pytest.raises(WorkerError, match=r"hooks:SampleText: data\.tokenizer=nowhere\.json"):
        ranks.run(2, jobs.run_to_the_end, str(folder), str(folder / "run"), (), [hook])


@pytest.fixture
def command(folder, monkeypatch):
    """The train command on two ranks, which finds the hooks of this file."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    small = [word for word in jobs.SMALL if not word.startswith("metrics.console")]
    return functools.partial(
        execute, folder, *small, "hydra.run.dir=run", "launch.nproc_per_node=2"
    )


class FailingInside(SampleText):
    """Rank 1 raises before a forward while the other rank waits for it in the forward."""

    def _next(self, *given):
        if dist.get_rank() == 1:
            raise OSError("the disk of rank 1")
        return super()._next(*given)


@pytest.mark.slow
def test_failure_inside_a_collective_is_reported_once(command):
    done = command("train.hooks=[{hook: 'test_hooks:FailingInside', every: 1}]")
    assert done.returncode == 1
    assert done.stderr.count("OSError: the disk of rank 1") == 1
    assert "failed on rank 1 at step 1: OSError: the disk of rank 1" in done.stderr
    assert "Traceback" not in done.stderr
    assert "failed first" not in done.stderr


@pytest.mark.slow
def test_samples_and_the_failure_of_a_hook_are_on_the_console_and_in_the_log(folder, command):
    hooks = (
        "{hook: 'parallel2d.hooks:SampleText', every: 2, prompt: '12 times', tokens: 4}",
        "{hook: 'test_hooks:Failing', method: end}",
    )
    done = command(f"train.hooks=[{','.join(hooks)}]", "train.steps=4")
    assert done.returncode == 1
    log = (folder / "run" / "train.log").read_text()
    for text in (done.stderr, log):
        assert text.count("sample at step") == 2
        assert text.count("\n12 times") == 2
        assert text.count("failed on rank 1 at step 4: ValueError: no luck") == 1
        assert "Traceback" not in text
        assert "failed first" not in text
