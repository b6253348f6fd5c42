"""Names what is saved of a run, and loads it again: `saved_tensors`, `load_model`,
`load_optimizer`; random generators by `rng_tensors` and `restore_rng`.

Names are the same on every rank, layout and precision: ``model/<parameter or buffer>``,
``optimizer/<key>/<parameter>`` and ``rng/<rank>/<generator>``.

With replicas that train on their own (``sync=diloco``), ``model/`` holds the outer parameters, from
which every other layout continues, and ``sync/`` the outer optimizer's state. Each replica has its
parameters, its optimizer's state and what it did not send yet in ``replica/<number>/``; one that a
checkpoint does not have starts from the outer parameters, with the optimizer's state of another.
"""

from __future__ import annotations

import logging
import math
import random
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from parallel2d.base.errors import ConfigError
from parallel2d.base.files import printable
from parallel2d.base.files.tensor_file import DTYPES, DamagedCheckpointError
from parallel2d.parallel.sync.methods.diloco import OuterSync
from parallel2d.parallel.sync.updates import outer_sync
from parallel2d.parallel.weights.named_tensors import (
    SCALARS,
    describe_optimizer,
    model_tensors,
    optimizer_tensors,
    reshard,
    tied_names,
    trained_parameters,
)
from parallel2d.parallel.weights.optimizer_settings import Settings, match_settings
from parallel2d.parallel.weights.states import new_state_tensor
from parallel2d.training.checkpoint.manifest import Checkpoint

log = logging.getLogger(__name__)

STEPS = "sync/steps"
REPLICA = "replica/"  # what one replica alone has
_SHOWN = 20  # differences that a message lists in full
# Words of the state of NumPy's legacy generator, and bytes that no generator's state exceeds.
_TWISTER, _LARGEST = 624, 2**16


def saved_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Everything that all replicas share, by its name in the checkpoint, in the same order on every
    rank. Collective over the replicas with ``sync=diloco``."""
    found = {f"model/{name}": tensor for name, tensor in model_tensors(model).items()}
    found |= shared_tensors(model)
    # Replicas that train on their own have optimizers of their own: `replica_tensors`.
    if optimizer is not None and STEPS not in found:
        state = optimizer_tensors(model, optimizer)
        found |= {f"optimizer/{name}": tensor for name, tensor in state.items()}
    return found


def check_model(model: nn.Module, checkpoint: Checkpoint, strict: bool) -> list[str]:
    """One line per model tensor that the checkpoint and the model do not share by name and shape;
    raises `ConfigError` with all of them when there are any and ``strict``."""
    here, tied = model_tensors(model), tied_names(model)
    lines = []
    for name, tensor in here.items():
        source = _stored_name(name, checkpoint)
        if source is None:
            lines.append(f"{name}: {list(tensor.shape)} in the model, not in the checkpoint")
            continue
        shape = checkpoint.tensors[source].shape
        if shape != tuple(tensor.shape):
            lines.append(
                f"{name}: {list(tensor.shape)} in the model, {list(shape)} in the checkpoint"
            )
    for full, stored in sorted(checkpoint.tensors.items()):
        kind, _, name = full.partition("/")
        if kind == "model" and name not in here and name not in tied:
            lines.append(
                f"{printable(name)}: {list(stored.shape)} in the checkpoint, not in the model"
            )
    if strict and lines:
        raise ConfigError(
            f"{checkpoint.folder.label} holds another model than this one:\n"
            f"{list_differences(lines)}\n"
            "checkpoint.strict=false loads what fits and leaves the rest as initialized"
        )
    return lines


def check_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint, strict: bool
) -> list[str]:
    """One line per way in which the stored optimizer does not fit this one; raises `ConfigError`
    with all of them when there are any and ``strict``. Settings such as lr are no difference: those
    of the running configuration hold."""
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
        for group in _stored_groups(checkpoint):
            before.update(group["parameters"])
        for name in sorted(trained - before):
            lines.append(f"{name}: trained here, not trained in the checkpoint")
        for name in sorted(before - trained):
            lines.append(f"{printable(name)}: trained in the checkpoint, not trained here")
    if strict and lines:
        raise ConfigError(
            f"{checkpoint.folder.label} holds another optimizer than this one:\n"
            f"{list_differences(lines)}\n"
            "checkpoint.load=model_only takes the weights alone; checkpoint.strict=false loads "
            "what fits"
        )
    return lines


def list_differences(lines: Sequence[str]) -> str:
    """The lines, indented, the rest counted when there are many."""
    shown = [f"  {line}" for line in lines[:_SHOWN]]
    if len(lines) > _SHOWN:
        shown.append(f"  ... and {len(lines) - _SHOWN} more")
    return "\n".join(shown)


def _stored_groups(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    label = checkpoint.folder.label
    groups = checkpoint.manifest.optimizer.get("groups")
    if not isinstance(groups, list):
        raise DamagedCheckpointError(f"{label}: the optimizer's groups are no list")
    for group in groups:
        listed = group.get("parameters") if isinstance(group, dict) else None
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            raise DamagedCheckpointError(
                f"{label}: the optimizer's groups do not list parameter names"
            )
    return groups


def stored_settings(
    model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint
) -> list[Settings]:
    """The stored settings of each parameter group of ``optimizer``. Raises `ConfigError` when they
    are not unique."""
    stored = []
    for group in _stored_groups(checkpoint):
        settings = group.get("settings", {})
        if not isinstance(settings, dict):
            raise DamagedCheckpointError(
                f"{checkpoint.folder.label}: the settings of the optimizer's groups are no mapping"
            )
        stored.append((settings, group["parameters"]))
    names = [group["parameters"] for group in describe_optimizer(model, optimizer)["groups"]]
    matched, problems = match_settings(optimizer, names, stored)
    if problems:
        raise ConfigError(f"{checkpoint.folder.label} does not fit: {'; '.join(problems)}")
    return matched


def _stored_name(name: str, checkpoint: Checkpoint) -> str | None:
    """Where the checkpoint keeps a tensor of the model: as itself, or as one it was tied to."""
    if f"model/{name}" in checkpoint.tensors:
        return f"model/{name}"
    other = checkpoint.manifest.tied.get(name)
    return f"model/{other}" if other is not None else None


def _fitting_name(name: str, tensor: Tensor, checkpoint: Checkpoint) -> str | None:
    source = _stored_name(name, checkpoint)
    if source is None or checkpoint.tensors[source].shape != tuple(tensor.shape):
        return None
    return source


@torch.no_grad()
def load_model(model: nn.Module, checkpoint: Checkpoint, strict: bool) -> list[str]:
    """Fills the parameters and persistent buffers of ``model`` in place, this rank's part of each,
    converted to the dtype they have here; no communication. Returns the differences that were
    passed over.

    Raises `ConfigError` with every difference when there are any and ``strict``,
    `DamagedCheckpointError` when a file does not match the manifest.
    """
    reshard(model)
    differences = check_model(model, checkpoint, strict)
    for name, tensor in model_tensors(model).items():
        source = _fitting_name(name, tensor, checkpoint)
        if source is not None:
            checkpoint.fill(tensor, source)
    return differences


@torch.no_grad()
def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint, strict: bool
) -> list[str]:
    """Fills the state of ``optimizer`` in place, creating it where it does not exist yet; no
    communication. Parameter groups keep their settings. Returns the differences that were passed
    over; a parameter that differs starts with fresh state. Raises as `load_model`.
    """
    differences = check_optimizer(model, optimizer, checkpoint, strict)
    stored = checkpoint.manifest.optimizer
    # Without ``strict`` another optimizer starts anew: its state means something else.
    if stored.get("class") != type(optimizer).__name__:
        return differences
    prefix = optimizer_prefix(model, checkpoint.tensors)
    keys = _keys_by_name(prefix, checkpoint)
    # A checkpoint may hold anything.
    scalars: Any = stored.get("scalars")
    for name, parameter in trained_parameters(model, optimizer).items():
        plain = scalars.get(name) if isinstance(scalars, dict) else None
        if _fitting_name(name, parameter, checkpoint) is None or not (name in keys or plain):
            continue
        state = optimizer.state[parameter]
        for key in keys.get(name, []):
            full = f"{prefix}/{key}/{name}"
            entry = checkpoint.tensors[full]
            shape = torch.Size(entry.shape)
            if not isinstance(state.get(key), Tensor):
                state[key] = new_state_tensor(optimizer, parameter, key, shape, DTYPES[entry.dtype])
            if shape != state[key].shape:
                here = list(state[key].shape)
                raise ConfigError(f"{full}: {here} here, {list(shape)} in the checkpoint")
            checkpoint.fill(state[key], full)
        if isinstance(plain, dict):
            _take_scalars(state, plain)
    return differences


def _keys_by_name(prefix: str, checkpoint: Checkpoint) -> dict[str, list[str]]:
    keys: dict[str, list[str]] = {}
    for full in checkpoint.tensors:
        if full.startswith(f"{prefix}/"):
            key, _, name = full.removeprefix(f"{prefix}/").partition("/")
            keys.setdefault(name, []).append(key)
    return keys


def _take_scalars(state: dict[str, Any], plain: dict[str, Any]) -> None:
    for key, value in plain.items():
        if isinstance(value, SCALARS) and not isinstance(state.get(key), Tensor):
            state[key] = value


def shared_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What all replicas have of the outer optimizer; empty with ``sync=every_step``. Collective
    over the replicas: what is on its way between them is received first."""
    outer = outer_sync(model)
    if outer is None:
        return {}
    outer.receive()
    found = {STEPS: torch.tensor([outer.steps, outer.finished_after])}
    found |= {f"sync/momentum/{name}": momentum for name, momentum in outer.momenta.items()}
    for name, parameter in outer.parameters.items():
        # Received, and applied when the delay is over.
        if parameter.mean is not None:
            found[f"sync/mean/{name}"] = parameter.mean
    return found


def replica_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """What this replica alone has; empty with ``sync=every_step``."""
    outer = outer_sync(model)
    if outer is None:
        return {}
    prefix = _prefix(outer.replica)
    found: dict[str, Tensor] = {}
    for name, parameter in outer.parameters.items():
        found[f"{prefix}/model/{name}"] = parameter.own_values
        if parameter.residual is not None:
            found[f"{prefix}/residual/{name}"] = parameter.residual
    if optimizer is not None:
        state = optimizer_tensors(model, optimizer)
        found |= {f"{prefix}/optimizer/{name}": tensor for name, tensor in state.items()}
    return found


def optimizer_prefix(model: nn.Module, names: Iterable[str]) -> str:
    """Where a checkpoint with tensors of these ``names`` keeps the optimizer's state that this rank
    goes on from: ``optimizer``, or that of a replica."""
    available = _replicas_in(names)
    if not available:
        return "optimizer"
    outer = outer_sync(model)
    own = 0 if outer is None else outer.replica
    if own not in available:
        own = available[own % len(available)]
    return f"{_prefix(own)}/optimizer"


def needed_names(model: nn.Module, names: Iterable[str]) -> list[str]:
    """The ``names`` that `load_replica_state` and the optimizer's loading read on this rank."""
    names = list(names)
    prefixes = [optimizer_prefix(model, names)]
    outer = outer_sync(model)
    if outer is not None:
        available = _replicas_in(names)
        prefixes += ["sync", f"{_prefix(outer.replica)}/model"]
        # The residuals of all replicas are read where their number has changed.
        if len(available) == outer.replicas:
            available = [outer.replica]
        prefixes += [f"{_prefix(each)}/residual" for each in available]
    return [name for name in names if name.startswith(tuple(f"{each}/" for each in prefixes))]


@torch.no_grad()
def load_replica_state(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Fills what `shared_tensors` and `replica_tensors` list, as far as ``checkpoint`` has it; the
    model and its optimizer have been loaded. No communication."""
    outer = outer_sync(model)
    if outer is None or STEPS not in checkpoint.tensors:
        return
    for name, momentum in outer.momenta.items():
        _fill_if_there(momentum, f"sync/momentum/{name}", checkpoint)
    steps, finished_after = checkpoint.read(STEPS).tolist()
    arrived = {name for name in outer.parameters if f"sync/mean/{name}" in checkpoint.tensors}
    for name in outer.resume(steps, finished_after, arrived):
        parameter = outer.parameters[name]
        parameter.mean = torch.zeros_like(parameter.outer, requires_grad=False)
        _fill_if_there(parameter.mean, f"sync/mean/{name}", checkpoint)
    before = _replicas_in(checkpoint.tensors)
    prefix = _prefix(outer.replica)
    for name, parameter in outer.parameters.items():
        _fill_if_there(parameter.own, f"{prefix}/model/{name}", checkpoint)
        if parameter.residual is None:
            continue
        stored = [f"{_prefix(each)}/residual/{name}" for each in before]
        if len(before) == outer.replicas:
            stored = [f"{prefix}/residual/{name}"]
        _fill_with_mean(parameter.residual, stored, checkpoint)
    _report_lost(outer, checkpoint.manifest.mesh.get("replicate", 1), before)


def _report_lost(outer: OuterSync, saved: int, available: list[int]) -> None:
    lost = [number for number in range(saved) if number not in available[: outer.replicas]]
    if lost and torch.distributed.get_rank() == 0:
        since = max(outer.steps - fragment.sent_after for fragment in outer.fragments)
        log.warning(
            "the replicas %s of the checkpoint are not continued: up to %d steps of each since "
            "they last shared their parameters are dropped",
            lost,
            since,
        )


def _prefix(replica: int) -> str:
    return f"{REPLICA}{replica:05d}"


def _replicas_in(names: Iterable[str]) -> list[int]:
    """The replicas whose state a checkpoint with tensors of these ``names`` has, ascending."""
    found = set()
    # A checkpoint may hold any names.
    for name in names:
        found.update(re.findall(r"^replica/([0-9]{5})/", name))
    return sorted(map(int, found))


def _fill_if_there(tensor: Tensor, name: str, checkpoint: Checkpoint) -> None:
    stored = checkpoint.tensors.get(name)
    if stored is not None and stored.shape == tuple(tensor.shape):
        checkpoint.fill(tensor, name)


def _fill_with_mean(tensor: Tensor, names: list[str], checkpoint: Checkpoint) -> None:
    """Fills ``tensor`` with the mean of what is stored under ``names``: what replicas did not send
    counts as much for the shared parameters as before."""
    total = torch.zeros_like(tensor)
    for name in names:
        part = torch.zeros_like(tensor)
        _fill_if_there(part, name, checkpoint)
        total += part
    tensor.copy_(total / max(len(names), 1))


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
    if torch.cuda.is_available():
        found["accelerator"] = torch.cuda.get_rng_state().cpu()
    return {f"rng/{rank:05d}/{name}": tensor for name, tensor in found.items()}


def _optional(value: float | None) -> Tensor:
    return torch.tensor([] if value is None else [value], dtype=torch.float64)


def restore_rng(rank: int, checkpoint: Checkpoint) -> None:
    """Sets this rank's generators. Raises `DamagedCheckpointError` when a stored state cannot be
    one."""
    prefix = f"rng/{rank:05d}/"
    what = f"{checkpoint.folder.label}: {prefix} is no state of a random generator"
    found: dict[str, Tensor] = {}
    for name, stored in checkpoint.tensors.items():
        if name.startswith(prefix):
            if math.prod(stored.shape) > _LARGEST:
                raise DamagedCheckpointError(what)
            found[name.removeprefix(prefix)] = checkpoint.read(name)
    try:
        if "torch" in found:
            torch.set_rng_state(found["torch"])
        if "accelerator" in found and torch.cuda.is_available():
            torch.cuda.set_rng_state(found["accelerator"])
        if "python" in found:
            version, *words = found["python"].tolist()
            random.setstate((version, tuple(words), _cached(found["python_gauss"])))
        if "numpy" in found:
            _restore_numpy(found["numpy"].tolist(), _cached(found["numpy_gauss"]))
    except (KeyError, OverflowError, RuntimeError, TypeError, ValueError):
        raise DamagedCheckpointError(what) from None


def _cached(gauss: Tensor) -> float | None:
    return float(gauss) if gauss.numel() else None


def _restore_numpy(words: list[int], gauss: float | None) -> None:
    *key, position = words
    # NumPy sets what it is given.
    are_words = len(key) == _TWISTER and all(0 <= word < 2**32 for word in key)
    if not are_words or not 0 <= position <= _TWISTER:
        raise ValueError("no state of a Mersenne Twister")
    array = numpy.array(key, numpy.uint32)
    numpy.random.set_state(("MT19937", array, position, int(gauss is not None), gauss or 0.0))
