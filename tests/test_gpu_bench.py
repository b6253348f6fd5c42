"""The scripts for a GPU also run on the CPU, with a tiny model, so that they are correct on a GPU."""

from pathlib import Path

import jobs
import pytest
from stream_simulator.counts import UPPER_BOUNDS

from tools.bench.peers import check_losses

SCRIPTS = Path(__file__).parents[1] / "tools" / "bench" / "gpu"


def rows_of(text: str) -> list[list[str]]:
    """The rows of a table, its head first."""
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows]


def table_of(script: str, *options: str, ranks: int = 0) -> list[list[str]]:
    """The rows of the table that the script prints, its head first. ``ranks``: started by
    torchrun, unless 0.
    """
    launcher = ("-m", "torch.distributed.run", f"--nproc-per-node={ranks}") if ranks else ()
    run = jobs.run_python(*launcher, str(SCRIPTS / script), *options, timeout=240)
    assert run.returncode == 0, run.stderr[-2000:]
    return rows_of(run.stdout)


@pytest.mark.slow
def test_counts_of_a_step_are_the_bounds_of_the_tests(monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)  # the package is found as it is installed
    run = jobs.run_python(str(SCRIPTS.parent / "gpu_counts.py"), "ddp", timeout=240)
    _, (name, *counts) = rows_of(run.stdout)
    assert (name, tuple(map(int, counts))) == ("ddp", UPPER_BOUNDS["ddp"])


@pytest.mark.slow
def test_step_table_has_both_loops():
    head, *rows = table_of("step_flops.py", "--steps", "1", "--rounds", "1")
    assert head[0] == "step"
    assert [row[0] for row in rows[:2]] == ["hand-written `fully_shard`", "parallel2d"]
    assert all(float(row[1]) > 0 and float(row[3]) > 0 for row in rows)


@pytest.mark.slow
def test_checkpoint_table_has_steps_with_and_without_saving():
    _, *rows = table_of("checkpoint_stall.py", "--steps", "6", "--every", "2")
    assert [row[0] for row in rows] == ["that do not save", "that save"]
    assert all(float(row[1]) > 0 for row in rows)


@pytest.mark.parametrize(
    ("layouts", "ranks", "options"),
    [
        pytest.param(("zero3", "hybrid", "ddp"), 2, (), marks=pytest.mark.slow),
        pytest.param(
            *(("zero3", "hybrid"), 0, ("--precision", "bf16", "--compile")), marks=pytest.mark.soak
        ),
    ],
)
def test_parallel2d_issues_only_the_collectives_of_torch(layouts, ranks, options):
    words = ("--steps", "1", "--rounds", "1", *options)
    _, *rows = table_of("against_torch.py", *words, ranks=ranks)
    sides = [[layout, side] for layout in layouts for side in ("torch", "parallel2d")]
    assert [row[:2] for row in rows] == sides
    assert all(float(row[2]) >= float(row[4]) > 0 for row in rows)
    counts = [dict(reversed(each.split()) for each in row[6].split(", ")) for row in rows]
    for torchs, ours in zip(counts[::2], counts[1::2], strict=True):
        assert ours
        assert all(int(count) <= int(torchs.get(kind, 0)) for kind, count in ours.items())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), marks=pytest.mark.slow),
        pytest.param(("--precision", "bf16", "--compile"), marks=pytest.mark.soak),
    ],
)
def test_late_gradients_of_two_ranks_equal_one_process(options):
    _, *rows = table_of("overlap.py", "--steps", "1", *options, ranks=2)
    assert [row[:2] for row in rows] == [["2 x 1", "equal"], ["1 x 2", "equal"]]
    assert all(float(row[4]) > 0 and float(row[5]) > 0 for row in rows)


@pytest.mark.slow
def test_peers_that_are_installed_train_the_same_model_and_others_are_named():
    words = (
        "--model",
        "tiny",
        "--ranks",
        "2",
        "--accumulate",
        "2",
        "--rounds",
        "2",
        "--steps",
        "1",
    )
    words += ("--layouts", "ddp", "zero3")
    run = jobs.run_python("-m", "tools.bench.peers", *words, cwd=SCRIPTS.parents[2])
    assert run.returncode == 0, run.stderr[-2000:]
    _, *rows = rows_of(run.stdout)
    # The first row of a layout is the baseline of its ratios.
    expected = {"ddp": ["DDP", "parallel2d"], "zero3": ["FSDP2 by hand", "FSDP1", "parallel2d"]}
    for layout, names in expected.items():
        found = {row[1]: row[2:] for row in rows if row[0] == layout}
        assert [name for name in found if name in names] == names
        assert next(iter(found.values()))[2:] == ["1.000 (1.000 to 1.000)"] * 2
        assert all(float(seconds) > 0 and float(cpu) > 0 for seconds, cpu, *_ in found.values())
    skipped = [line for line in run.stdout.splitlines() if line.startswith("skipped: ")]
    present = {row[1] for row in rows}
    for name in ("torchtitan", "Fabric", "accelerate"):
        assert (name in present) != any(line.startswith(f"skipped: {name},") for line in skipped)


def test_peers_with_other_losses_are_refused():
    losses = {"DDP": [[2.0, 1.9]], "parallel2d": [[2.0, 1.9]]}
    check_losses(losses)
    with pytest.raises(SystemExit, match="parallel2d and DDP have different losses"):
        check_losses({**losses, "parallel2d": [[2.0, 1.8]]})
