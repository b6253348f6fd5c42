"""A small training run as a function, for tests: the same steps on any layout, and a plain PyTorch
reference.
"""

import copy
import gc
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import parallel2d
from parallel2d.base.config import PrecisionConfig
from parallel2d.models.llama import Block, Llama, tensor_plan
from parallel2d.parallel.mesh import sum_over_data_ranks
from parallel2d.parallel.parallelize import bucketing
from parallel2d.parallel.parallelize.precision import DTYPES
from parallel2d.parallel.sync.engine.replica_reducer import engines_in

VOCAB = 67
LLAMA = {
    "dim": 32,
    "n_layers": 1,
    "n_heads": 4,
    "n_kv_heads": 2,
    "hidden_dim": 48,
    "vocab_size": VOCAB,
    "max_seq_len": 64,
}
SEQ, GLOBAL_BATCH = 16, 8


def loss_of_logits(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Loss of logits in the form that the arithmetic of costs takes."""
    return parallel2d.cross_entropy_sum(model(inputs), targets)


def global_batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets, [GLOBAL_BATCH, SEQ]; some targets are ignored, unevenly over the sequences."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, VOCAB, (GLOBAL_BATCH, SEQ + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    lengths = torch.randint(1, SEQ + 1, (GLOBAL_BATCH,), generator=generator)
    targets[torch.arange(SEQ) >= lengths[:, None]] = -100
    return tokens[:, :-1], targets


class GainBlock(Block):
    """A block with a table of floats that its input is multiplied with, in the wider dtype of the two."""

    def __init__(self, dim: int, *sizes: Any) -> None:
        super().__init__(dim, *sizes)
        self.register_buffer("gain", torch.linspace(0.9, 1.1, dim))

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        return super().forward(
            (x * self.gain).to(self.attention_norm.weight.dtype), positions, mask
        )


class Buffered(Llama):
    """The Llama with tables of floats: the inputs of its blocks have the dtype of a buffer, not of
    a parameter.
    """

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        dim, heads = sizes["dim"], (sizes["n_heads"], sizes["n_kv_heads"])
        self.layers = nn.ModuleList(
            GainBlock(dim, *heads, sizes["hidden_dim"], 1e-5, 5e5) for _ in self.layers
        )
        self.register_buffer("scale", torch.linspace(0.7, 1.3, dim))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale
        positions = torch.arange(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, positions, None)
        return self.output(self.norm(x))


def build_llama(kind: type[Llama] = Llama, **changes: Any) -> Llama:
    return kind(**{**LLAMA, **changes})


class Descent:
    """Plain gradient descent that takes gradients of any dtype."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        self.parameters, self.lr = list(parameters), lr

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.parameters:
            parameter.add_(parameter.grad.to(parameter.dtype), alpha=-self.lr)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def optimizer_of(model: nn.Module, lr: float = 3e-3) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(
        parallel2d.updated_parameters(model), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    # A plain model has no engine.
    for engine in engines_in(model):
        engine.updates.attach(optimizer)
    return optimizer


def full_tensor_of(parameter: Tensor) -> Tensor:
    if hasattr(parameter, "full_tensor"):
        return parameter.full_tensor()
    return parameter.detach().clone()


def weights_of(model: nn.Module) -> dict[str, Any]:
    return {
        name: full_tensor_of(p).detach().double().clone().numpy()
        for name, p in model.named_parameters()
    }


def largest_difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    assert found.keys() == expected.keys()
    return max(float(abs(found[name] - value).max()) for name, value in expected.items())


def sharded(
    mesh_sizes: dict[str, Any], config: dict[str, Any], seed: int = 0, **llama: Any
) -> tuple[DeviceMesh, nn.Module]:
    """Return the mesh, and the small Llama on it with the weights of ``seed``; `train` describes
    ``llama``.
    """
    parallel = parallel2d.ParallelConfig(**config)
    mesh = parallel2d.build_mesh(parallel2d.MeshSpec(**mesh_sizes), parallel.strategy.name)
    with parallel2d.build_on_meta():
        model = build_llama(**llama)
    tensor, plan = parallel2d.mesh_shape(mesh).tensor, None
    if tensor > 1:
        plan = model.plan if hasattr(model, "plan") else tensor_plan(model, tensor)
    return mesh, parallel2d.parallelize(
        model, mesh, parallel, seed=seed, init=model.init_weights, tensor_plan=plan
    )


@contextmanager
def outer_groups_of_any_size() -> Iterator[None]:
    """Inside, small modules outside of the blocks form their own groups too."""
    large, bucketing.LARGE_BYTES = bucketing.LARGE_BYTES, 1
    try:
        yield
    finally:
        bucketing.LARGE_BYTES = large


def forget_compiled_code() -> None:
    """Forget models and compiled code of earlier tests, which count in torch's limits."""
    gc.collect()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def train(
    mesh_sizes: dict[str, Any],
    config: dict[str, Any],
    *,
    steps: int,
    accumulation: int = 1,
    during_accumulation: str = "reduce_scatter_only",
    llama: dict[str, Any] | None = None,
    seed: int = 0,
    descent: bool = False,
    loss_chunk: int | None = None,
    decay: float | None = None,
) -> dict[str, Any]:
    """Train the small Llama on this process group; return losses, gradient norms and final
    unsharded weights (rank 0).

    Args:
        llama: changes to its sizes, or another ``kind``, with a separate ``plan`` if it is not a
            Llama.
        descent: use `Descent` instead of AdamW.
        loss_chunk: rows of a `ChunkedHead`.
        decay: decay of the EMA weights, by `sharded_copy` and by torch's ``AveragedModel``.
    """
    if "compile" in config:
        forget_compiled_code()
    mesh, model = sharded(mesh_sizes, config, seed, **(llama or {}))
    optimizer = Descent(model.parameters(), 0.3) if descent else optimizer_of(model)
    rank, data_ranks = parallel2d.data_coordinate(mesh), parallel2d.mesh_shape(mesh).data_ranks
    head = parallel2d.ChunkedHead(model, loss_chunk) if loss_chunk else None
    losses, norms = [], []
    averages = Averages(model, parallel2d.sharded_copy(model), decay) if decay else None
    for step in range(steps):
        tokens, targets = (
            part.chunk(data_ranks)[rank].chunk(accumulation) for part in global_batch(step)
        )
        weight = parallel2d.token_weight(sum(int((t != -100).sum()) for t in targets), mesh)
        total = torch.zeros((), dtype=torch.float64)
        for micro_tokens, micro_targets in parallel2d.accumulate(
            model, list(zip(tokens, targets, strict=True)), during_accumulation
        ):
            if head is not None:
                loss = head.loss(micro_targets, micro_tokens)
            else:
                loss = parallel2d.cross_entropy_sum(model(micro_tokens), micro_targets)
            (loss * weight.to(loss.dtype)).backward()
            total += loss.detach().double() * weight
        losses.append((sum_over_data_ranks(total, mesh) / data_ranks).item())
        norms.append(parallel2d.clip_gradient_norm(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        if averages:
            averages.update()
    weights = weights_of(model)
    if averages:
        weights |= averages.weights()
    rank0 = torch.distributed.get_rank() == 0
    return {"losses": losses, "norms": norms, "weights": weights if rank0 else None}


class Averages:
    """EMA weights of a model, in ``copy`` and by torch's own class, and results of evaluations
    with them.
    """

    def __init__(self, model: nn.Module, copy: Any, decay: float) -> None:
        self.model, self.copy = model, copy
        self.of_torch = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
        self.decay = decay

    @torch.no_grad()
    def update(self) -> None:
        if isinstance(self.copy, nn.Module):
            for kept, each in zip(self.copy.parameters(), self.model.parameters(), strict=True):
                kept.copy_(self.decay * kept + (1 - self.decay) * each)
        else:
            self.copy.update(self.decay)
        self.of_torch(global_batch(8)[0])
        self.of_torch.update_parameters(self.model)

    @torch.no_grad()
    def weights(self) -> dict[str, Any]:
        found = {
            "evaluated": self.copy(global_batch(9)[0]),
            "evaluated by torch": self.of_torch(global_batch(9)[0]),
        }
        copied = getattr(self.copy, "module", self.copy)
        found |= {f"average.{name}": each for name, each in copied.named_parameters()}
        found |= {f"torch.{name}": each for name, each in self.of_torch.module.named_parameters()}
        return {
            name: full_tensor_of(each).detach().double().numpy() for name, each in found.items()
        }


def reference(
    model: nn.Module, *, steps: int, dtype: torch.dtype, decay: float | None = None
) -> dict[str, Any]:
    """Run the same in plain PyTorch: one process, the full global batch at once, torch's own loss
    and clipping.
    """
    model = copy.deepcopy(model).to(dtype)
    optimizer = optimizer_of(model)
    losses, norms = [], []
    averages = Averages(model, copy.deepcopy(model), decay) if decay else None
    for step in range(steps):
        tokens, targets = global_batch(step)
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if averages:
            averages.update()
    weights = weights_of(model)
    if averages:
        weights |= averages.weights()
    return {"losses": losses, "norms": norms, "weights": weights}


def reference_in(
    model: nn.Module,
    precision: PrecisionConfig,
    replicas: int,
    shards: int,
    *,
    steps: int,
    descent: bool = False,
) -> dict[str, Any]:
    """The run of `train` in plain PyTorch, one process, computing in the dtypes that ``precision``
    names.

    The batch is divided into as many parts as data ranks. Each part computes with a copy of the
    weights in ``param``; its gradients are cast to ``reduce``, averaged over shards, then over
    replicas (one or two), and cast to ``storage``.
    """
    storage, reduce = DTYPES[precision.storage], DTYPES[precision.reduce]
    model = copy.deepcopy(model)
    buffers = precision.buffers or ("fp64" if precision.storage == "fp64" else None)
    for module in model.modules():
        apart = type(module).__name__ in precision.fp32_modules
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.data = parameter.data.to(
                    torch.promote_types(storage, torch.float32) if apart else storage
                )
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer.to(DTYPES[buffers]) if buffers else buffer
    apart = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module).__name__ in precision.fp32_modules
    }
    optimizer = Descent(model.parameters(), 0.3) if descent else optimizer_of(model)
    parts, losses, norms = replicas * shards, [], []
    for step in range(steps):
        tokens, targets = global_batch(step)
        weight = parts / int((targets != -100).sum())
        total, gradients = 0.0, []
        for own, wanted in zip(tokens.chunk(parts), targets.chunk(parts), strict=True):
            twin = _computing(model, precision)
            logits = twin(own)
            logits = logits.to(DTYPES[precision.output]) if precision.output else logits
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            loss = F.cross_entropy(
                wide.flatten(0, 1), wanted.flatten(), ignore_index=-100, reduction="sum"
            )
            (loss * weight).backward()
            total += loss.item() * weight
            gradients.append({})
            for name, parameter in twin.named_parameters():
                kept = torch.float32 if name in apart else reduce
                gradients[-1][name] = parameter.grad.to(kept)
        for name, parameter in model.named_parameters():
            each = [part[name] for part in gradients]
            inner = [_mean(each[first : first + shards]) for first in range(0, parts, shards)]
            dtype = reduce if precision.keep_low_precision_gradients else parameter.dtype
            parameter.grad_dtype = dtype
            # Two replicas exchange their contributions and add them unrounded; more replicas round
            # the mean too.
            if len(inner) == 2:
                wide = torch.promote_types(inner[0].dtype, torch.float32)
                inner = [value.to(wide) for value in inner]
            parameter.grad = _mean(inner).to(dtype)
        losses.append(total / parts)
        norm = torch.stack([p.grad.double().norm() for p in model.parameters()]).norm()
        for parameter in model.parameters():
            wide = torch.promote_types(parameter.grad.dtype, torch.float32)
            factor = (1 / (norm.to(wide) + 1e-6)).clamp(max=1.0)
            parameter.grad.mul_(factor.to(parameter.grad.dtype))
        norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "weights": weights_of(model)}


def _mean(tensors: list[Tensor]) -> Tensor:
    return sum(tensors[1:], tensors[0]) / len(tensors)


def _computing(model: nn.Module, precision: PrecisionConfig) -> nn.Module:
    """A copy that computes in ``precision.param``, its modules of ``fp32_modules`` in fp32 between casts."""
    param = DTYPES[precision.param]

    def cast(dtype: torch.dtype) -> Any:
        return lambda _module, inputs: tuple(
            x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs
        )

    twin = copy.deepcopy(model)
    for module in twin.modules():
        apart = type(module).__name__ in precision.fp32_modules
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.data = parameter.data.to(torch.float32 if apart else param)
        if apart:
            module.register_forward_pre_hook(cast(torch.float32))
            module.register_forward_hook(lambda _module, _inputs, output: output.to(param))
    for block in twin.layers if precision.cast_forward_inputs else ():
        block.register_forward_pre_hook(cast(param))
    return twin


def differences(run: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Largest relative difference of a loss and of the first gradient norm, and the largest
    absolute difference of a weight.

    NaN anywhere counts as infinite. Raises ValueError or AssertionError when one run has other
    steps or parameters than the other.
    """
    assert run["weights"].keys() == expected["weights"].keys()

    def relative(found: float, wanted: float) -> float:
        return abs(found - wanted) / abs(wanted)

    found = {
        "loss": [relative(*pair) for pair in zip(run["losses"], expected["losses"], strict=True)],
        "norm": [relative(run["norms"][0], expected["norms"][0])],
        "weights": [
            float(abs(run["weights"][name] - value).max())
            for name, value in expected["weights"].items()
        ],
    }
    return {
        name: max(value if math.isfinite(value) else math.inf for value in values)
        for name, values in found.items()
    }


def is_agreement(function, args):
    """True if a call to a process group is the all-reduce of used parameters: it runs on the group
    of all ranks, which never carries gradients.
    """
    groups = [
        dist.ProcessGroup.unbox(leaf)
        for leaf in torch.utils._pytree.tree_leaves(args)
        if is_process_group(leaf)
    ]
    return "allreduce" in str(function) and dist.group.WORLD in groups


def is_process_group(value):
    return isinstance(value, torch.ScriptObject) and str(value._type()).endswith(".ProcessGroup")
