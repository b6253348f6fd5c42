"""Splits each matrix over the ``tensor`` axis, as a plan says. The model and a plan flow in; layers
become DTensors.

A plan maps patterns of module names to a torch ``ParallelStyle`` or to a word:

    colwise splits the outputs of a Linear (its heads, its hidden units) or the columns of an
    Embedding; the output stays split rowwise splits the inputs of a Linear that a colwise one
    feeds, or the rows of an Embedding; the output is whole again sequence computes on a slice of
    the sequence (dim 1), whole before and after: a norm's work and memory are divided replicate
    stays whole, said on purpose colwise_gather_output colwise, and the output is gathered: a head
    whose logits any loss can read replicated_with_grad_allreduce whole weights on split heads (a
    norm of queries and keys); their gradients are summed rowwise_split_input rowwise, and the input
    is whole: what a gathered colwise one feeds embedding_rowwise rowwise, of an Embedding

The last four are words of Hugging Face's own plans. A layer under a word takes and
returns whole activations, but for the split between a colwise and its rowwise; so a plan may name
any part of a model.
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from parallel2d.config import TENSOR_WORDS
from parallel2d.errors import ConfigError
from parallel2d.model_structure import ATOMIC, tied_parameters

log = logging.getLogger(__name__)


class _OnSlices(ParallelStyle):
    """A module with whole weights computes on a slice of its input; its weights' gradients are
    summed over the slices.

    ``dim``: of the input that is split. ``split_already``: what comes in is this rank's slice, and
    so is what goes out; otherwise both are whole.
    """

    def __init__(self, dim: int, split_already: bool) -> None:
        super().__init__()
        self.dim, self.split_already = dim, split_already

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def replicate(_name: str, owner: nn.Module, mesh: DeviceMesh) -> None:
            for key, parameter in owner.named_parameters(recurse=False):
                whole = distribute_tensor(parameter, mesh, [Replicate()], src_data_rank=None)
                owner.register_parameter(key, nn.Parameter(whole, parameter.requires_grad))

        def enter(_module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            x: Tensor = inputs[0]
            split = Shard(self.dim % x.ndim)
            if self.split_already:
                return (DTensor.from_local(x, mesh, [split], run_check=False), *inputs[1:])
            whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
            return (whole.redistribute(placements=[split]), *inputs[1:])

        def leave(_module: nn.Module, output: DTensor, _mesh: DeviceMesh) -> Tensor:
            if self.split_already:
                return output.to_local()
            return output.redistribute(placements=[Replicate()]).to_local()

        return distribute_module(module, device_mesh, replicate, enter, leave)  # type: ignore[arg-type]


def apply_tensor_parallel(
    model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, object] | None
) -> nn.Module:
    """Applies ``plan`` (module pattern -> style or word) over the mesh's ``tensor`` axis; without
    that axis, nothing.

    Logs which parameters stayed whole. Raises `ConfigError` when there is an axis and no plan, for
    a pattern that matches no module, a word that does not fit the module, and sizes or heads that
    the axis does not divide.
    """
    if "tensor" not in (mesh.mesh_dim_names or ()):
        return model
    if not plan:
        raise ConfigError(
            f"mesh.tensor={mesh['tensor'].size()}: {type(model).__name__} has no tensor-parallel "
            "plan; give one "
            "(model.tensor_plan={pattern: word} or package.module:function, or tensor_plan= in "
            "code) or set mesh.tensor=1"
        )
    split_layers(model, mesh, plan)
    for line in whole_parameters(model):
        log.info(line)
    return model


def split_layers(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, object]) -> None:
    """`apply_tensor_parallel` without its say; the mesh must have a ``tensor`` axis."""
    styles = resolve_plan(model, plan, mesh["tensor"].size())
    ties = tied_parameters(model)
    parallelize_module(model, mesh["tensor"], styles)
    _check_ties(model, ties)
    # Splitting makes a new parameter per module; tied ones must stay one.
    for (first, first_name), *others in ties:
        for module, name in others:
            module._parameters[name] = first._parameters[first_name]


def resolve_plan(
    model: nn.Module, plan: Mapping[str, object], tensor: int
) -> dict[str, ParallelStyle]:
    """The plan with words turned to styles, one entry per module for them; checked against the
    model. See `apply_tensor_parallel`."""
    modules = dict(model.named_modules())
    styles: dict[str, ParallelStyle] = {}
    words: dict[str, str] = {}
    problems: list[str] = []
    for pattern, style in plan.items():
        matched = [name for name in modules if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            problems.append(f"{pattern!r} matches no module of {type(model).__name__}")
        elif not isinstance(style, str):
            styles[pattern] = style  # type: ignore[assignment]
        else:
            words |= dict.fromkeys(matched, style)
    _complete_ties(model, words)
    for name, word in words.items():
        try:
            made = _style(name, modules, word, tensor)
        except ValueError as error:
            problems.append(str(error))
        else:
            if made is not None:
                styles[name] = made
    if problems:
        shown = problems[:8] + ([f"and {len(problems) - 8} more"] if len(problems) > 8 else [])
        raise ConfigError(f"tensor-parallel plan: {'; '.join(shown)}")
    return styles


def whole_parameters(model: nn.Module) -> list[str]:
    """A table, one line each: the share of the parameters that the tensor axis splits, then what
    every tensor rank keeps whole.

    Equal parameters of repeated layers share a line.
    """
    kept: dict[str, list[int]] = {}
    split = total = 0
    for name, parameter in model.named_parameters():
        total += parameter.numel()
        if isinstance(parameter, DTensor) and any(
            isinstance(p, Shard) for p in parameter.placements
        ):
            split += parameter.numel()
        else:
            key = ".".join("*" if part.isdigit() else part for part in name.split("."))
            kept.setdefault(key, []).append(parameter.numel())
    lines = [
        f"tensor axis: {split / max(total, 1):.1%} of {total:,} parameters are split; whole on "
        "every tensor rank:"
    ]
    return (
        [*lines, *(f"  {key}: {len(sizes)} x {sizes[0]:,}" for key, sizes in kept.items())]
        if kept
        else lines
    )


def _complete_ties(model: nn.Module, words: dict[str, str]) -> None:
    """An Embedding tied to a split Linear is split alike (both by rows of the one weight); other
    ties cannot be."""
    names = {id(module): name for name, module in model.named_modules()}
    for group in tied_parameters(model):
        places = [(names[id(module)], module) for module, _ in group]
        split = {words[name] for name, _ in places if name in words and words[name] != "replicate"}
        if not split:
            continue
        for name, module in places:
            if (
                isinstance(module, nn.Embedding)
                and name not in words
                and all(word.startswith("colwise") for word in split)
            ):
                words[name] = "rowwise"


def _check_ties(model: nn.Module, ties: list[list[tuple[nn.Module, str]]]) -> None:
    """Raises `ConfigError` when one place of a tied parameter was split otherwise than another: it
    cannot stay one parameter."""
    names = {id(module): name for name, module in model.named_modules()}
    for group in ties:
        split: dict[str, tuple[Placement, ...] | None] = {}
        for module, attribute in group:
            parameter = module._parameters[attribute]
            split[f"{names[id(module)]}.{attribute}"] = (
                parameter.placements if isinstance(parameter, DTensor) else None
            )
        if len(set(split.values())) > 1:
            told = ", ".join(
                f"{name} {'whole' if how is None else f'as {how[0]}'}"
                for name, how in split.items()
            )
            raise ConfigError(
                f"tensor-parallel plan: {' and '.join(split)} are one parameter, and the plan "
                f"makes {told}; split all of its places "
                "alike (embedding: rowwise with head: colwise or colwise_gather_output) or none"
            )


def _style(
    name: str, modules: Mapping[str, nn.Module], word: str, tensor: int
) -> ParallelStyle | None:
    """The style for one module; None to leave it whole. Raises ValueError when the word does not
    fit the module."""
    module = modules[name]
    if word not in TENSOR_WORDS:
        raise ValueError(f"{name}: {word} is not one of {', '.join(TENSOR_WORDS)}")
    if word == "replicate":
        return None
    parent = modules[name.rpartition(".")[0]]
    if isinstance(parent, ATOMIC) or isinstance(module, ATOMIC):
        raise ValueError(
            f"{name}: {type(parent).__name__} reads its children's weights without calling them "
            "and cannot be split"
        )
    if word in ("sequence", "replicated_with_grad_allreduce"):
        return (
            _OnSlices(-2, split_already=True)
            if word != "sequence"
            else _OnSlices(1, split_already=False)
        )
    if not isinstance(module, nn.Linear | nn.Embedding):
        raise ValueError(
            f"{name}: {word} splits a Linear or an Embedding, not {type(module).__name__}"
        )
    if isinstance(module, nn.Embedding):
        if word == "colwise":
            _must_divide(name, "embedding_dim", module.embedding_dim, tensor)
            return ColwiseParallel(output_layouts=Replicate())
        if word != "rowwise" and word != "embedding_rowwise":
            raise ValueError(f"{name}: an Embedding is split colwise or rowwise, not {word}")
        return RowwiseParallel(input_layouts=Replicate())
    if word.startswith("rowwise"):
        _must_divide(name, "in_features", module.in_features, tensor)
        return (
            RowwiseParallel() if word == "rowwise" else RowwiseParallel(input_layouts=Replicate())
        )
    if word == "colwise_gather_output":
        return ColwiseParallel(output_layouts=Replicate())
    _must_divide(name, "out_features", module.out_features, tensor)
    size = getattr(parent, "head_dim", None)
    if isinstance(size, int) and size > 0 and module.out_features % size == 0:
        _must_divide(name, "heads", module.out_features // size, tensor)
    return ColwiseParallel()


def _must_divide(name: str, what: str, size: int, tensor: int) -> None:
    if size % tensor:
        raise ValueError(f"mesh.tensor={tensor} does not divide the {size} {what} of {name}")
