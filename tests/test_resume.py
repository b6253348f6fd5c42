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
    assert ranks.run(4, jobs.run, str(folder), str(folder / "whole"), (), 8)[0] == 0
    moved = str(folder / "moved")
    # saved 2; step 3 is lost
    assert ranks.run(4, jobs.run, str(folder), moved, (), 3)[0] == 0
    # saved 4; step 5 is lost
    assert ranks.run(2, jobs.run, str(folder), moved, ("strategy=zero3",), 3)[0] == 2
    words = ("mesh.tensor=2", "strategy=hybrid_zero2")
    assert ranks.run(4, jobs.run, str(folder), moved, words, 4)[0] == 4
    whole, other = rows(folder, "whole"), rows(folder, "moved")
    assert [row["step"] for row in other] == list(range(1, 9))
    assert len({row["data/batch_hash"] for row in whole}) == 8
    for key, bound in (
        ("data/batch_hash", None),
        ("tokens", None),
        ("loss", 1e-10),
        ("grad_norm", 1e-9),
    ):
        found, expected = [row[key] for row in other], [row[key] for row in whole]
        assert found == (pytest.approx(expected, rel=bound, abs=0) if bound else expected), key
    undone = sorted((folder / "moved").glob("metrics.before-restart-*.jsonl"))
    assert [json.loads(path.read_text().splitlines()[-1])["step"] for path in undone] == [3, 5]


def test_fp16_scale_and_skipped_steps_survive_a_stop_and_all_is_bitwise_the_same(ranks, folder):
    words = ("precision=fp16", "optimizer.lr=1e-3", "train.micro_batch_size=2")
    ranks.run(2, jobs.run, str(folder), str(folder / "whole"), words, 8)
    for steps in (4, 4):
        ranks.run(2, jobs.run, str(folder), str(folder / "again"), words, steps)
    for key in ("loss", "grad_norm", "skipped_steps"):
        found, expected = ([row[key] for row in rows(folder, name)] for name in ("again", "whole"))
        assert found == expected
