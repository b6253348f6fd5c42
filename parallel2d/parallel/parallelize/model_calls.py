"""Support for scripts written for ``DistributedDataParallel`` or transformers:
`explain_model_calls`.

These scripts call methods of the model, or pickle its tensors. Without this module, some of these
calls would fail or give wrong results for a sharded model. With this module, each call either works
or raises an error that names the remedy. The module sets attributes of the model object and of its
tensors, and does not change torch.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel2d.base.errors import ConfigError
from parallel2d.base.exchange import all_gather
from parallel2d.parallel.fsdp_internals.tensors import part_of
from parallel2d.parallel.mesh import axis_names
from parallel2d.parallel.model_structure import tensor_leaves
from parallel2d.parallel.sync import no_sync
from parallel2d.parallel.sync.engine.replica_reducer import engine_of
from parallel2d.parallel.sync.methods.method import UpdateFollower
from parallel2d.parallel.weights.unsharded_tensors import sharded_modules

log = logging.getLogger(__name__)


def explain_model_calls(model: nn.Module, mesh: DeviceMesh) -> None:
    """Prepare ``model``, after `fully_shard`, for the calls of such scripts."""
    model.register_load_state_dict_pre_hook(_refuse_plain_tensors)
    model.register_state_dict_post_hook(_mark_state)
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            _mark_pickle(parameter)
            _make_plain_tensors(parameter)
    for axis in ("context", "tensor"):
        check_ranks_share_data(model, mesh, axis)
    if not hasattr(model, "no_sync"):
        vars(model)["no_sync"] = functools.partial(no_sync, model)
    _explain_missing_wrapper(model)
    for _, module in sharded_modules(model):
        # `Module.to`, `Module.half` and similar methods call `_apply`.
        vars(module)["_apply"] = functools.partial(_apply, model, module, module._apply)
    for module in model.modules():
        save = getattr(module, "save_pretrained", None)
        if callable(save):
            vars(module)["save_pretrained"] = functools.partial(_save_unsharded, save)


class _PickleWarning:
    """Attribute of a tensor that logs a warning when the tensor is pickled.

    The pickle contains only this rank's local shard. `torch.load` reads an empty dict in the place
    of this object, also with ``weights_only``.
    """

    def __reduce__(self) -> Any:
        warn_of_parts()
        return OrderedDict, ()

    def __deepcopy__(self, _memo: Any) -> _PickleWarning:
        return self


_PICKLE_WARNING = _PickleWarning()


@functools.cache
def warn_of_parts() -> None:
    """Warn, once per process, that a pickle contains only local shards."""
    log.warning(
        "torch.save, or another pickle, of sharded tensors writes only this rank's local "
        "shards: call parallel2d.save_full(path, model, optimizer) on all ranks to write unsharded "
        "tensors"
    )


def _mark_pickle(tensor: DTensor) -> None:
    vars(tensor)["_parallel2d_pickle"] = _PICKLE_WARNING


def _mark_state(_module: nn.Module, state: dict[str, Any], *_: Any) -> None:
    """Mark the tensors of a ``state_dict``, which are not the parameter objects. Post-hook."""
    for value in state.values():
        if isinstance(value, DTensor):
            _mark_pickle(value)


class _PlainTensors:
    """Replacement of a method of a sharded parameter that creates a tensor, such as ``new_zeros``.

    The replacement returns a ``torch.Tensor`` instead of a `DTensor`. Scripts use these methods to
    create a first hidden state with the device and dtype of a parameter.
    """

    def __init__(self, name: str, parameter: DTensor) -> None:
        self._name = name
        self._like = torch.empty(0, dtype=parameter.dtype, device=part_of(parameter).device)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = getattr(self._like, self._name)(*args, **kwargs)
        return made


def _make_plain_tensors(parameter: DTensor) -> None:
    # An attribute of the object hides the method of its class.
    for name in ("new_empty", "new_full", "new_ones", "new_zeros"):
        vars(parameter)[name] = _PlainTensors(name, parameter)


def _refuse_plain_tensors(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Raise `ConfigError` if ``load_state_dict`` gets unsharded tensors for sharded parameters.

    Without this hook torch would raise an error for each tensor.
    """
    if prefix:  # the state belongs to a model that contains this model
        return
    for name, parameter in model.named_parameters():
        value = state.get(name)
        is_whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
        if is_whole and isinstance(parameter, DTensor):
            raise ConfigError(
                f"load_state_dict: {name} is sharded, and the state holds an unsharded tensor; use "
                "parallel2d.load_state(model, state), which distributes rank 0's tensors, "
                'or load_full_state(model, optimizer, {"model": ..., "optimizer": ...})'
            )


def check_ranks_share_data(model: nn.Module, mesh: DeviceMesh, axis: str) -> None:
    """Compare the inputs of the first forward over the context or tensor ``axis``.

    All ranks of this axis must get the same data. If a sampler uses the global rank, they get
    different data. Each rank would then compute its part of a sequence or of a matrix product from
    other data, without an error.
    """
    if axis not in axis_names(mesh):
        return
    group = mesh.get_group(axis)

    # The first forward is enough, because a sampler does not change its ranks later. If an earlier
    # hook has called the model, torch calls this hook a second time without ``kwargs``.
    def compare(_module: nn.Module, args: Any, kwargs: Any = None) -> None:
        handle.remove()
        if len(set(all_gather(_digest((args, kwargs)), group))) > 1:
            ranks = dist.get_process_group_ranks(group)
            raise ConfigError(
                f"ranks {ranks} share one {axis} axis and were fed different data: a sampler must "
                "be keyed on parallel2d.data_coordinate(mesh) and its number of ranks, "
                "mesh_shape(mesh).data_ranks, not on the global rank"
            )

    handle = model.register_forward_pre_hook(compare, prepend=True, with_kwargs=True)


def _digest(inputs: Any) -> str:
    digest = hashlib.sha256()
    for each in tensor_leaves(inputs):
        digest.update(f"{tuple(each.shape)} {each.dtype}".encode())
        values = each.detach().cpu().contiguous().reshape(-1)
        digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _apply(
    model: nn.Module,
    module: nn.Module,
    apply: Callable[..., Any],
    function: Callable[[Tensor], Tensor],
    recurse: bool = True,
) -> Any:
    engine = engine_of(model)
    is_used = engine.has_run or type(engine.updates) is not UpdateFollower
    for dtype in {parameter.dtype for parameter in model.parameters()}:
        wanted = function(torch.empty(0, dtype=dtype)).dtype
        # The communication over replicas has the dtype of the configuration. A wider dtype of the
        # parameters would not change it.
        is_wider = engine.buckets is not None and wanted.itemsize > dtype.itemsize
        if wanted != dtype and (is_used or is_wider):
            raise ConfigError(
                f"model.to({wanted}): parameters are gathered, reduced and updated in "
                f"{dtype}; choose the dtype by parallelize(..., ParallelConfig(precision=...))"
            )
    # torch may swap the contents of a parameter with a new tensor, which lacks the attributes.
    attributes = []
    for parameter in module.parameters():
        attributes.append(dict(vars(parameter)))
    result = apply(function, recurse)
    for parameter, kept in zip(module.parameters(), attributes, strict=True):
        vars(parameter).update(kept)
        if isinstance(parameter, DTensor):
            _make_plain_tensors(parameter)
    return result


def _save_unsharded(save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("state_dict") is None:
        raise ConfigError(
            "save_pretrained(...) would write this rank's local shards: unshard the parameters on "
            "all ranks by state = parallel2d.full_state(model) and pass state_dict=state['model'] "
            "on rank 0, or save a checkpoint for python -m parallel2d.checkpoint convert"
        )
    return save(*args, **kwargs)


def _explain_missing_wrapper(model: nn.Module) -> None:
    """Make ``model.module`` raise an error that explains that there is no wrapper.

    ``model`` gets a class that no other module has. The class from `fully_shard` is shared by all
    sharded modules of one original class.
    """
    kind = type(model)

    # A property ``module`` would not work: torch replaces its AttributeError by a different error,
    # and the property would hide a child module that is called ``module``.
    def find(self: Any, name: str) -> Any:
        try:
            return super(kind, self).__getattr__(name)
        except AttributeError as error:
            if name != "module":
                raise
            problem = "model.module: parallelize(...) returns the model itself, without a wrapper"
            raise AttributeError(f"{problem}; use model") from error

    # A module may create modules of its class: a slice of `nn.Sequential` is an `nn.Sequential`. As
    # in FSDP, these new modules have the original class.
    def make(_kind: type, *args: Any, **kwargs: Any) -> nn.Module:
        made: nn.Module = kind(*args, **kwargs)
        return made

    names = {"__getattr__": find, "__new__": make, "__module__": kind.__module__}
    model.__class__ = type(kind.__name__, (kind,), names)
