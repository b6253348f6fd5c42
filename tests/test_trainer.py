"""Decisions of the loop: skipped steps with non-finite values, learning rates, loss scale; and the
installed package.
"""

import os
import subprocess
import sys
from pathlib import Path

import jobs
import pytest
import torch
from torch import nn
from workers import WorkerError

from parallel2d.base.config import SchedulerConfig
from parallel2d.training.optimizer.learning_rate import learning_rate
from parallel2d.training.optimizer.loss_scaler import LossScaler


class Breaking(nn.Module):
    """Bigram logits that are not a number on one rank in some of its forward passes."""

    def __init__(self, rank, calls):
        super().__init__()
        self.table = nn.Embedding(320, 320)
        self.rank, self.calls, self.count = rank, calls, 0

    def forward(self, tokens):
        logits = self.table(tokens)
        if not tokens.is_meta:
            self.count += 1
            if torch.distributed.get_rank() == self.rank and self.count in self.calls:
                logits = logits * torch.nan
        return logits


def breaking(calls):
    arguments = f"++model.arguments={{rank: 1, calls: {calls}}}"
    return (
        "model=custom",
        "model.target=test_trainer:Breaking",
        arguments,
        "checkpoint.enabled=false",
        "optimizer.lr=0.1",
    )


METHODS = {
    "exact": (),
    "int4": ("sync.wire=int4", "sync.warmup=0", "strategy=ddp"),
    "split": ("strategy=hybrid_full", "mesh.replicate=2"),
    "diloco": ("sync=diloco", "sync.every=2", "strategy=ddp"),
}


@pytest.mark.parametrize("method", METHODS)
def test_all_ranks_skip_a_step_with_non_finite_gradients_on_one_rank(ranks, folder, method):
    words = (*breaking([3]), *METHODS[method])
    ranks.run(2, jobs.run, str(folder), str(folder / "run"), words, 6)
    found = jobs.rows(folder / "run")
    assert [row["loss"] is None for row in found] == [False, False, True, False, False, False]
    assert [row["skipped_steps"] for row in found] == [0, 0, 1, 1, 1, 1]
    assert found[5]["loss"] < found[0]["loss"]


def test_too_many_consecutive_skipped_steps_end_the_run(ranks, folder):
    words = (*breaking([2, 3, 4]), "train.max_skipped_steps=3")
    with pytest.raises(WorkerError, match="not finite in 3 steps in a row .*the last one step 4"):
        ranks.run(2, jobs.run, str(folder), str(folder / "run"), words, 6)


def flip_a_bit(trainer):
    """After step 3, on rank 1."""
    if trainer.progress.step == 3 and torch.distributed.get_rank() == 1:
        local = next(iter(trainer.model.parameters())).detach().to_local()
        local.view(-1).view(torch.int32)[5] ^= 1 << 9


def test_unequal_replica_ends_the_run_with_the_parameter_name(ranks, folder):
    words = ("strategy=ddp", "sync.compare_every=6", "checkpoint.enabled=false")
    says = r"embedding\.weight differs between ranks \[0\] and \[1\]"
    with pytest.raises(WorkerError, match=says):
        ranks.run(2, jobs.run, str(folder), str(folder / "run"), words, 12, flip_a_bit)
    # The comparison at step 6 sees the parameters that step 5 has left.
    assert jobs.rows(folder / "run")[-1]["step"] == 5


def test_learning_rate_is_a_function_of_the_step():
    def rates(name, **options):
        config = SchedulerConfig(name, **options)
        return [round(learning_rate(step, 10, 1.0, config), 6) for step in range(1, 11)]

    assert rates("constant") == [1.0] * 10
    assert rates("constant", warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates("linear", floor=0.1)[0] == 1.0
    assert rates("linear", floor=0.1)[-1] == 0.1
    cosine = rates("cosine", warmup_steps=2, floor=0.0)
    assert cosine[1] == 1.0
    assert cosine[-1] == 0.0
    assert cosine[2:] == sorted(cosine[2:], reverse=True)
    wsd = rates("wsd", floor=0.0, decay_fraction=0.5)
    assert wsd[:5] == [1.0] * 5
    assert wsd[-1] == 0.0


def test_loss_scale_halves_on_overflow_and_grows_after_good_steps():
    scaler = LossScaler(True, scale=8.0, growth_every=2)
    scales = []
    for finite in (False, True, True, True, False, False, False, False):
        scaler.update(finite)
        scales.append(scaler.scale)
    assert scales == [4.0, 4.0, 8.0, 8.0, 4.0, 2.0, 1.0, 1.0]
    again = LossScaler(True)
    again.load_state_dict(scaler.state_dict())
    assert again.scale == 1.0
    off = LossScaler(False)
    off.update(False)
    assert off.scale == 1.0


@pytest.mark.slow
def test_a_wheel_installed_elsewhere_trains_from_an_empty_folder(tmp_path):
    source, site, empty = Path(__file__).parent.parent, tmp_path / "site", tmp_path / "empty"
    pip = [sys.executable, "-m", "pip", "--quiet", "--no-input"]
    copied = tmp_path / "source"
    copied.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "parallel2d", "conf", "models"):
        (copied / name).symlink_to(source / name)
    (copied / "tools/install").mkdir(parents=True)
    (copied / "tools/install/parallel2d").symlink_to("../../parallel2d")
    build = [
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(tmp_path),
        str(copied),
    ]
    subprocess.run([*pip, *build], check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True, timeout=120
    )
    empty.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    where = (
        "import parallel2d, parallel2d.conf, parallel2d.models; print(parallel2d.__file__, "
        "parallel2d.models.__file__)"
    )
    found = jobs.run_python("-c", where, cwd=empty, env=environment, check=True)
    assert found.stdout.count(str(site)) == 2
    words = [
        "train.steps=2",
        "model.n_layers=1",
        "launch.nproc_per_node=1",
        "data.cache_dir=cache",
        "train.validate_every=0",
    ]
    done = jobs.run_python("-m", "parallel2d.train", *words, cwd=empty, env=environment)
    assert done.returncode == 0, done.stderr
    assert len(list(empty.glob("outputs/*/*/metrics.jsonl"))) == 1
