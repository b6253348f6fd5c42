"""The scripts for a GPU run on the CPU too, with a tiny model, so that they are right when there is a GPU."""

from pathlib import Path

import jobs
import pytest

SCRIPTS = Path(__file__).parents[1] / "tools" / "bench" / "gpu"


def table_of(script: str, *options: str) -> list[list[str]]:
    run = jobs.run_python(str(SCRIPTS / script), *options, timeout=240)
    assert run.returncode == 0, run.stderr[-2000:]
    rows = [line.split("|")[1:-1] for line in run.stdout.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows]


@pytest.mark.slow
def test_the_table_of_a_step_has_both_loops():
    head, *rows = table_of("step_flops.py", "--steps", "1", "--rounds", "1")
    assert head[0] == "step"
    assert [row[0] for row in rows[:2]] == ["hand-written `fully_shard`", "parallel2d"]
    assert all(float(row[1]) > 0 and float(row[3]) > 0 for row in rows)


@pytest.mark.slow
def test_the_table_of_a_checkpoint_has_steps_with_and_without():
    _, *rows = table_of("checkpoint_stall.py", "--steps", "6", "--every", "2")
    assert [row[0] for row in rows] == ["that do not save", "that save"]
    assert all(float(row[1]) > 0 for row in rows)


@pytest.mark.slow
def test_the_table_of_engines_has_both_and_none():
    _, *rows = table_of("replicate_engine.py", "--steps", "2", "--rounds", "1")
    engines = [row[0] for row in rows]
    assert engines == ["no replicas (zero3)", "hand-written FSDP2", "parallel2d"]
    assert all(float(row[1]) >= float(row[3]) > 0 for row in rows)
