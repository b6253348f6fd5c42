"""A run directory belongs to the last start that took it."""

import contextlib
import json
import os
import shutil
import subprocess

import jobs
import pytest

from parallel2d.base.errors import ConfigError
from parallel2d.base.files.private_folders import process_identity
from parallel2d.training.hooks import Hook
from parallel2d.training.metrics.metrics_row import set_aside_after
from parallel2d.training.run_directory.ownership import OwnershipLock, RunTakenOver, wait_for_owner


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
    assert set(owner) == {"token", "saves", "host", "process", "identity", "time"}


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


@contextlib.contextmanager
def another_owner(run_dir, **changes):
    """Another process that owns the directory, with changes of its mark."""
    child = subprocess.Popen(["sleep", "600"])
    try:
        mark = {"token": "0", "saves": True, "host": "there", "process": child.pid, "time": "now"}
        mark["identity"] = process_identity(child.pid)
        (run_dir / "owner.json").write_text(json.dumps({**mark, **changes}))
        yield child
    finally:
        child.kill()
        child.wait()


def test_later_start_waits_only_for_a_live_owner_that_saves(tmp_path):
    owner, request = tmp_path / "owner.json", tmp_path / "takeover.json"
    run_dir, said = str(tmp_path), []

    def wait():
        said.clear()
        wait_for_owner(run_dir, said.append, limit_s=0.0)

    wait()  # no owner
    trains = rf"another start of this run, on there \(process \d+, now\), trains in {tmp_path} and"
    for elsewhere in ({}, {"identity": "another-machine/1-2"}):
        with another_owner(tmp_path, **elsewhere):
            with pytest.raises(ConfigError, match=f"{trains} has not saved and ended within 0 s"):
                wait()
            assert len(said) == 1
            assert not request.exists()
            with pytest.raises(ConfigError, match="on there .* at the same moment: end it before"):
                OwnershipLock(run_dir).refuse_live_owner()
            os.utime(owner, (1, 1))  # no heartbeat
            wait()
            assert not said
    with (
        another_owner(tmp_path, saves=False),
        pytest.raises(ConfigError, match=f"{trains} saves no"),
    ):
        wait()
    with another_owner(tmp_path):
        pass
    wait()  # its process has ended
    with another_owner(tmp_path, ended="now"):
        wait()
        OwnershipLock(run_dir).refuse_live_owner()
    assert os.listdir(tmp_path) == ["owner.json"]


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
