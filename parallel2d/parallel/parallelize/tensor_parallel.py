"""Tensor parallelism: split the matrices of a plan over the ``tensor`` axis. A plan maps patterns
of module names to a torch ``ParallelStyle``, or to the name of a style:

    colwise            splits the outputs of a Linear (its heads, its hidden units) or the columns
                       of an Embedding; the output of a Linear stays split
    rowwise            splits the inputs of a Linear that follows a colwise Linear, or the rows of
                       an Embedding; the output is unsplit
    sequence           for a norm: each rank computes a slice of the sequence (dim 1); inputs and
                       outputs are unsplit
    replicate          stays replicated, like a module that no pattern matches
    colwise_gather_output
                       colwise, and the output is all-gathered: for an output head with any loss
    replicated_with_grad_allreduce
                       for a norm of queries or keys: the weights are replicated, the input and
                       the output are this rank's heads, and the gradients of the weights are
                       summed over the ranks
    rowwise_split_input
                       rowwise, for a Linear after colwise_gather_output: the module gets the
                       unsplit input and splits this input for the ranks
    embedding_rowwise  rowwise, for an Embedding

The last four names are from Hugging Face plans. Activations between layers are unsplit, except
between a colwise Linear and the rowwise Linear that follows it.
"""

from __future__ import annotations

import fnmatch
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from parallel2d.base.config import TENSOR_WORDS
from parallel2d.base.errors import ConfigError, first_five
from parallel2d.parallel.mesh import axis_names
from parallel2d.parallel.model_structure import (
    ATOMIC,
    Ties,
    names_by_id,
    tie_again,
    tied_parameters,
    without_storage,
)

log = logging.getLogger(__name__)

# Styles that split no parameters
_WHOLE = (PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput, SequenceParallel)


class _OnSlices(ParallelStyle):
    """Style of a replicated module that computes on a slice of its input.

    The weights are replicated, and their gradients are summed over the ranks.

    Args:
        dim: the split dim of the input.
        split_already: True if input and output are this rank's slices; False if they are unsplit.
    """

    def __init__(self, dim: int, split_already: bool) -> None:
        super().__init__()
        self.dim = dim
        self.split_already = split_already

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # With `DTensor` weights, autograd sums their gradients over the axis.
        def replicate(_name: str, owner: nn.Module, mesh: DeviceMesh) -> None:
            for key, parameter in owner.named_parameters(recurse=False):
                whole = distribute_tensor(parameter, mesh, [Replicate()], src_data_rank=None)
                owner.register_parameter(key, nn.Parameter(whole, parameter.requires_grad))

        def enter(_module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            x: Tensor = inputs[0]
            split = Shard(self.dim % x.ndim)
            # `run_check=True` would broadcast the values of the first rank.
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
    """Apply ``plan`` over the ``tensor`` axis of ``mesh``, if the mesh has a tensor axis.

    Logs the parameters that stay replicated.

    Args:
        model: the model, not sharded yet.
        mesh: the mesh of the parameters, from `sharding_mesh`.
        plan: module pattern -> style or word.

    Raises:
        ConfigError: the mesh has a tensor axis and the plan is missing, a pattern matches no
            module, a word does not fit its module, or the axis does not divide a size or a number
            of heads.
    """
    if "tensor" not in axis_names(mesh):
        return model
    if not plan:
        raise ConfigError(
            f"mesh.tensor={mesh['tensor'].size()}: {type(model).__name__} has no tensor-parallel "
            "plan; give one (model.tensor_plan={pattern: word} or package.module:function, or "
            "tensor_plan= in code) or set mesh.tensor=1"
        )
    split_layers(model, mesh, plan)
    kept: dict[str, list[int]] = {}
    split = 0
    total = 0
    for name, parameter in model.named_parameters():
        total += parameter.numel()
        placements = parameter.placements if isinstance(parameter, DTensor) else ()
        if any(isinstance(placement, Shard) for placement in placements):
            split += parameter.numel()
            continue
        # layers.0.norm.weight and layers.1.norm.weight both count as layers.*.norm.weight.
        pattern = re.sub(r"\b\d+\b", "*", name)
        kept.setdefault(pattern, []).append(parameter.numel())
    log.info(
        f"tensor axis: {split / max(total, 1):.1%} of {total:,} parameters are split; replicated "
        "on every tensor rank:"
    )
    for pattern, sizes in kept.items():
        log.info(f"  {pattern}: {len(sizes)} x {sizes[0]:,}")
    return model


def split_layers(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, object]) -> None:
    """Split the layers as `apply_tensor_parallel` does, without logging."""
    styles = resolve_plan(model, plan, mesh["tensor"].size())
    ties = tied_parameters(model)
    parallelize_module(model, mesh["tensor"], styles)
    _check_ties(model, ties)
    # `parallelize_module` makes a new parameter per module, so tie the parameters again.
    tie_again(ties)


def resolve_plan(
    model: nn.Module, plan: Mapping[str, object], tensor: int
) -> dict[str, ParallelStyle]:
    """Return a plan for torch's `parallelize_module`, checked against ``model``.

    Entries with a word become one entry with a style per module. Entries with a torch style do not
    change. Raises `ConfigError` like `apply_tensor_parallel`.
    """
    modules = dict(model.named_modules())
    styles: dict[str, ParallelStyle] = {}
    words: dict[str, str] = {}
    problems: list[str] = []
    for pattern, style in plan.items():
        matched = []
        for name in modules:
            if fnmatch.fnmatchcase(name, pattern):
                matched.append(name)
        if not matched:
            problems.append(f"{pattern!r} matches no module of {type(model).__name__}")
        elif isinstance(style, str):
            # The last of several matching patterns wins.
            words |= dict.fromkeys(matched, style)
        else:
            # `parallelize_module` accepts patterns, and checks its styles itself.
            styles[pattern] = style  # type: ignore[assignment]
    _complete_ties(model, words)
    for name, word in words.items():
        if word == "replicate":
            continue
        try:
            styles[name] = _style(name, modules, word, tensor)
        except ValueError as error:
            # Collected, so that one message lists all problems of a plan.
            problems.append(str(error))
    if problems:
        raise ConfigError(f"tensor-parallel plan: {first_five(problems)}")
    return styles


def split_dims(
    model: nn.Module, mesh: DeviceMesh | None, plan: Mapping[str, object], tensor: int
) -> Iterator[tuple[nn.Parameter, int]]:
    """Yield (parameter, dim) of each parameter that ``plan`` splits over ``tensor`` ranks.

    ``mesh`` may be None; then parameters with a custom style are not included.
    """
    if tensor == 1:
        return
    for pattern, style in resolve_plan(model, plan, tensor).items():
        for module in _modules_named(model, pattern):
            yield from _split_by(style, module, mesh)


def _modules_named(model: nn.Module, pattern: str) -> list[nn.Module]:
    """Return the modules that ``pattern`` selects in `parallelize_module`.

    torch matches the components of a dotted name separately.
    """
    found = [model]
    for part in filter(None, pattern.split(".")):
        around, found = found, []
        for module in around:
            children = module.named_children()
            for name, child in children:
                if fnmatch.fnmatchcase(name, part):
                    found.append(child)
    return found


def _split_by(
    style: ParallelStyle, module: nn.Module, mesh: DeviceMesh | None
) -> Iterator[tuple[nn.Parameter, int]]:
    rows, columns = (0, 1) if isinstance(module, nn.Linear) else (1, 0)
    if type(style) is ColwiseParallel:
        for parameter in module.parameters():
            yield parameter, rows
    elif type(style) is RowwiseParallel:
        # The bias is not split: it is added once, after the reduction.
        assert isinstance(module.weight, nn.Parameter)
        yield module.weight, columns
    elif mesh is not None and not isinstance(style, _WHOLE):
        # For a custom style, apply it to a meta copy and read the placements.
        twin = parallelize_module(without_storage(module), mesh["tensor"], style)
        for parameter, split in zip(module.parameters(), twin.parameters(), strict=True):
            for placement in getattr(split, "placements", ()):
                if isinstance(placement, Shard):
                    yield parameter, placement.dim % parameter.ndim


def _complete_ties(model: nn.Module, words: dict[str, str]) -> None:
    """Add to ``words`` each Embedding whose weight is tied to a colwise Linear, as ``rowwise``.

    Both words split the rows of the common weight. Other ties are left to `_check_ties`.
    """
    names = names_by_id(model.named_modules())
    for group in tied_parameters(model):
        modules = {}
        for module, _ in group:
            modules[names[id(module)]] = module
        # A module with the word ``replicate`` has no effect on the modules tied to it.
        split = {words.get(name, "replicate") for name in modules} - {"replicate"}
        if split and split <= {"colwise", "colwise_gather_output"}:
            for name, module in modules.items():
                if isinstance(module, nn.Embedding):
                    words.setdefault(name, "rowwise")


def _check_ties(model: nn.Module, ties: Ties) -> None:
    """Raise `ConfigError` when the plan splits one tied parameter in different ways."""
    names = names_by_id(model.named_modules())
    for group in ties:
        layouts: dict[str, str] = {}
        for module, attribute in group:
            parameter = module._parameters[attribute]
            layout = "whole"
            if isinstance(parameter, DTensor):
                layout = f"as {parameter.placements[0]}"
            layouts[f"{names[id(module)]}.{attribute}"] = layout
        if len(set(layouts.values())) > 1:
            made = ", ".join(map(" ".join, layouts.items()))
            raise ConfigError(
                f"tensor-parallel plan: {' and '.join(layouts)} are one parameter, and the plan "
                f"makes {made}; split all its occurrences alike (embedding: rowwise with head: "
                "colwise or colwise_gather_output) or none"
            )


def _style(name: str, modules: Mapping[str, nn.Module], word: str, tensor: int) -> ParallelStyle:
    """Return the style for one module. Raise ValueError if the word does not fit the module."""
    if word not in TENSOR_WORDS:
        raise ValueError(f"{name}: {word} is not one of {', '.join(TENSOR_WORDS)}")
    module = modules[name]
    parent = modules[name.rpartition(".")[0]]
    if isinstance(parent, ATOMIC) or isinstance(module, ATOMIC):
        raise ValueError(
            f"{name}: {type(parent).__name__} reads its children's weights without calling them "
            "and cannot be split"
        )
    if word == "sequence":
        return _OnSlices(1, split_already=False)
    if word == "replicated_with_grad_allreduce":
        # A norm of queries or keys gets [..., heads, head_dim] with this rank's heads.
        return _OnSlices(-2, split_already=True)
    match module, word:
        case nn.Embedding(), "colwise":
            _must_divide(name, "embedding_dim", module.embedding_dim, tensor)
            return ColwiseParallel(output_layouts=Replicate())
        case nn.Embedding(), "rowwise" | "embedding_rowwise":
            # The number of rows need not be divisible: ids outside of a rank's rows give zeros on
            # this rank.
            return RowwiseParallel(input_layouts=Replicate())
        case nn.Linear(), "rowwise" | "rowwise_split_input":
            _must_divide(name, "in_features", module.in_features, tensor)
            return RowwiseParallel(input_layouts=Shard(-1) if word == "rowwise" else Replicate())
        case nn.Linear(), "colwise_gather_output":
            # The size of the vocabulary need not be divisible: shards of unequal size can be
            # all-gathered.
            return ColwiseParallel(output_layouts=Replicate())
        case nn.Linear(), "colwise":
            _must_divide(name, "out_features", module.out_features, tensor)
            # The output of an attention projection consists of heads, and a split must not cut a
            # head.
            head_dim = getattr(parent, "head_dim", None)
            if isinstance(head_dim, int) and head_dim > 0 and module.out_features % head_dim == 0:
                _must_divide(name, "heads", module.out_features // head_dim, tensor)
            return ColwiseParallel()
    kind = type(module).__name__
    if isinstance(module, nn.Embedding | nn.Linear):
        raise ValueError(f"{name}: a {kind} is split colwise or rowwise, not {word}")
    raise ValueError(f"{name}: {word} splits a Linear or an Embedding, not {kind}")


def _must_divide(name: str, what: str, size: int, tensor: int) -> None:
    """Raise ValueError if ``tensor`` does not divide ``size``."""
    if size % tensor:
        raise ValueError(f"mesh.tensor={tensor} does not divide the {size} {what} of {name}")
