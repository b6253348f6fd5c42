"""Accelerators go through their device module: any kind works, one visible device per task, and none is left unused in silence."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from listening import free_port

import parallel2d
from parallel2d.base import device
from parallel2d.base.errors import ConfigError

PACKAGE = Path(parallel2d.__file__).parent
# A feature that only CUDA has, by file
CUDA_ONLY = {
    "training/metrics/out_of_memory.py": "snapshots of the allocator",
    "training/metrics/phases.py": "snapshots of the allocator",
    "parallel/parallelize/float8.py": "the compute capability",
    "instruments/preflight/verdict.py": "the version of NCCL",
}
KINDS = re.compile(r"torch\.(Stream|Event)\(|\bwait_event\(|torch\.cuda\.")


def test_kinds_of_accelerators_are_named_in_the_device_module_only():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        code = re.sub(r'"""[\s\S]*?"""|#.*|`[^`\n]*`', "", path.read_text())
        if name != "base/device.py" and (places := KINDS.findall(code)):
            found[name] = places
    assert set(found) == set(CUDA_ONLY)


def join(*ranks: tuple[int, str]) -> list[subprocess.CompletedProcess[str]]:
    """Start one rank for each LOCAL_RANK and list of visible UUIDs, as torchrun or Slurm do, and wait for all."""
    program = Path(__file__).with_name("toy_accelerator.py")
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(len(ranks)),
        "LOCAL_WORLD_SIZE": str(len(ranks)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
    }
    started = []
    for rank, (local, uuids) in enumerate(ranks):
        environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(local)}
        started.append(
            subprocess.Popen(
                [sys.executable, str(program), uuids],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    done = []
    for process in started:
        output, errors = process.communicate(timeout=240)
        done.append(subprocess.CompletedProcess(process.args, process.returncode, output, errors))
    return done


def test_each_task_uses_the_one_device_that_it_sees():
    for done in join((0, "GPU-a"), (1, "GPU-b")):
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[:1] == ["toy:0"]
        assert "toy:toyccl" in done.stdout
        assert "cpu:gloo" in done.stdout


def test_two_ranks_on_one_device_are_named():
    for done in join((0, "GPU-a"), (1, "GPU-a")):
        assert done.returncode != 0
        assert re.search(r"ranks 0 and 1 on \S+ use one device \(GPU-a\)", done.stderr), done.stderr


def test_more_ranks_than_devices_are_refused():
    (done,) = join((2, "GPU-a,GPU-b"))
    assert "LOCAL_RANK=2, but this node has 2 devices of type toy" in done.stderr


@pytest.mark.parametrize("hidden", [False, True])
def test_a_driver_without_a_usable_device_is_an_error_unless_hidden(tmp_path, monkeypatch, hidden):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    driver = tmp_path / "nvidiactl"
    driver.touch()
    found = (str(driver), "an NVIDIA GPU", ("CUDA_VISIBLE_DEVICES",))
    monkeypatch.setattr(device, "DRIVERS", (found,))
    if hidden:
        assert device.accelerator_type() == "cpu"
        return
    with pytest.raises(ConfigError, match=r"driver of an NVIDIA GPU .* finds no device: install"):
        device.accelerator_type()
