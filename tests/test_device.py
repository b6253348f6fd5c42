"""Accelerators are used through their device module: any kind works, one visible device per task,
and an unused device is reported.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from listening import free_port
from torch import nn

import parallel2d
from parallel2d import ParallelConfig
from parallel2d.base import device
from parallel2d.base.config import BucketingConfig, CompileConfig
from parallel2d.base.config.composition import compose
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.mesh_sizes import MeshShape
from parallel2d.parallel.parallelize.compilation import compile_blocks
from parallel2d.parallel.parallelize.layout import Workload, resolve
from parallel2d.training.auto_precision import resolved, resolved_for_plan

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


@pytest.mark.parametrize(
    ("words", "fast_bf16", "precision"),
    [
        ((), False, ("fp32", "fp32", "fp32")),
        ((), True, ("bf16", "bf16", "fp32")),
        (("precision=fp32",), True, ("fp32", "fp32", "fp32")),
        (("precision.storage=bf16",), True, ("fp32", "fp32", "fp32")),
        (("precision=fp16",), True, ("fp16", "fp16", "fp32")),
        (("precision.reduce=bf16",), True, ("bf16", "bf16", "bf16")),
    ],
)
def test_precision_auto_is_resolved_by_the_device(words, fast_bf16, precision):
    found = resolved(compose(list(words)).config, fast_bf16=fast_bf16).precision
    assert (found.name, found.param, found.reduce) == precision


@pytest.mark.parametrize(
    ("cluster", "precision"), [("h100", "bf16"), ("commodity", "bf16"), ("local", "fp32")]
)
def test_plan_resolves_precision_by_the_devices_of_the_cluster(cluster, precision):
    config = resolved_for_plan(compose([f"cluster={cluster}"]).config)
    assert config.precision.name == precision


@pytest.mark.skipif(find_spec("triton") is None, reason="torch for CPUs comes without Triton")
class Broken(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        torch._dynamo.graph_break()
        return x + 1


def test_graph_breaks_of_equal_blocks_are_logged_once(caplog):
    blocks = [(f"blocks.{number}", Broken(4, 4)) for number in range(2)]
    x = torch.ones(2, 4)
    expected = [block(x) for _, block in blocks]
    compile_blocks(blocks, CompileConfig("block", "aot_eager"), None)
    for (_, block), value in zip(blocks, expected, strict=True):
        assert torch.equal(block(x), value)
    (message,) = [r.getMessage() for r in caplog.records if "several graphs" in r.getMessage()]
    assert message.startswith("blocks.0 is compiled in several graphs")
    assert "graph_break()" in message


def test_compile_auto_compiles_repeated_blocks_on_a_gpu_and_nothing_else():
    blocks = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))

    def chosen(model, device_type, named=None, **axes):
        workload = Workload(device_type=device_type)
        config = ParallelConfig(compile="auto", bucketing=BucketingConfig("block", blocks=named))
        return resolve(config, MeshShape(1, 1, **axes), model, workload).config.compile.name

    assert chosen(blocks, "cuda") == "block"
    assert chosen(blocks, "cpu") == "none"
    assert chosen(blocks, "cuda", context=2) == "block"
    stages = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3)))
    assert chosen(stages, "cuda", ["Linear"]) == "block"
    assert chosen(stages, "cuda", ["Linear"], context=2) == "none"
    assert chosen(nn.Linear(2, 2), "cuda") == "none"


def join(*ranks: tuple[int, str]) -> list[subprocess.CompletedProcess[str]]:
    """Start one rank for each LOCAL_RANK and list of visible UUIDs, as torchrun or Slurm do, and
    wait for all.
    """
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


def test_task_with_one_visible_device_uses_it():
    for done in join((0, "GPU-a"), (1, "GPU-b")):
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[:1] == ["toy:0"]
        assert "toy:toyccl" in done.stdout
        assert "cpu:gloo" in done.stdout


class CapturedError(Exception):
    """The process group was initialized with these arguments."""


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_groups_are_bound_to_the_gpu_with_streams_of_high_priority(monkeypatch, kind):
    def initialize(backend, **given):
        raise CapturedError(backend, given["device_id"], os.environ.get("TORCH_NCCL_HIGH_PRIORITY"))

    own = torch.device(kind, 1) if kind == "cuda" else torch.device(kind)
    monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", "")
    monkeypatch.delenv("TORCH_NCCL_HIGH_PRIORITY")
    monkeypatch.setattr(device, "choose_device", lambda _: own)
    monkeypatch.setattr(torch.distributed, "init_process_group", initialize)
    with pytest.raises(CapturedError) as found:
        parallel2d.setup()
    bound = ("cpu:gloo,cuda:nccl", own, "1")
    assert found.value.args == (bound if kind == "cuda" else ("gloo", None, None))


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
