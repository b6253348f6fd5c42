"""A run that is stopped and resumed elsewhere has the same global batches and losses as an
undisturbed run.
"""

import json
from pathlib import Path

import jobs
import pytest
import torch
from training import largest_difference

from parallel2d.checkpoint import main
from parallel2d.training.checkpoint import Checkpoint


@pytest.mark.slow
def test_resume_on_other_layouts_keeps_batches_and_losses(ranks, folder):
    assert ranks.run(4, jobs.run, str(folder), str(folder / "whole"), (), 8)[0] == 0
    moved = str(folder / "moved")
    # saved 2; step 3 is lost
    assert ranks.run(4, jobs.run, str(folder), moved, (), 3)[0] == 0
    # saved 4; step 5 is lost
    assert ranks.run(2, jobs.run, str(folder), moved, ("strategy=zero3",), 3)[0] == 2
    words = ("mesh.tensor=2", "strategy=hybrid_zero2")
    assert ranks.run(4, jobs.run, str(folder), moved, words, 4)[0] == 4
    whole, other = jobs.rows(folder / "whole"), jobs.rows(folder / "moved")
    assert [row["step"] for row in other] == list(range(1, 9))
    assert len({row["data/batch_hash"] for row in whole}) == 8
    bounds = {"data/batch_hash": None, "tokens": None, "loss": 1e-10, "grad_norm": 1e-9}
    for key, bound in bounds.items():
        found, expected = [row[key] for row in other], [row[key] for row in whole]
        assert found == (pytest.approx(expected, rel=bound, abs=0) if bound else expected), key
    undone = sorted((folder / "moved").glob("metrics.before-restart-*.jsonl"))
    assert [json.loads(path.read_text().splitlines()[-1])["step"] for path in undone] == [3, 5]


AVERAGED = (
    "train.ema=0.9",
    "checkpoint.every=1",
    "checkpoint.keep_last=0",
    "train.validate_every=1",
    "optimizer.lr=0.01",
)


def saved(folder: Path, kind: str, step: int):
    stored = Checkpoint.open(str(folder / "checkpoints" / f"step-{step:08d}"))
    names = [name for name in stored.tensors if name.startswith(f"{kind}/")]
    return {name.removeprefix(f"{kind}/"): stored.read(name).numpy() for name in names}


def follow_the_weights(run_dir: Path, step: int) -> bool:
    """True if the EMA weights after ``step`` follow from the previous EMA weights and the weights,
    with decay 0.9.
    """
    before, weights = saved(run_dir, "ema", step - 1), saved(run_dir, "model", step)
    expected = {name: 0.9 * before[name] + 0.1 * each for name, each in weights.items()}
    return largest_difference(saved(run_dir, "ema", step), expected) <= 1e-14


def validation(run_dir: Path):
    return [row["validation/loss"] for row in jobs.rows(run_dir) if "validation/loss" in row]


@pytest.mark.slow
def test_ema_weights_resume_on_another_layout_and_are_exported(ranks, folder):
    alone, moved = folder / "alone", folder / "moved"
    ranks.run(1, jobs.run, str(folder), str(alone), (*AVERAGED, "strategy=ddp"), 2)
    for world, word in ((4, "strategy=hybrid_full"), (2, "strategy=zero3")):
        ranks.run(world, jobs.run, str(folder), str(moved), (*AVERAGED, word), 1)
    for step in (1, 2):
        assert largest_difference(saved(moved, "ema", step), saved(alone, "ema", step)) <= 1e-10
    assert follow_the_weights(moved, 2)
    assert validation(moved) == pytest.approx(validation(alone), rel=1e-10)
    for kind, words in (("ema", ["--ema"]), ("model", [])):
        target = str(folder / f"{kind}.pt")
        assert main(["convert", str(moved), target, *words]) == 0
        written = {name: each.numpy() for name, each in torch.load(target).items()}
        assert largest_difference(written, saved(moved, kind, 2)) == 0


@pytest.mark.slow
def test_ema_weights_are_validated_and_follow_shared_parameters_of_diloco(ranks, folder):
    run_dir, words = folder / "run", (*AVERAGED, "sync=diloco", "sync.every=2")
    for steps in (2, 1):
        ranks.run(4, jobs.run, str(folder), str(run_dir), words, steps)
    assert follow_the_weights(run_dir, 2)
    assert follow_the_weights(run_dir, 3)
    # A run that begins with the averages as its weights, and stays there, is validated as they were.
    file, begin = str(folder / "ema.pt"), str(folder / "begin")
    assert main(["convert", str(run_dir), file, "--ema"]) == 0
    assert main(["convert", file, begin, "--to", "parallel2d"]) == 0
    words = (f"checkpoint.resume={begin}", "checkpoint.load=model_only", "optimizer.lr=1e-30")
    words = (*words, "strategy=zero3", "train.validate_every=1")
    ranks.run(2, jobs.run, str(folder), str(folder / "again"), words, 1)
    assert validation(folder / "again") == pytest.approx(validation(run_dir)[-1:], rel=1e-10)


def test_fp16_loss_scale_and_skipped_steps_resume_bitwise(ranks, folder):
    words = ("precision=fp16", "optimizer.lr=1e-3", "train.micro_batch_size=2")
    ranks.run(2, jobs.run, str(folder), str(folder / "whole"), words, 8)
    for steps in (4, 4):
        ranks.run(2, jobs.run, str(folder), str(folder / "again"), words, steps)
    for key in ("loss", "grad_norm", "skipped_steps"):
        again, whole = (jobs.rows(folder / name) for name in ("again", "whole"))
        found, expected = [row[key] for row in again], [row[key] for row in whole]
        assert found == expected
