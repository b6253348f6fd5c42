"""The model in one process, on plain tensors: `PlainModel`.

It computes what each data rank should contribute to the gradient, one micro-batch after the other,
in the dtypes of the parallel model. Nothing of the sharding is used: a forward and a backward pass
of the module that the user wrote.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map

from parallel2d.certification.output_norms import Norms, OutputNorms
from parallel2d.config import PrecisionConfig
from parallel2d.model_structure import fqn_of, owning_modules
from parallel2d.parallelize.precision import Precision, cast_storage
from parallel2d.weights.initial_values import (
    Initializer,
    allocate,
    has_meta_parameters,
    plan_weights,
)

# (model, micro-batch) -> the loss, summed
LossOf = Callable[[Any, Any], Tensor]
RandomState = list[Tensor]


@dataclass
class Contribution:
    """What one micro-batch of one data rank adds to the gradient."""

    data_rank: int
    number: int  # of the micro-batch
    loss: float  # summed
    outputs: list[Norms]  # of each forward of the model
    gradients: dict[str, Tensor | None]  # None: the parameter was not used


class PlainModel:
    """``module`` on one process; ``gathered``: names of the modules whose inputs the parallel model
    casts, because their parameters are gathered together."""

    def __init__(
        self,
        module: nn.Module,
        loss_of: LossOf,
        precision: PrecisionConfig,
        gathered: Iterable[str],
    ) -> None:
        dtypes = Precision.of(precision, module)
        self.module = module
        self._whole = _LossOf(module, loss_of)
        self.parameters = dict(module.named_parameters())
        self._computed_in = _dtypes_of(module, dtypes)
        gathered = list(gathered)
        _cast_at(module, dtypes, gathered)
        self._outputs = OutputNorms(module, gathered)
        # Statistics that a forward changes are each data rank's own.
        self._initial_buffers = self._buffers()
        self._buffers_of: dict[int, dict[str, Tensor]] = {}

    def contribution(
        self,
        weights: Mapping[str, Tensor],
        data_rank: int,
        number: int,
        batch: Any,
        scale: float,
        random_state: RandomState | None,
    ) -> Contribution:
        """Forward and backward of one micro-batch with ``weights``. ``scale``: of the loss;
        ``random_state``: with which the rank began."""
        if random_state is not None:
            set_random_state(random_state)
        leaves: dict[str, Tensor] = {}
        used: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            leaf = weights[name].detach().requires_grad_(parameter.requires_grad)
            leaves[name] = leaf
            used[f"model.{name}"] = leaf.to(self._computed_in[name])
        self._load_buffers(data_rank)
        loss = torch.func.functional_call(self._whole, used, (batch,), tie_weights=True)
        trained = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        gradients: tuple[Tensor | None, ...] = (None,) * len(trained)
        if trained and loss.requires_grad:
            gradients = torch.autograd.grad(loss * scale, list(trained.values()), allow_unused=True)
        self._buffers_of[data_rank] = self._buffers()
        outputs = self._outputs.take()
        by_name = dict(zip(trained, gradients, strict=True))
        return Contribution(data_rank, number, loss.item(), outputs, by_name)

    def buffers_of(self, data_rank: int) -> dict[str, Tensor]:
        """What the buffers of a data rank should hold by now."""
        return self._buffers_of.get(data_rank, self._initial_buffers)

    def changed_buffers(self) -> list[str]:
        """Names of those that forwards have changed."""
        names = set()
        for buffers in self._buffers_of.values():
            for name, value in buffers.items():
                if not torch.equal(value, self._initial_buffers[name]):
                    names.add(name)
        return sorted(names)

    def _buffers(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self.module.named_buffers()}

    def _load_buffers(self, data_rank: int) -> None:
        with torch.no_grad():
            buffers = dict(self.module.named_buffers())
            for name, value in self.buffers_of(data_rank).items():
                buffers[name].copy_(value)


class _LossOf(nn.Module):
    """The loss as a module, so that the parameters of the model in it can be exchanged."""

    def __init__(self, model: nn.Module, loss_of: LossOf) -> None:
        super().__init__()
        self.model = model
        self._loss_of = loss_of

    def forward(self, batch: Any) -> Tensor:
        return self._loss_of(self.model, batch)


def _dtypes_of(module: nn.Module, precision: Precision) -> dict[str, torch.dtype]:
    """In which dtype each parameter is computed with."""
    found: dict[str, torch.dtype] = {}
    for owner in module.modules():
        in_fp32 = id(owner) in precision.fp32_modules
        for parameter in owner._parameters.values():
            if parameter is not None:
                found[str(id(parameter))] = torch.float32 if in_fp32 else precision.param
    dtypes: dict[str, torch.dtype] = {}
    for name, parameter in module.named_parameters():
        dtype = found[str(id(parameter))]
        if parameter.is_complex():
            dtype = dtype.to_complex()
        elif not parameter.is_floating_point() or parameter.ndim == 0:
            # One without dimensions is not gathered, and so not cast.
            dtype = parameter.dtype
        dtypes[name] = dtype
    return dtypes


def _cast_at(module: nn.Module, precision: Precision, gathered: Iterable[str]) -> None:
    """Casts floating-point inputs where the parallel model does, and the outputs of modules that
    compute in fp32."""
    apart = {name for name, owner in owning_modules(module) if id(owner) in precision.fp32_modules}
    for name in gathered:
        inner = module.get_submodule(name)
        if name in apart:
            inner.register_forward_pre_hook(_casting_inputs(torch.float32), with_kwargs=True)
            inner.register_forward_hook(_casting_output(precision.param))
        elif precision.cast_inputs and precision.param != precision.storage:
            inner.register_forward_pre_hook(_casting_inputs(precision.param), with_kwargs=True)
    if precision.output is not None:
        module.register_forward_hook(_casting_output(precision.output))


def _casting_inputs(dtype: torch.dtype) -> Callable[..., Any]:
    def cast(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(lambda value: _cast(value, dtype), (args, kwargs))

    return cast


def _casting_output(dtype: torch.dtype) -> Callable[..., Any]:
    def cast(_module: nn.Module, _args: Any, output: Any) -> Any:
        return tree_map(lambda value: _cast(value, dtype), output)

    return cast


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


def random_state() -> RandomState:
    """Of the generators that a forward on this rank may draw from: torch's, Python's and numpy's,
    each as bytes."""
    of_numpy: Any = list(numpy.random.get_state(legacy=True))
    of_numpy[1] = of_numpy[1].tolist()
    states = [torch.get_rng_state(), _as_bytes(random.getstate()), _as_bytes(of_numpy)]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def set_random_state(states: RandomState) -> None:
    """Undoes what was drawn since `random_state`."""
    torch.set_rng_state(states[0])
    version, internal, gauss = _from_bytes(states[1])
    random.setstate((version, tuple(internal), gauss))
    numpy.random.set_state(tuple(_from_bytes(states[2])))
    if len(states) > 3:
        torch.cuda.set_rng_state(states[3])


def _as_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_bytes(state: Tensor) -> Any:
    return json.loads(state.numpy().tobytes())


def gathered_modules(model: nn.Module) -> list[str]:
    """Names of the modules of a parallel model whose parameters are gathered together."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            found.append(fqn_of(name))
    return found


def switch_dropout_off(model: nn.Module) -> bool:
    """Sets every probability of dropout to 0; whether there was any."""
    found = False
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_dropout = "dropout" in name or (name == "p" and "Dropout" in type(module).__name__)
            if is_dropout and isinstance(value, float) and value > 0:
                setattr(module, name, 0.0)
                found = True
    return found


def fill(
    module: nn.Module,
    precision: PrecisionConfig,
    init: Initializer | None,
    seed: int,
    weights: Callable[[nn.Module], Container[str]] | None = None,
) -> nn.Module:
    """``module`` with the dtypes of ``precision`` and the initial weights of one process, as
    `parallelize` gives them; those that it has are kept."""
    cast_storage(module, Precision.of(precision, module))
    if has_meta_parameters(module, seed):
        initial = plan_weights(module, [], init)
        given: Container[str] = ()
        if weights is not None:
            allocate(module, "cpu")
            given = weights(module)
        initial.write(module, seed, "cpu", given=given)
    return module
