"""The self-check as a first user starts it: passing checks on the CPU path, a wrong gradient, a
run that is not resumed.
"""

import os
from pathlib import Path

import jobs
import pytest
from test_preflight import copy_of_the_package

from parallel2d.instruments.preflight.self_check import GRADIENTS, RUNS


def self_check(*options: str, package: Path | None = None):
    """The exit code, the first line, the rows of the table by check, and the last line.
    ``package``: the folder of another package.
    """
    environment = dict(os.environ)
    if package is not None:
        environment["PYTHONPATH"] = str(package)
    words = ("-m", "parallel2d.preflight", "--self-check", *options)
    done = jobs.run_python(*words, env=environment, cwd=package)
    first, *rows, last = done.stdout.splitlines()
    table = {row.split()[0]: row.partition(" s  ")[2] for row in rows}
    assert len(table) == len(rows), done.stdout
    return done.returncode, first, table, last


def package_with(folder: Path, file: str, right: str, wrong: str) -> Path:
    """A folder with a copy of the package and one changed place in ``file``."""
    path = copy_of_the_package(folder) / file
    text = path.read_text()
    assert text.count(right) == 1
    path.write_text(text.replace(right, wrong))
    return folder


def test_late_gradients_pass_on_cpu_and_report_names_missing_gpu():
    code, first, table, last = self_check("--only=streams", "--nproc=4")
    assert first.startswith("4 x CPU, torch ")
    assert first.endswith(": this checks the CPU path only, with gloo")
    assert table["streams"].startswith("passed: largest error of a gradient ")
    assert (code, list(table), last) == (0, ["streams"], "self-check: no check failed")


def test_wrong_gradient_fails(tmp_path):
    sums = package_with(
        tmp_path,
        "parallel/sync/methods/every_step.py",
        "dist.all_reduce(sent, dist.ReduceOp.AVG",
        "dist.all_reduce(sent, dist.ReduceOp.SUM",
    )
    code, _, table, last = self_check("--only=fp32", "--nproc=2", package=sums)
    assert table["fp32"].startswith("FAILED: 2 x 1, step 1: gradient of ")
    assert (code, last) == (1, "self-check: FAILED")


@pytest.mark.slow
def test_replicas_on_one_rank_are_skipped():
    code, _, table, _ = self_check("--only=streams,bf16", "--nproc=1")
    reason = "skipped: two replicas need an even number of ranks, and here is 1"
    assert (code, table) == (0, {"streams": reason, "bf16": reason})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        # Nothing waits for the sum over the shard axis.
        (
            "parallel/parallelize/reduce_scatter.py",
            "self._enter(SCATTER, input_tensor)",
            "return None",
        ),
        # A replica of one rank reads a gradient before it is written.
        (
            "parallel/fsdp_internals/fsdp_group.py",
            "parameter.add_gradient(gradient)",
            "parameter.add_gradient(gradient * float('nan'))",
        ),
    ],
)
def test_gradient_that_is_read_before_it_is_written_fails(tmp_path, file, right, wrong):
    early = package_with(tmp_path, file, right, wrong)
    code, _, table, _ = self_check("--only=streams", "--nproc=2", package=early)
    assert table["streams"].startswith("FAILED: ")
    assert "it holds NaN or infinity" in table["streams"]
    assert code == 1


@pytest.mark.soak
def test_restarted_run_fails_the_self_check(tmp_path):
    forgets = package_with(
        tmp_path,
        "training/checkpoint/checkpointer.py",
        "restarted = any(self.group.all_gather(restarted))",
        "return None",
    )
    code, _, table, _ = self_check("--only=resume", "--nproc=2", package=forgets)
    assert table["resume"].startswith("FAILED: steps ")
    assert code == 1


@pytest.mark.slow
def test_all_checks_pass_on_the_cpu_path():
    code, _, table, last = self_check("--nproc=4")
    assert list(table) == [*GRADIENTS, *RUNS]
    assert [name for name, text in table.items() if not text.startswith("passed: ")] == []
    assert (code, last) == (0, "self-check: no check failed")
