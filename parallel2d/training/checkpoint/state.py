"""Names what is saved of a run, and loads it again: `saved_tensors`, `load_model`,
`load_optimizer`; random generators by `rng_tensors` and `restore_rng`.

Names are the same on every rank, layout and precision: ``model/<parameter or buffer>``,
``ema/<parameter>``, ``optimizer/<key>/<parameter>`` and ``rng/<rank>/<generator>``.

With replicas that train on their own (``sync=diloco``), ``model/`` holds the outer parameters, from
which every other layout continues, and ``sync/`` the outer optimizer's state. Each replica has its
parameters and its optimizer's state in ``replica/<number>/``; one that a checkpoint does not have
starts from the outer parameters, with the optimizer's state of another. What a replica did not send
yet is there too, with every method that keeps it.
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
from parallel2d.training.checkpoint.manifest import Checkpoint, Manifest, from_json

log = logging.getLogger(__name__)

STEPS = "sync/steps"
_SHOWN = 20  # differences that a message lists in full
# Words of the state of NumPy's legacy generator, and bytes that no generator's state exceeds.
_TWISTER, _LARGEST = 624, 2**16


def saved_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Everything that all replicas share, by its name in the checkpoint, in the same order on every
    rank. Collective over the replicas with ``sync=diloco``."""
    found = _under("model", model_tensors(model)) | shared_tensors(model)
    if (average := ema_of(model)) is not None:
        found |= _under("ema", average.values)
    # Replicas that train on their own have optimizers of their own: `replica_tensors`.
    if optimizer is not None and STEPS not in found:
        found |= _under("optimizer", optimizer_tensors(model, optimizer))
    return found


def load_ema(model: nn.Module, checkpoint: Checkpoint, *, restart: bool) -> None:
    """Fills the averages; with ``restart`` they begin with the weights, which have been loaded, as
    do those that ``checkpoint`` does not have. No communication."""
    average = ema_of(model)
    if average is None:
        return
    average.update(0.0)
    for name in () if restart else average.values:
        _fill_if_saved(average.values[name], f"ema/{name}", checkpoint)


def buffer_names(model: nn.Module) -> list[str]:
    """Lists the persistent buffers among the `model_tensors`."""
    buffers = set(map(id, model.buffers()))
    return [name for name, tensor in model_tensors(model).items() if id(tensor) in buffers]


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def check_model(model: nn.Module, checkpoint: Checkpoint, strict: bool) -> list[str]:
    """One line per model tensor that the checkpoint and the model do not share by name and shape;
    raises `ConfigError` with all of them when there are any and ``strict``."""
    here = {name: list(tensor.shape) for name, tensor in model_tensors(model).items()}
    names = names_under(["model"], checkpoint.tensors)
    stored = {name.removeprefix("model/"): list(checkpoint.tensors[name].shape) for name in names}
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
    """As `check_model`, one line per way in which the stored optimizer does not fit this one.
    Settings such as lr are no difference: those of the running configuration hold."""
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
        "checkpoint.load=model_only takes the weights alone; checkpoint.strict=false loads what "
        "fits"
    )
    shown, label = list_differences(lines), checkpoint.folder.label
    if strict and lines:
        raise ConfigError(f"{label} holds another optimizer than this one:\n{shown}\n{advice}")
    return lines


def list_differences(lines: Sequence[str]) -> str:
    """The lines, indented, the rest counted when there are many."""
    shown = [f"  {line}" for line in lines[:_SHOWN]]
    if len(lines) > _SHOWN:
        shown.append(f"  ... and {len(lines) - _SHOWN} more")
    return "\n".join(shown)


def stored_settings(
    model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint, wanted: bool
) -> list[Settings]:
    """The stored settings of each parameter group of ``optimizer``, or, where these are not
    ``wanted``, its counters alone. Raises `ConfigError` when they are not unique."""
    groups = checkpoint.manifest.optimizer.get("groups", [])
    stored = [(from_json(group.get("settings", {})), group["parameters"]) for group in groups]
    names = [group["parameters"] for group in describe_optimizer(model, optimizer)["groups"]]
    same_class = checkpoint.manifest.optimizer.get("class") == type(optimizer).__name__
    matched, problems = match_settings(
        optimizer, names, stored, wanted=wanted, same_class=same_class
    )
    if problems:
        raise ConfigError(f"{checkpoint.folder.label} does not fit: {'; '.join(problems)}")
    return matched


def fitting_name(name: str, tensor: Tensor, manifest: Manifest) -> str | None:
    """Finds a tensor of the model in a checkpoint, in the same shape: under its own name, or under
    the one that it was tied to. None: nowhere."""
    source = f"model/{name}"
    if source not in manifest.tensors:
        source = f"model/{manifest.tied.get(name)}"
    stored = manifest.tensors.get(source)
    fits = stored is not None and stored.shape == tuple(tensor.shape)
    return source if fits else None


def names_under(prefixes: Iterable[str], names: Iterable[str]) -> list[str]:
    """Selects the ``names`` that begin with one of the ``prefixes`` and a slash."""
    beginnings = tuple(f"{prefix}/" for prefix in prefixes)
    return [name for name in names if name.startswith(beginnings)]


@torch.no_grad()
def load_model(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Fills the parameters and persistent buffers of ``model`` in place, this rank's part of each,
    converted to the dtype they have here, as far as they fit; no communication. Raises
    `DamagedCheckpointError` when a file does not match the manifest."""
    reshard(model)
    for name, tensor in model_tensors(model).items():
        source = fitting_name(name, tensor, checkpoint.manifest)
        if source is not None:
            checkpoint.fill(tensor, source)


@torch.no_grad()
def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint
) -> None:
    """Fills the state of ``optimizer`` in place, creating it where it does not exist yet; no
    communication. Parameter groups keep their settings; a parameter that differs starts with fresh
    state. Raises as `load_model`."""
    stored = checkpoint.manifest.optimizer
    trained = trained_parameters(model, optimizer)
    # Without ``strict`` another optimizer starts without state: its state means something else.
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
        # Tensors were filled before, whatever else a checkpoint has for them.
        if isinstance(value, SCALARS) and not isinstance(state.get(key), Tensor):
            state[key] = value


def shared_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Lists what all replicas have of the outer optimizer; empty with ``sync=every_step``.
    Collective over the replicas: what is on its way between them is received first."""
    outer = outer_sync(model)
    if outer is None:
        return {}
    outer.receive()
    found = {STEPS: torch.tensor([outer.steps, outer.finished_after])}
    found |= _under("sync/momentum", outer.momenta)
    for name, parameter in outer.parameters.items():
        # Received, and applied when the delay is over.
        if parameter.mean is not None:
            found[f"sync/mean/{name}"] = parameter.mean
    return found


def replica_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Lists what this replica alone has; empty where all replicas have the same."""
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
    """Tells where a checkpoint with tensors of these ``names`` has the optimizer's state that this
    rank goes on from: ``optimizer``, or that of a replica."""
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
    """Fills what `shared_tensors` and `replica_tensors` list, as far as ``checkpoint`` has it; the
    model and its optimizer have been loaded. No communication."""
    # A single process needs no process group.
    is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    _load_error_feedback(error_feedback_of(model), checkpoint, is_first)
    outer = outer_sync(model)
    if outer is None or STEPS not in checkpoint.tensors:
        return
    for name, momentum in outer.momenta.items():
        _fill_if_saved(momentum, f"sync/momentum/{name}", checkpoint)
    steps, finished_after = checkpoint.read(STEPS).tolist()
    arrived = {name for name in outer.parameters if f"sync/mean/{name}" in checkpoint.tensors}
    for name in outer.resume(steps, finished_after, arrived):
        parameter = outer.parameters[name]
        parameter.mean = torch.zeros_like(parameter.outer, requires_grad=False)
        _fill_if_saved(parameter.mean, f"sync/mean/{name}", checkpoint)
    for name, parameter in outer.parameters.items():
        _fill_if_saved(parameter.own, f"{_prefix(outer.replica)}/model/{name}", checkpoint)
    if is_first:
        _report_lost(outer, checkpoint)


def _load_error_feedback(kept: UpdateFollower, checkpoint: Checkpoint, is_first: bool) -> None:
    """What replicas did not send counts as much for the next mean as before: a replica goes on from
    its own, or where the number of replicas has changed from a share of all that there are."""
    saved = checkpoint.manifest.mesh.get("replicate", 1)
    available = _replicas_in(checkpoint.tensors, kept.residual_name)
    is_same = saved == kept.replicas
    taken = [each for each in available if not is_same or each == kept.replica]
    for name, value in kept.residuals().items() if taken else ():
        total = torch.zeros_like(value)
        for replica in taken:
            part = torch.zeros_like(value)
            _fill_if_saved(part, f"{_prefix(replica)}/{kept.residual_name}/{name}", checkpoint)
            total += part
        kept.set_residual(name, total / (1 if is_same else saved))
    lost = sorted(set(range(saved)) - set(available))
    if is_first and available and lost:
        log.warning("what the replicas %s had not sent yet is lost with them", lost)


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
    """The replicas of whose ``kind`` of state a checkpoint with tensors of these ``names`` has any,
    ascending."""
    found = set()
    # A checkpoint may hold any names.
    for name in names:
        found.update(re.findall(rf"^replica/([0-9]{{5}})/{kind}/", name))
    return sorted(map(int, found))


def _fill_if_saved(tensor: Tensor, name: str, checkpoint: Checkpoint) -> None:
    stored = checkpoint.tensors.get(name)
    if stored is not None and stored.shape == tuple(tensor.shape):
        checkpoint.fill(tensor, name)


def rng_tensors(rank: int) -> dict[str, Tensor]:
    """``rng/<rank>/<generator>`` -> state, all on CPU: torch's on CPU and on the rank's
    accelerator, Python's and NumPy's."""
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
    return {f"rng/{rank:05d}/{name}": tensor for name, tensor in found.items()}


def _optional(value: float | None) -> Tensor:
    return torch.tensor([] if value is None else [value], dtype=torch.float64)


def restore_rng(rank: int, checkpoint: Checkpoint) -> None:
    """Sets this rank's generators. Raises `DamagedCheckpointError` when a stored state cannot be
    one."""
    prefix = f"rng/{rank:05d}/"
    what = f"{checkpoint.folder.label}: {prefix} is no state of a random generator"
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
        # A rank without an accelerator has saved none, and NumPy may have another generator.
        kind = accelerator_type()
        if "accelerator" in found and kind != "cpu":
            set_random_state(kind, found["accelerator"])
        if "numpy" in found:
            key, position = found["numpy"][:-1].numpy(), int(found["numpy"][-1])
            words = key.astype(numpy.uint32)
            # NumPy sets what it is given. A word that the cast has changed is none of 32 bits.
            if len(key) != _TWISTER or (words != key).any() or not 0 <= position <= _TWISTER:
                raise ValueError("no state of a Mersenne Twister")
            gauss = _cached(found["numpy_gauss"])
            state = ("MT19937", words, position, int(gauss is not None), gauss or 0.0)
            numpy.random.set_state(state)
    except (IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError):
        raise DamagedCheckpointError(what) from None


def _cached(gauss: Tensor) -> float | None:
    """The normal number that a generator has drawn and not given out yet."""
    return float(gauss) if gauss.numel() else None
