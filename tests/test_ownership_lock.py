"""A run directory belongs to the last start that took it."""

import json
import os
import shutil

import jobs
import pytest

from parallel2d.training.hooks import Hook
from parallel2d.training.metrics.metrics_row import set_aside_after
from parallel2d.training.run_directory.start import OwnershipLock, RunTakenOver


def claimed(folder):
    claim = OwnershipLock(str(folder))
    claim.take()
    return claim


def test_first_start_names_the_process_that_took_over(tmp_path):
    first = claimed(tmp_path)
    first.check()
    second = claimed(tmp_path)
    second.check()
    told = f"process {os.getpid()}, .* has taken over {tmp_path}: this one ends without writing"
    with pytest.raises(RunTakenOver, match=told):
        first.check()
    assert sorted(os.listdir(tmp_path)) == ["owner.json"]
    owner = json.loads((tmp_path / "owner.json").read_text())
    assert set(owner) == {"token", "host", "process", "time"}


def test_transient_file_system_errors_keep_the_lock(tmp_path):
    claim = claimed(tmp_path)
    owner = tmp_path / "owner.json"
    shutil.copy(owner, tmp_path / "copy")
    owner.unlink()
    claim.check()
    owner.write_text("{half")
    claim.check()
    os.replace(tmp_path / "copy", owner)  # another file with the same mark
    claim.check()


def test_unwritable_run_directory_is_an_error(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        claimed(tmp_path / "nowhere")


class TakingOver(Hook):
    """While the third step is in its hooks, another start continues after the first step."""

    def step(self, run, step, metrics):
        if step == 3:
            claimed("run")
            set_aside_after("run/metrics.jsonl", 1)


def superseded(folder):
    trainer = jobs.build(folder, "run", ["strategy=ddp"], [TakingOver()])
    with pytest.raises(RunTakenOver):
        trainer.run()
    return [row["step"] for row in jobs.rows("run")]


def test_start_without_its_lock_writes_no_row(ranks, folder):
    assert ranks.run(1, superseded, str(folder)) == [[1]]
