"""The example for Ray Train: Ray's workers and a single process have the same losses."""

import json
import os
import pickle
import sys
from pathlib import Path

import jobs
import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "ray_train.py"
WORDS = ["--steps=4", "--precision=fp64"]


def rows_of(words: list[str], folder: Path) -> list[dict]:
    of_ranks = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {key: value for key, value in os.environ.items() if key not in of_ranks}
    environment = {**env, "OMP_NUM_THREADS": "1"}
    done = jobs.run_python(*words, cwd=folder, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def equal(some: list[dict], others: list[dict]) -> None:
    assert [row["step"] for row in some] == [row["step"] for row in others] == [1, 2, 3, 4]
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in some] == pytest.approx(
            [row[key] for row in others], rel=1e-10, abs=0
        )
    assert some[0]["loss"] > some[-1]["loss"]


@pytest.mark.slow
def test_ray_example_has_equal_losses_on_one_and_two_ranks(tmp_path):
    """Without Ray, so that it runs everywhere."""
    alone = rows_of([str(EXAMPLE), "--no-ray", *WORDS], tmp_path)
    launch = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(EXAMPLE),
        "--no-ray",
        "--shard=2",
        *WORDS,
    ]
    equal(rows_of(launch, tmp_path), alone)


def test_package_function_can_be_pickled_for_a_ray_worker():
    """Ray sends a training function along with the globals it names."""
    from parallel2d import parallelize

    sent = pickle.loads(pickle.dumps(parallelize))
    assert sent is parallelize
    assert sent is sys.modules["parallel2d.parallel.parallelize"].parallelize


@pytest.mark.parametrize(
    ("workers", "shard"),
    [
        pytest.param(2, "2", marks=pytest.mark.soak),
        pytest.param(4, "2", marks=pytest.mark.extras("ray")),  # two replicas, on however few cores
    ],
)
def test_ray_workers_have_the_losses_of_one_process(tmp_path, workers, shard):
    alone = rows_of([str(EXAMPLE), "--no-ray", *WORDS], tmp_path)
    words = [
        str(EXAMPLE),
        f"--workers={workers}",
        f"--shard={shard}",
        f"--storage={tmp_path / 'ray'}",
        *WORDS,
    ]
    equal(rows_of(words, tmp_path), alone)
