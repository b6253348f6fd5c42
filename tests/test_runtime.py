"""Setup and teardown, many times in one process; timeouts; barriers that name late ranks;
reductions.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_command_line import SMALL, execute, folder, rows  # noqa: F401
from workers import WorkerError

from parallel2d import reduce, teardown
from parallel2d.base.config import LaunchConfig
from parallel2d.base.errors import ConfigError
from parallel2d.base.runtime import setup

PROGRAM = Path(__file__).with_name("runtime_runs.py")


def start(ranks: int, *calls: str, timeout: float = 120) -> list[list[dict[str, Any]]]:
    """Runs functions of `runtime_runs` in fresh processes, by rank and call; ``ranks=0``: in one
    without any environment.
    """
    of_ranks = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {key: value for key, value in os.environ.items() if key not in of_ranks}
    kept["OMP_NUM_THREADS"] = "1"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    processes = []
    for rank in range(max(ranks, 1)):
        numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        command = [sys.executable, str(PROGRAM), *calls]
        environment = {**kept, **place, **numbers} if ranks else kept
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        processes.append(process)
    answers = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=timeout)
            lines = [line for line in output.splitlines() if line.startswith("ANSWER ")]
            assert process.returncode == 0, output
            assert len(lines) == len(calls), output
            answers.append([json.loads(line.removeprefix("ANSWER ")) for line in lines])
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return answers


@pytest.fixture(scope="module")
def three_ranks() -> list[list[dict[str, Any]]]:
    """Answers of three ranks to soak, timeouts and late, all in one process each: leftovers of one
    would harm the next.
    """
    return start(3, "soak:5", "timeouts", "late")


@pytest.fixture(scope="module")
def one_process() -> list[dict[str, Any]]:
    return start(0, "single_process", "signals", "foreign")[0]


def check_nothing_is_left(answers: list[dict[str, Any]], resident: float) -> None:
    for answer in answers:
        early, late = answer["early"], answer["late"]
        assert late["groups"] == 0
        assert late["meshes"] == 0
        for kind in ("descriptors", "threads", "python_threads"):
            assert late[kind] <= early[kind], (kind, early, late)
        assert late["resident"] - early["resident"] <= resident, (early, late)
        assert len(set(answer["losses"])) == 1
        assert answer["unwrapped"]


@pytest.mark.soak
def test_hundred_setups_leave_no_threads_or_files():
    check_nothing_is_left(
        [answers[0] for answers in start(2, "soak:100", timeout=500)], resident=48 * 2**20
    )


@pytest.mark.slow
def test_process_without_a_launcher_is_the_only_rank(one_process):
    answer = one_process[0]
    rank, world, reduced, backend, told = answer["answer"]
    assert (rank, world, reduced, backend) == (0, 1, [1.0, 1.0], "gloo")
    assert "a default process group exists already" in told
    assert answer["left"]


@pytest.mark.slow
def test_timeouts_are_long_in_the_first_step_and_short_after(three_ranks):
    for _, answer, _ in three_ranks:
        assert answer["groups"] > 1, "the mesh has groups of its own"
        four_hours = 14400.0  # of the group that waits for disks
        assert answer["before"] == [70.0, four_hours]
        assert answer["after"] == [7.0, four_hours]


SLOW = """
import os
import time

from my_models import Bigram


class Slow(Bigram):
    turns = 0

    def forward(self, tokens):
        self.turns += not tokens.is_meta
        if os.environ.get("RANK") == "1" and not tokens.is_meta:
            time.sleep({1: 14, 3: 90}.get(self.turns, 0))
        return super().forward(tokens)
"""


@pytest.mark.soak
def test_the_command_waits_for_a_slow_first_step_but_not_for_a_later_one(folder):  # noqa: F811
    (folder / "slow.py").write_text(SLOW)
    words = [word for word in SMALL if not word.startswith(("model.", "train.validate"))]
    words += ["model=custom", "model.target=slow:Slow", "metrics.console=silent"]
    words += ["train.validate_every=0", "launch.timeout=10"]
    failed = execute(folder, *words, "launch.nproc_per_node=2", "hydra.run.dir=run")
    assert failed.returncode == 1
    assert [row["step"] for row in rows(folder / "run")] == [1, 2]
    assert "late: rank 1 on" in failed.stderr


@pytest.mark.slow
def test_a_barrier_names_the_late_rank_and_its_host(three_ranks):
    *waited, last = [answers[2] for answers in three_ranks]
    for rank, answer in enumerate(waited):
        assert (
            answer["told"] == f"barrier weights loaded: rank {rank} waited 3 s for rank 2 on node2"
        )
    assert last["told"] == ""


def test_teardown_restores_signal_handlers(one_process):
    assert one_process[1] == {"heard": True, "restored": True, "forgotten": True}


def test_destroyed_group_leaves_no_thread_at_exit(one_process):
    assert one_process[2]["threads"] > 0, "and at its end the process has found none"


def test_a_first_timeout_below_the_later_one_is_refused():
    with pytest.raises(ConfigError, match="first_timeout_s=5 must be at least timeout_s=10"):
        setup(timeout_s=10, first_timeout_s=5)
    teardown()  # without a process group: nothing to do


def test_first_step_timeout_is_half_an_hour_or_the_longer_of_both():
    assert LaunchConfig().longest_wait == 1800
    assert LaunchConfig(timeout=3600).longest_wait == 3600
    assert LaunchConfig(first_step_timeout=900).longest_wait == 900


def reductions() -> None:
    rank = dist.get_rank()
    value = torch.tensor([rank, 2.0 * rank])
    before = value.clone()
    expected = {"mean": 0.5, "avg": 0.5, "SUM": 1.0, "max": 1.0, "min": 0.0}
    expected |= {dist.ReduceOp.SUM: 1.0, dist.ReduceOp.AVG: 0.5}
    for op, first in expected.items():
        assert reduce(value, op=op).tolist() == [first, 2 * first], op
    assert torch.equal(value, before)
    counts = torch.tensor([rank, 2**53 - 1])
    assert reduce(counts).tolist() == [0.5, float(2**53 - 1)]
    assert reduce(counts).dtype == torch.float64
    assert reduce(counts, op="sum")[0].item() == 1
    assert reduce(counts, op="max").dtype == torch.int64
    flags = torch.tensor([rank == 1, True])
    assert reduce(flags).tolist() == [0.5, 1.0]
    assert reduce(flags, op="sum").tolist() == [1, 2]
    assert reduce(flags, op="max").tolist() == [True, True]
    assert reduce(flags, op="min").tolist() == [False, True]
    half = torch.full((1,), 40000.0 + rank, dtype=torch.float16)  # a sum in fp16 would be infinite
    assert reduce(half).item() == 40000.0
    assert reduce(half).dtype == torch.float16
    strided = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(reduce(strided, op="sum"), 2 * strided)
    assert [reduce(3.5), reduce("text"), reduce(None)] == [3.5, "text", None]


def test_reduce_keeps_its_input_and_supports_every_operation(ranks):
    ranks.run(2, reductions)


def reduce_in_group() -> Any:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return reduce(torch.tensor(float(dist.get_rank())), groups[dist.get_rank() % 2]).item()


def test_reduce_stays_inside_its_group(ranks):
    assert ranks.run(4, reduce_in_group) == [1.0, 2.0, 1.0, 2.0]


def unknown_operation() -> None:
    reduce(torch.ones(1), op="median")


def test_an_unknown_operation_is_refused(ranks):
    told = "reduce: op=median is not one of mean, avg, sum, max, min, product"
    with pytest.raises(WorkerError, match=told):
        ranks.run(2, unknown_operation)
