"""The micro-batch size that is measured before the first step: its choice, and the same losses."""

import re
import subprocess
import sys
from unittest import mock

import jobs
import pytest
import torch

from parallel2d.base.errors import ConfigError
from parallel2d.training import micro_batch_size
from parallel2d.training.micro_batch_size import candidates


def test_candidates_are_divisors_that_at_least_double():
    assert candidates(8) == [1, 2, 4, 8]
    assert candidates(24) == [1, 2, 4, 8, 24]
    assert candidates(7) == [1, 7]


def build_and_train(folder, run_dir, words):
    """Return the micro-batch size, and the states of the generators before and after training."""
    found = {}

    def note(trainer):
        found.setdefault("size", trainer.plan.micro_batch_size)
        found.setdefault("rng", torch.get_rng_state().tolist())

    jobs.run(folder, run_dir, words, 3, note)
    return found


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("hybrid_full", marks=pytest.mark.slow)])
def test_probed_size_trains_like_the_same_size_given(ranks, folder, strategy):
    words = (f"strategy={strategy}", "checkpoint.enabled=false", "train.ema=0.9")
    results, rows = {}, {}
    for name, key in (("probed", "train.memory_gib=900"), ("given", "train.micro_batch_size=8")):
        run = folder / f"{strategy}-{name}"
        results[name] = ranks.run(2, build_and_train, str(folder), str(run), (*words, key))
        rows[name] = [(row["loss"], row["grad_norm"]) for row in jobs.rows(run)]
    assert results["probed"] == results["given"]
    assert results["given"][0]["size"] == 8
    assert rows["probed"] == rows["given"]


def run_out_of_memory(folder, run_dir, words, failures, moment="forward"):
    """Raise torch's error in these calls of the first block: in the forward pass, or in the
    backward pass, after the gradients of the later blocks. Return the micro-batch sizes, or the
    notes of the error that ends the job.
    """
    sizes = []

    def fail(*_):
        raise torch.OutOfMemoryError("simulated")

    def note(trainer):
        if sizes:
            return
        sizes.append(trainer.plan.micro_batch_size)

        def see(module, args, output):
            sizes.append(len(output))
            if len(sizes) - 1 in failures:
                fail() if moment == "forward" else output.register_hook(fail)

        trainer.model.layers[0].register_forward_hook(see)

    try:
        jobs.run(folder, run_dir, words, 3, note)
    except torch.OutOfMemoryError as error:
        return error.__notes__
    return sizes


@pytest.mark.parametrize(
    ("strategy", "more", "moment"),
    [
        ("hybrid", (), "backward"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("hybrid", (), "forward"),
                ("hybrid_full", (), "backward"),
                ("ddp", ("sync.during_accumulation=full",), "backward"),
            )
        ),
    ],
)
def test_step_that_runs_out_of_memory_is_repeated_in_halves(ranks, folder, strategy, more, moment):
    words = (f"strategy={strategy}", "checkpoint.enabled=false", "train.steps=3", *more)
    given, failed = folder / "given", folder / "failed"
    ranks.run(4, jobs.run, str(folder), str(given), words, 3)
    found = ranks.run(
        4,
        run_out_of_memory,
        str(folder),
        str(failed),
        (*words, "train.memory_gib=900"),
        {1},
        moment,
    )
    # In the second step: one failed call, and halves from then on
    assert found == [[4, 4, 2, 2, 2, 2]] * 4
    for row, expected in zip(jobs.rows(failed), jobs.rows(given), strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-10, abs=0)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-10, abs=0)


def run_out_in_the_second_of_two(folder, run_dir, words):
    with mock.patch.object(micro_batch_size, "candidates", return_value=[2]):
        return run_out_of_memory(folder, run_dir, words, {2})


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "reduce_scatter_only", "full"])
def test_repetition_drops_the_gradients_of_earlier_micro_batches(ranks, folder, mode):
    words = ("checkpoint.enabled=false", "train.steps=3", f"sync.during_accumulation={mode}")
    given, failed = folder / f"given-{mode}", folder / f"failed-{mode}"
    ranks.run(4, jobs.run, str(folder), str(given), words, 3)
    words = (*words, "train.memory_gib=900")
    found = ranks.run(4, run_out_in_the_second_of_two, str(folder), str(failed), words)
    # The second step fails in the second of two micro-batches; then steps have four halves.
    assert found == [[2, 2, 2, *[1] * 8]] * 4
    for row, expected in zip(jobs.rows(failed), jobs.rows(given), strict=True):
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-10, abs=0)


@pytest.mark.parametrize(
    ("more", "failures", "says"),
    [
        ((), {1, 2}, "halved once already"),
        (("train.global_batch_size=2",), {1}, "a micro-batch has one sample"),
    ],
)
def test_step_that_cannot_shrink_ends_with_the_reason(ranks, folder, more, failures, says):
    words = ("strategy=zero3", "checkpoint.enabled=false", "train.memory_gib=900", *more)
    for notes in ranks.run(2, run_out_of_memory, str(folder), str(folder / "r"), words, failures):
        assert len(notes) == 1
        assert says in notes[0]


def refused(folder, run_dir, words):
    with pytest.raises(ConfigError, match=r"memory_gib=0.01: one sample .* needs more .*1: 0\."):
        jobs.build(folder, run_dir, words)


def test_too_little_memory_is_one_message(ranks, folder):
    words = ("train.memory_gib=0.01", "checkpoint.enabled=false")
    ranks.run(2, refused, str(folder), str(folder / "refused"), words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("train.memory_gib=1", "train.micro_batch_size=2"), "memory_gib=1.* has no effect"),
        (("train.memory_gib=1", "data=stream", "data.target=a:b"), "data=stream would lose"),
    ],
)
def test_measuring_is_refused_where_it_has_no_effect(words, says):
    with pytest.raises(ConfigError, match=says):
        jobs.config_of([*words])


@pytest.mark.soak
def test_limit_decides_the_size_and_no_loss(tmp_path):
    """In new processes, because malloc keeps freed memory."""

    def train(name, *words):
        run = tmp_path / name
        command = [
            *(sys.executable, "-m", "parallel2d.train", "train.steps=3", "train.seq_len=512"),
            *("train.global_batch_size=16", "train.validate_every=0", "checkpoint.enabled=false"),
            *("precision=fp64", f"hydra.run.dir={run}", *words),
        ]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        text = done.stderr.replace("\n            ", " ")
        return text, [row["loss"] for row in jobs.rows(run)]

    _, expected = train("one", "launch.nproc_per_node=1", "train.micro_batch_size=16")
    for strategy in ("ddp", "zero3"):
        words = (f"strategy={strategy}", "launch.nproc_per_node=2")
        text, losses = train(f"{strategy}-all", *words, "train.memory_gib=900")
        assert "micro-batch 8 of 8 samples fits" in text
        assert losses == pytest.approx(expected, rel=1e-10, abs=0)
        needed = {int(size): float(gib) for size, gib in re.findall(r"(\d+): ([\d.]+) GiB", text)}
        assert needed[8] > needed[4] > needed[2] > needed[1]
        limit = (needed[2] + needed[4]) / 2
        text, losses = train(f"{strategy}-two", *words, f"train.memory_gib={limit:.4f}")
        assert "micro-batch 2 of 8 samples fits" in text
        assert "4 micro-batches x 2" in text
        assert losses == pytest.approx(expected, rel=1e-10, abs=0)
