"""``plan.dry_run=true``: what a job would do, started nowhere."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel2d import ConfigError, plan, train
from parallel2d.config.composition import compose
from parallel2d.cost.fake_group import fake_process_group
from parallel2d.loss import cross_entropy_sum
from parallel2d.mesh import build_mesh
from parallel2d.model_families import build_model, plan_tensor_axis
from parallel2d.optimizer import build_optimizer
from parallel2d.parallelize import parallelize_on_fake_tensors
from parallel2d.planner.layout_cost import LayoutCost, cost_of
from parallel2d.planner.plan_text import shortage, summary
from parallel2d.sync import accumulate
from parallel2d.sync.gradient_sync import gradient_syncs

# A model whose gathered blocks, logits and activations are all of about a size.
SMALL = (
    "model.dim=256", "model.n_layers=4", "model.n_heads=8", "model.n_kv_heads=8", "model.hidden_dim=512", "model.vocab_size=1024",
    "train.seq_len=128", "train.micro_batch_size=2", "train.global_batch_size=64", "cluster.device.type=cpu", "cluster.ranks_per_node=8", "plan.verify=true",
)  # fmt: skip
LAYOUTS = {
    "recomputed in part": ("activation_checkpointing=selective", "precision=bf16"),
    "gradients kept whole": ("sync.during_accumulation=none", "strategy=zero2"),
    "split updates": ("strategy=hybrid_full", "sync.wire=bf16", "train.global_batch_size=16"),
    "diloco": ("sync=diloco", "bucketing=layer"),
    "tensor axis": ("mesh.tensor=4", "precision=bf16", "optimizer=muon"),
}


def config_of(*words):
    composition = compose([*SMALL, *words])
    assert composition is not None
    return composition.config


@functools.cache
def cost(*words) -> LayoutCost:
    return cost_of(config_of(*words))


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that exist, and the most there have been: another count than that of torch's tracker."""

    def __init__(self):
        super().__init__()
        self.live = self.most = 0
        self._sizes = {}
        self._resize = torch.UntypedStorage.resize_

    def see(self, tensor):
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        # A result that is waited for where it is used; it has no memory beside what is inside.
        if isinstance(local, AsyncCollectiveTensor):
            local = local.elem
        storage = local.untyped_storage()
        key = id(storage)
        if key in self._sizes and self._sizes[key][0]() is storage:
            return
        reference = weakref.ref(storage, lambda _: self._gone(key))
        self._sizes[key] = (reference, storage.nbytes())
        self._add(storage.nbytes())

    def _gone(self, key):
        _, size = self._sizes.pop(key)
        self.live -= size

    def _add(self, size):
        self.live += size
        self.most = max(self.most, self.live)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        return output

    def __enter__(self):
        def resize(storage, size):
            # Sharding frees gathered parameters in this way.
            before = storage.nbytes()
            self._resize(storage, size)
            if id(storage) in self._sizes:
                reference, _ = self._sizes[id(storage)]
                self._sizes[id(storage)] = (reference, storage.nbytes())
                self._add(storage.nbytes() - before)

        torch.UntypedStorage.resize_ = resize
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self._resize
        return super().__exit__(*error)


def most_bytes(words) -> int:
    """Of a step of the parallelized model, without the state of the optimizer."""
    config = config_of(*words)
    planned = cost(*words)
    parts = build_model(config.model)
    tensor_plan = plan_tensor_axis(config, parts, planned.shape)
    with fake_process_group(planned.shape.world_size):
        mesh = build_mesh(
            planned.shape.spec(), config.strategy, topology=planned.topology, device_type="cpu"
        )
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        model = parallelize_on_fake_tensors(
            parts.module,
            mesh,
            config.parallel(),
            fake,
            topology=planned.topology,
            init=parts.init,
            tensor_plan=tensor_plan,
        )
        with fake:
            build_optimizer(model, config.optimizer)
            for engine in gradient_syncs(model):
                engine.never_agree()
            count = LiveBytes()
            for parameter in model.parameters():
                count.see(parameter)
            batches = [
                torch.zeros(2, 128, dtype=torch.int64)
                for _ in range(min(planned.layout.accumulation, 2))
            ]
            for batch in batches:
                count.see(batch)
            with count:
                for batch in accumulate(model, batches, config.sync.during_accumulation):
                    cross_entropy_sum(model(batch), batch).backward()
    return count.most


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_peak_is_what_another_count_of_the_same_step_finds(layout):
    words = LAYOUTS[layout]
    planned = cost(*words)
    kept = planned.states.optimizer + planned.states.masters + planned.states.outer
    # Equal but for the tensor axis, on whose results the two counts differ by 1.04 %.
    bound = 0.015 if planned.shape.tensor > 1 else 0.001
    assert planned.traced == pytest.approx(most_bytes(words) + kept, rel=bound)
    assert planned.traced > planned.states.total - planned.states.gradients


def test_a_plan_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [*SMALL, "cluster.device.memory_gib=80", "cluster.nodes=2", "plan.dry_run=true"]
    assert plan.main(words) == 0
    assert os.listdir(tmp_path) == []
    assert not torch.distributed.is_initialized()
    text = capsys.readouterr().out
    for line in (
        "mesh        replicate 2 x shard 8 x tensor 1; strategy hybrid",
        "of 80.0 GiB at the peak of a step",
        "of 80.0 GiB at the peak as traced",
    ):
        assert line in text
    assert re.search(r"replicate 0\.\d+ GB, between hosts", text)


def test_the_train_command_plans_instead_of_training(capsys):
    words = [*SMALL, "plan.verify=false"]
    assert train.main([*words, "plan.dry_run=true"]) == 0
    dry = capsys.readouterr().out
    assert plan.main([*words, "plan.dry_run=true"]) == 0
    assert capsys.readouterr().out == dry
    assert "at the peak of a step" in dry
    assert "as traced" not in dry


def test_what_does_not_fit_is_one_sentence_with_both_numbers(capsys):
    words = [*SMALL, "plan.verify=false", "cluster.device.memory_gib=0.01", "plan.dry_run=true"]
    assert plan.main(words) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.match(
        r"parallel2d: does not fit: the fullest rank needs \d+\.\d\d of \d+\.\d\d MiB at its peak; shard over",
        error,
    )


def test_without_the_peak_the_states_alone_decide():
    config = config_of("plan.verify=false", "cluster.device.memory_gib=0.001")
    found = cost_of(config)
    assert "at its peak" in shortage(config, found)
    unknown = dataclasses.replace(found, predicted="it is not known")
    assert "buffers alone" in shortage(config, unknown)
    config.cluster.device.memory_gib = None
    assert shortage(config, found) is None


def test_what_cannot_run_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words, message in (
        (["mesh.tensor=3"], "mesh.tensor=3 does not divide the 8 ranks"),
        (["cluster.nodes=2", "mesh.shard=2", "mesh.tensor=8", "model.n_kv_heads=4"], "does not divide the heads"),
        (["train.global_batch_size=63"], "is not divisible"),
        (["cluster.nodes=1000000"], "are more than 1,000,000 ranks"),
        (["optimizer.groups=[{pattern: nothing, lr_scale: 0.1}]"], "matches no parameter"),
        (["data=images", "data.path=nowhere"], "data.image_size is needed"),
        (["cpu_offload=true", "cluster.device.type=cuda", "strategy=zero3"], "use plan.verify=false"),
    ):  # fmt: skip
        assert plan.main([*SMALL, *words, "plan.dry_run=true"]) == 2
        assert message in capsys.readouterr().err


def test_a_sweep_is_not_planned(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert plan.main(["-m", *SMALL, "strategy=ddp,zero3"]) == 2
    assert (
        "plan.dry_run=true plans one job: give one value for each key, without -m"
        in capsys.readouterr().err
    )


def looks_at_values(vocabulary: int) -> nn.Module:
    return Looking(vocabulary)


def nobody_sets(scaled: bool) -> nn.Module:
    return Scaled() if scaled else nn.Linear(4, 4)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, inputs):
        return self.inner(inputs) * self.scale


def test_a_parameter_that_no_initializer_sets_is_refused_as_training_refuses_it():
    words = ["model=custom", "model.target=test_planner_command:nobody_sets", "data=images"]
    words += ["data.path=here", "data.image_size=8", "plan.verify=false"]
    words += ["model.arguments.scaled=true"]
    with pytest.raises(ConfigError, match="no initializer sets scale: give the module that owns"):
        cost_of(compose(words).config)


class Looking(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary))

    def forward(self, tokens):
        if tokens.sum().item() < 0:
            raise ValueError("no tokens")
        return self.layers(tokens)


def test_a_model_that_looks_at_values_has_a_plan_without_its_peak():
    words = (
        "model=custom",
        "model.target=test_planner_command:looks_at_values",
        "model.arguments.vocabulary=300",
    )
    with pytest.raises(ConfigError) as caught:
        cost_of(compose([*words, "train.seq_len=8", "plan.verify=true"]).config)
    assert "use plan.verify=false" in str(caught.value)
    config = compose([*words, "train.seq_len=8"]).config
    planned = cost_of(config)
    lines = "\n".join(summary(config, planned))
    assert "activations are not known: Looking does not run on tensors without storage" in lines
    assert planned.states.parameters > 0
    assert planned.flops is None


@pytest.mark.slow
def test_ranks_of_torchrun_do_not_plan(tmp_path):
    launcher = ["torch.distributed.run", "--nproc-per-node=1", "-m", "parallel2d.train"]
    command = [sys.executable, "-m", *launcher, "plan.dry_run=true"]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode != 0
    message = "plan.dry_run=true plans in one process: start it without torchrun or srun"
    assert ended.stderr.count(message) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [("strategy=hybrid_full", "precision=bf16"), ("mesh.tensor=2", "optimizer=muon")],
)
def test_a_run_has_the_mesh_and_the_bytes_of_its_plan(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = (
        "model.n_layers=2", "train.steps=2", "train.validate_every=0", "checkpoint.enabled=false", "metrics.console=silent",
        "metrics.log_every=1",
    )  # fmt: skip
    planned = cost_of(compose([*job, *words]).config)
    assert train.main([*job, *words, f"hydra.run.dir={tmp_path}/run"]) == 0
    layout = json.loads((tmp_path / "run" / "layout.json").read_text())
    sizes = {axis: getattr(planned.shape, axis) for axis in ("replicate", "shard", "tensor")}
    assert layout["mesh"] == sizes
    assert layout["accumulation"] == planned.layout.accumulation
    assert layout["parameters"] == planned.parameters
    assert planned.moved == pytest.approx(layout["predicted"], rel=1e-12)
    # And the bytes of the plan are those that were sent.
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    (row,) = [row for row in rows if row.get("step") == 2]
    measured = {key: row[key] for key in planned.moved if key in row}
    assert measured == pytest.approx({key: planned.moved[key] for key in measured}, rel=1e-12)
    assert len(measured) > 1
