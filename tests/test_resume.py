"""A run that is stopped and goes on elsewhere: the same global batches and losses as the run nobody disturbed.

The trainer is built by the same function as on the command line; a stop leaves the steps after the last checkpoint undone, as a
kill would.
"""

from __future__ import annotations

import json
from pathlib import Path

import jobs
import pytest


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "corpus.txt").write_text(
        "".join(f"{i} times {i} is {i * i}\n" for i in range(12000))
    )
    return tmp_path


def rows(folder: Path, name: str):
    return jobs.rows(folder / name)


@pytest.mark.slow
def test_stops_and_other_layouts_change_neither_batches_nor_losses(ranks, folder):
    assert ranks.run(4, jobs.run, str(folder), str(folder / "whole"), (), 12)[0] == 0
    moved = str(folder / "moved")
    # saved 2 and 4; step 5 is lost
    assert ranks.run(4, jobs.run, str(folder), moved, (), 5)[0] == 0
    # saved 6; step 7 is lost
    assert ranks.run(2, jobs.run, str(folder), moved, ("strategy=zero3",), 3)[0] == 4
    # saved 8 and 10
    assert ranks.run(8, jobs.run, str(folder), moved, ("bucketing=layer",), 4)[0] == 6
    assert (
        ranks.run(4, jobs.run, str(folder), moved, ("mesh.tensor=2", "strategy=hybrid_zero2"), 9)[0]
        == 10
    )
    whole, other = rows(folder, "whole"), rows(folder, "moved")
    assert [row["step"] for row in other] == list(range(1, 13))
    assert [row["data/batch_hash"] for row in other] == [row["data/batch_hash"] for row in whole]
    assert len({row["data/batch_hash"] for row in whole}) == 12
    assert [row["loss"] for row in other] == pytest.approx(
        [row["loss"] for row in whole], rel=1e-10, abs=0
    )
    assert [row["grad_norm"] for row in other] == pytest.approx(
        [row["grad_norm"] for row in whole], rel=1e-9, abs=0
    )
    assert [row["tokens"] for row in other] == [row["tokens"] for row in whole]
    undone = sorted((folder / "moved").glob("metrics.before-restart-*.jsonl"))
    assert [json.loads(path.read_text().splitlines()[-1])["step"] for path in undone] == [5, 7]


@pytest.mark.slow
def test_the_same_layout_resumes_bitwise(ranks, folder):
    ranks.run(
        4,
        jobs.run,
        str(folder),
        str(folder / "whole"),
        ("precision=bf16", "train.micro_batch_size=2"),
        8,
    )
    for steps in (5, 4):
        ranks.run(
            4,
            jobs.run,
            str(folder),
            str(folder / "again"),
            ("precision=bf16", "train.micro_batch_size=2"),
            steps,
        )
    whole, again = rows(folder, "whole"), rows(folder, "again")
    assert [(row["loss"], row["grad_norm"]) for row in again] == [
        (row["loss"], row["grad_norm"]) for row in whole
    ]


def test_fp16_scale_and_skipped_steps_survive_a_stop(ranks, folder):
    words = ("precision=fp16", "optimizer.lr=1e-3")
    ranks.run(2, jobs.run, str(folder), str(folder / "whole"), words, 8)
    for steps in (4, 4):
        ranks.run(2, jobs.run, str(folder), str(folder / "again"), words, steps)
    assert [row["loss"] for row in rows(folder, "again")] == [
        row["loss"] for row in rows(folder, "whole")
    ]
    assert [row["skipped_steps"] for row in rows(folder, "again")] == [
        row["skipped_steps"] for row in rows(folder, "whole")
    ]
