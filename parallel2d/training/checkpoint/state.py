"""The tensors that a run saves, by name, and the functions that load them: `saved_tensors`,
`load_model`, `load_optimizer`. `rng_tensors` and `restore_rng` save and restore random generators.

Names do not depend on the rank, the layout or the precision: ``model/<parameter or buffer>``,
``ema/<parameter>``, ``optimizer/<key>/<parameter>`` and ``rng/<rank>/<generator>``.

If replicas train independently (``sync=diloco``), ``model/`` holds the outer parameters, so that
every other layout can continue from them, and ``sync/`` holds the state of the outer optimizer.
Each replica stores its parameters and its optimizer state under ``replica/<number>/``. A replica
without an entry in the checkpoint starts from the outer parameters, with the optimizer state of
another replica. Error-feedback buffers are also stored under ``replica/<number>/``, for every
method with error feedback.
"""

from __future__ import annotations

import logging
import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from parallel2d.base.device import accelerator_type, random_state, set_random_state
from parallel2d.base.errors import ConfigError
from parallel2d.base.files import printable
from parallel2d.base.files.tensor_file import DTYPES, DamagedCheckpointError
from parallel2d.parallel.sync.ema import ema_of
from parallel2d.parallel.sync.methods.diloco import OuterSync
from parallel2d.parallel.sync.methods.method import UpdateFollower
from parallel2d.parallel.sync.updates import error_feedback_of, outer_sync
from parallel2d.parallel.weights.named_tensors import (
    SCALARS,
    describe_optimizer,
    drop_state,
    model_tensors,
    optimizer_tensors,
    reshard,
    tied_names,
    trained_parameters,
)
from parallel2d.parallel.weights.optimizer_settings import Settings, match_settings
from parallel2d.parallel.weights.states import new_state_tensor, state_dtype
from parallel2d.training.checkpoint.manifest import Manifest, from_json
from parallel2d.training.checkpoint.reader import Checkpoint

log = logging.getLogger(__name__)

STEPS = "sync/steps"
_SHOWN = 20  # differences that a message lists in full
# Length of the state of NumPy's legacy generator in words, and the largest number of elements that
# is accepted for the state of any generator
_TWISTER, _LARGEST = 624, 2**16


def saved_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Return the state that all replicas share, by its name in the checkpoint and in the same order
    on every rank. Collective over the replicas with ``sync=diloco``."""
    found = _under("model", model_tensors(model)) | shared_tensors(model)
    if (average := ema_of(model)) is not None:
        found |= _under("ema", average.values)
    # If replicas train independently, `replica_tensors` returns the optimizer state of each
    # replica.
    if optimizer is not None and STEPS not in found:
        found |= _under("optimizer", optimizer_tensors(model, optimizer))
    return found


def load_ema(model: nn.Module, checkpoint: Checkpoint, *, restart: bool) -> None:
    """Load the EMA weights. With ``restart``, all EMA weights start from the weights that have just
    been loaded; otherwise only those whose names are not in ``checkpoint``. No communication."""
    average = ema_of(model)
    if average is None:
        return
    average.update(0.0)
    for name in () if restart else average.values:
        _fill_if_saved(average.values[name], f"ema/{name}", checkpoint)


def buffer_names(model: nn.Module) -> list[str]:
    """Return the names of the persistent buffers among the `model_tensors`."""
    buffers = set(map(id, model.buffers()))
    names: list[str] = []
    for name, tensor in model_tensors(model).items():
        if id(tensor) in buffers:
            names.append(name)
    return names


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        found[f"{prefix}/{name}"] = tensor
    return found


def check_model(model: nn.Module, checkpoint: Checkpoint, strict: bool) -> list[str]:
    """Compare the tensors of the model with the tensors of the checkpoint by name and shape.
    Returns one line per difference; with ``strict`` raises `ConfigError` with all lines instead."""
    here = {}
    for name, tensor in model_tensors(model).items():
        here[name] = list(tensor.shape)
    names = names_under(["model"], checkpoint.tensors)
    stored = {}
    for name in names:
        stored[name.removeprefix("model/")] = list(checkpoint.tensors[name].shape)
    there = {name: stored[first] for name, first in checkpoint.manifest.tied.items()} | stored
    lines = []
    for name, shape in here.items():
        if there.get(name) != shape:
            found = there.get(name, "not")
            lines.append(f"{name}: {shape} in the model, {found} in the checkpoint")
    for name in sorted(stored.keys() - here.keys() - tied_names(model).keys()):
        lines.append(f"{printable(name)}: {stored[name]} in the checkpoint, not in the model")
    advice = "checkpoint.strict=false loads what fits and leaves the rest as initialized"
    shown, label = list_differences(lines), checkpoint.folder.label
    if strict and lines:
        raise ConfigError(f"{label} holds another model than this one:\n{shown}\n{advice}")
    return lines


def check_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint, strict: bool
) -> list[str]:
    """Compare the optimizer with the stored optimizer, and report each difference as `check_model`
    does. Settings such as lr are not compared, because the current configuration determines them.
    """
    lines = []
    stored = checkpoint.manifest.optimizer
    if not stored:
        lines.append("the checkpoint holds no optimizer state")
    else:
        kind, other = type(optimizer).__name__, stored.get("class")
        if kind != other:
            lines.append(f"optimizer {kind} here, {printable(other)} in the checkpoint")
        trained = set(trained_parameters(model, optimizer))
        before: set[str] = set()
        for group in stored.get("groups", []):
            before.update(group["parameters"])
        for name in sorted(trained - before):
            lines.append(f"{name}: trained here, not trained in the checkpoint")
        for name in sorted(before - trained):
            lines.append(f"{printable(name)}: trained in the checkpoint, not trained here")
    advice = (
        "checkpoint.load=model_only loads only the weights; checkpoint.strict=false loads what fits"
    )
    shown, label = list_differences(lines), checkpoint.folder.label
    if strict and lines:
        raise ConfigError(f"{label} holds another optimizer than this one:\n{shown}\n{advice}")
    return lines


def list_differences(lines: Sequence[str]) -> str:
    """Join the lines, indented. For a long list, show the first lines and the number of omitted
    lines."""
    shown = []
    for line in lines[:_SHOWN]:
        shown.append(f"  {line}")
    if len(lines) > _SHOWN:
        shown.append(f"  ... and {len(lines) - _SHOWN} more")
    return "\n".join(shown)


def stored_settings(
    model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint, wanted: bool
) -> list[Settings]:
    """Return the stored settings of each parameter group of ``optimizer``. If ``wanted`` is False,
    return only the counters among them. Raises `ConfigError` if a group has no unique match."""
    groups = checkpoint.manifest.optimizer.get("groups", [])
    stored = []
    for group in groups:
        stored.append((from_json(group.get("settings", {})), group["parameters"]))
    names = []
    for group in describe_optimizer(model, optimizer)["groups"]:
        names.append(group["parameters"])
    same_class = checkpoint.manifest.optimizer.get("class") == type(optimizer).__name__
    matched, problems = match_settings(
        optimizer, names, stored, wanted=wanted, same_class=same_class
    )
    if problems:
        raise ConfigError(f"{checkpoint.folder.label} does not fit: {'; '.join(problems)}")
    return matched


def fitting_name(name: str, tensor: Tensor, manifest: Manifest) -> str | None:
    """Return the name in a checkpoint of the model's tensor ``name``, with the same shape. A tied
    tensor may be stored under its first name. Returns None if the checkpoint has no such tensor."""
    source = f"model/{name}"
    if source not in manifest.tensors:
        source = f"model/{manifest.tied.get(name)}"
    stored = manifest.tensors.get(source)
    fits = stored is not None and stored.shape == tuple(tensor.shape)
    return source if fits else None


def names_under(prefixes: Iterable[str], names: Iterable[str]) -> list[str]:
    """Select the ``names`` that begin with one of the ``prefixes`` and a slash."""
    beginnings = tuple(f"{prefix}/" for prefix in prefixes)
    found: list[str] = []
    for name in names:
        if name.startswith(beginnings):
            found.append(name)
    return found


@torch.no_grad()
def load_model(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Load this rank's local shards of the parameters and persistent buffers of ``model`` in place.

    Values are converted to the dtype of the model; tensors without a match keep their values. No
    communication. Raises `DamagedCheckpointError` if a file does not match the manifest.
    """
    reshard(model)
    for name, tensor in model_tensors(model).items():
        source = fitting_name(name, tensor, checkpoint.manifest)
        if source is not None:
            checkpoint.fill(tensor, source)


@torch.no_grad()
def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint
) -> None:
    """Load the state of ``optimizer`` in place, and create missing state.

    Parameter groups keep their settings; a parameter without a match starts with fresh state. No
    communication. Raises as `load_model`.
    """
    stored = checkpoint.manifest.optimizer
    trained = trained_parameters(model, optimizer)
    # Without ``strict``, an optimizer of another class starts with fresh state, because a state key
    # can have a different meaning in another class.
    if stored.get("class") != type(optimizer).__name__:
        drop_state(optimizer, trained, {})
        return
    fitting = {}
    stored_as: dict[str, torch.dtype] = {}
    for name, parameter in trained.items():
        source = fitting_name(name, parameter, checkpoint.manifest)
        if source is not None:
            fitting[name] = parameter
            stored_as[name] = DTYPES[checkpoint.tensors[source].dtype]
    prefix = optimizer_prefix(model, checkpoint.tensors)
    scalars = from_json(stored.get("scalars", {}))
    keys = {name: set(scalars.get(name, ())) for name in fitting}
    stored_tensors = names_under([prefix], checkpoint.tensors)
    for full in stored_tensors:
        key, _, name = full.removeprefix(f"{prefix}/").partition("/")
        keys.get(name, set()).add(key)
    drop_state(optimizer, trained, keys)
    for full in stored_tensors:
        key, _, name = full.removeprefix(f"{prefix}/").partition("/")
        if name in fitting:
            state = optimizer.state[fitting[name]]
            entry = checkpoint.tensors[full]
            shape = torch.Size(entry.shape)
            if not isinstance(state.get(key), Tensor):
                dtype = DTYPES[entry.dtype]
                dtype = state_dtype(dtype, stored_as[name], fitting[name].dtype)
                state[key] = new_state_tensor(optimizer, fitting[name], key, shape, dtype)
            if shape != state[key].shape:
                here = list(state[key].shape)
                raise ConfigError(f"{full}: {here} here, {list(shape)} in the checkpoint")
            checkpoint.fill(state[key], full)
    for name in filter(fitting.__contains__, scalars):
        _set_scalars(optimizer.state[fitting[name]], scalars[name])


def _set_scalars(state: dict[str, Any], scalars: Mapping[str, Any]) -> None:
    for key, value in scalars.items():
        # Tensors are filled already; an entry of the same name in the checkpoint is ignored.
        if isinstance(value, SCALARS) and not isinstance(state.get(key), Tensor):
            state[key] = value


def shared_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of the outer optimizer, which is equal on all replicas; empty with
    ``sync=every_step``. Collective over the replicas, because a running outer exchange is completed
    first."""
    outer = outer_sync(model)
    if outer is None:
        return {}
    outer.receive()
    found = {STEPS: torch.tensor([outer.steps, outer.finished_after])}
    found |= _under("sync/momentum", outer.momenta)
    for name, parameter in outer.parameters.items():
        # A mean that was received, but is applied only at the end of the delay
        if parameter.mean is not None:
            found[f"sync/mean/{name}"] = parameter.mean
    return found


def replica_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Return the state that differs between replicas, for this replica. This state is often
    empty."""
    kept, outer = error_feedback_of(model), outer_sync(model)
    prefix = _prefix(kept.replica)
    found = _under(f"{prefix}/{kept.residual_name}", kept.residuals())
    if outer is None:
        return found
    own = {name: parameter.own_values for name, parameter in outer.parameters.items()}
    found |= _under(f"{prefix}/model", own)
    if optimizer is not None:
        found |= _under(f"{prefix}/optimizer", optimizer_tensors(model, optimizer))
    return found


def optimizer_prefix(model: nn.Module, names: Iterable[str]) -> str:
    """Return the prefix of the optimizer state that this rank loads, in a checkpoint with tensors
    of these ``names``: ``optimizer``, or the prefix of one replica."""
    available = _replicas_in(names, "optimizer")
    if not available:
        return "optimizer"
    outer = outer_sync(model)
    own = 0 if outer is None else outer.replica
    if own not in available:
        own = available[own % len(available)]
    return f"{_prefix(own)}/optimizer"


@torch.no_grad()
def load_replica_state(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Load the tensors of `shared_tensors` and `replica_tensors`, if ``checkpoint`` has them. Call
    it after loading the model and its optimizer. No communication."""
    # A single process does not need a process group.
    is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    _load_error_feedback(error_feedback_of(model), checkpoint, is_first)
    outer = outer_sync(model)
    if outer is None or STEPS not in checkpoint.tensors:
        return
    for name, momentum in outer.momenta.items():
        _fill_if_saved(momentum, f"sync/momentum/{name}", checkpoint)
    steps, finished_after = checkpoint.read(STEPS).tolist()
    arrived = set()
    for name in outer.parameters:
        if f"sync/mean/{name}" in checkpoint.tensors:
            arrived.add(name)
    for name in outer.resume(steps, finished_after, arrived):
        parameter = outer.parameters[name]
        parameter.mean = torch.zeros_like(parameter.outer, requires_grad=False)
        _fill_if_saved(parameter.mean, f"sync/mean/{name}", checkpoint)
    for name, parameter in outer.parameters.items():
        _fill_if_saved(parameter.own, f"{_prefix(outer.replica)}/model/{name}", checkpoint)
    if is_first:
        _report_lost(outer, checkpoint)


def _load_error_feedback(kept: UpdateFollower, checkpoint: Checkpoint, is_first: bool) -> None:
    """Load the error-feedback buffers, so that they have the same weight in the next mean as before
    the save.

    If the number of replicas is unchanged, each replica loads its own buffers. Otherwise each
    replica starts with the sum of all buffers in the checkpoint, divided by the number of replicas
    at the save.
    """
    saved = checkpoint.manifest.mesh.get("replicate", 1)
    available = _replicas_in(checkpoint.tensors, kept.residual_name)
    is_same = saved == kept.replicas
    taken = []
    for each in available:
        if not is_same or each == kept.replica:
            taken.append(each)
    for name, value in kept.residuals().items() if taken else ():
        total = torch.zeros_like(value)
        for replica in taken:
            part = torch.zeros_like(value)
            _fill_if_saved(part, f"{_prefix(replica)}/{kept.residual_name}/{name}", checkpoint)
            total += part
        kept.set_residual(name, total / (1 if is_same else saved))
    lost = sorted(set(range(saved)) - set(available))
    if is_first and available and lost:
        log.warning("the error feedback of the replicas %s is lost with them", lost)


def _report_lost(outer: OuterSync, checkpoint: Checkpoint) -> None:
    saved = checkpoint.manifest.mesh.get("replicate", 1)
    continued = _replicas_in(checkpoint.tensors, "model")[: outer.replicas]
    lost = sorted(set(range(saved)) - set(continued))
    if continued and lost:
        log.warning(
            "the replicas %s of the checkpoint are not continued: up to %d steps of each since "
            "they last shared their parameters are dropped",
            lost,
            outer.unshared_steps,
        )


def _prefix(replica: int) -> str:
    return f"replica/{replica:05d}"


def _replicas_in(names: Iterable[str], kind: str) -> list[int]:
    """Return the replicas with state of this ``kind`` among the ``names`` of a checkpoint's
    tensors, ascending."""
    found = set()
    # A checkpoint may contain any names.
    for name in names:
        found.update(re.findall(rf"^replica/([0-9]{{5}})/{kind}/", name))
    return sorted(map(int, found))


def _fill_if_saved(tensor: Tensor, name: str, checkpoint: Checkpoint) -> None:
    stored = checkpoint.tensors.get(name)
    if stored is not None and stored.shape == tuple(tensor.shape):
        checkpoint.fill(tensor, name)


def rng_tensors(rank: int) -> dict[str, Tensor]:
    """Return the states of the random generators by name ``rng/<rank>/<generator>``, as CPU
    tensors: torch on CPU, torch on the rank's accelerator, Python and NumPy."""
    version, words, gauss = random.getstate()
    found = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": _optional(gauss),
    }
    state: Any = numpy.random.get_state(legacy=False)
    if state["bit_generator"] == "MT19937":
        words = [*map(int, state["state"]["key"]), int(state["state"]["pos"])]
        found["numpy"] = torch.tensor(words, dtype=torch.int64)
        found["numpy_gauss"] = _optional(state["gauss"] if state["has_gauss"] else None)
    on_device = random_state(accelerator_type())
    if on_device is not None:
        found["accelerator"] = on_device
    tensors: dict[str, Tensor] = {}
    for name, tensor in found.items():
        tensors[f"rng/{rank:05d}/{name}"] = tensor
    return tensors


def _optional(value: float | None) -> Tensor:
    return torch.tensor([] if value is None else [value], dtype=torch.float64)


def restore_rng(rank: int, checkpoint: Checkpoint) -> None:
    """Restore this rank's random generators. Raises `DamagedCheckpointError` if a stored state is
    invalid."""
    prefix = f"rng/{rank:05d}/"
    what = f"{checkpoint.folder.label}: {prefix} is not the state of a random generator"
    names = names_under([f"rng/{rank:05d}"], checkpoint.tensors)
    found = {}
    for name in names:
        if math.prod(checkpoint.tensors[name].shape) > _LARGEST:
            raise DamagedCheckpointError(what)
        found[name.removeprefix(prefix)] = checkpoint.read(name)
    if not found:
        return
    try:
        torch.set_rng_state(found["torch"])
        version, *numbers = found["python"].tolist()
        random.setstate((version, tuple(numbers), _cached(found["python_gauss"])))
        # A rank without an accelerator has saved no accelerator state, and NumPy may use another
        # generator class.
        kind = accelerator_type()
        if "accelerator" in found and kind != "cpu":
            set_random_state(kind, found["accelerator"])
        if "numpy" in found:
            key, position = found["numpy"][:-1].numpy(), int(found["numpy"][-1])
            words = key.astype(numpy.uint32)
            # NumPy accepts any values. A word that the cast has changed does not fit in 32 bits.
            if len(key) != _TWISTER or (words != key).any() or not 0 <= position <= _TWISTER:
                raise ValueError("not the state of a Mersenne Twister")
            gauss = _cached(found["numpy_gauss"])
            state = ("MT19937", words, position, int(gauss is not None), gauss or 0.0)
            numpy.random.set_state(state)
    except (IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError):
        raise DamagedCheckpointError(what) from None


def _cached(gauss: Tensor) -> float | None:
    """Return the normal random number that a generator has cached for its next call, or None."""
    return float(gauss) if gauss.numel() else None
