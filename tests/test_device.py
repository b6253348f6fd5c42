"""Accelerators go through their device module: any kind works, one visible device per task, and none is left unused in silence."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from listening import free_port
from torch import nn

import parallel2d
from parallel2d import ParallelConfig
from parallel2d.base import device
from parallel2d.base.config.composition import compose
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.mesh_sizes import MeshShape
from parallel2d.parallel.parallelize.layout import resolve
from parallel2d.training.device_defaults import DeviceAbilities, resolved

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


CPU, GPU = DeviceAbilities(False, False), DeviceAbilities(True, True)


@pytest.mark.parametrize(
    ("words", "abilities", "precision", "compilation"),
    [
        ((), CPU, ("fp32", "fp32", "fp32"), "none"),
        ((), GPU, ("bf16", "bf16", "fp32"), "auto"),
        ((), DeviceAbilities(True, False), ("bf16", "bf16", "fp32"), "none"),
        (("precision=fp32", "compile=none"), GPU, ("fp32", "fp32", "fp32"), "none"),
        (("precision.storage=bf16",), GPU, ("fp32", "fp32", "fp32"), "auto"),
        (("precision=fp16",), GPU, ("fp16", "fp16", "fp32"), "auto"),
        (("precision.reduce=bf16",), GPU, ("bf16", "bf16", "bf16"), "auto"),
    ],
)
def test_auto_is_resolved_by_the_abilities_of_the_device(words, abilities, precision, compilation):
    config = resolved(compose(list(words)).config, abilities)
    found = config.precision
    assert (found.name, found.param, found.reduce) == precision
    assert config.compile.name == compilation


@pytest.mark.parametrize(
    ("cluster", "abilities"), [("h100", GPU), ("commodity", GPU), ("local", CPU)]
)
def test_plan_takes_the_abilities_of_the_cluster(cluster, abilities):
    assert DeviceAbilities.planned(compose([f"cluster={cluster}"]).config) == abilities


def test_compile_auto_compiles_repeated_blocks_and_nothing_else():
    config, shape = ParallelConfig(compile="auto"), MeshShape(1, 1)
    blocks = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    assert resolve(config, shape, blocks).config.compile.name == "block"
    assert resolve(config, shape, nn.Linear(2, 2)).config.compile.name == "none"


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
