"""Names what is saved of a model and an optimizer, and loads it again: `saved_tensors`,
`load_model`, `load_optimizer`.

Names are canonical, the same on every rank, layout and precision: ``model/<parameter or buffer>``
and ``optimizer/<key>/<parameter>``. Loading fills this rank's parts in place. Where what is stored
differs from what is here, every difference is listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parallel2d.checkpoint.archive import Checkpoint
from parallel2d.checkpoint.replica_state import STEPS, optimizer_prefix, shared_tensors
from parallel2d.errors import ConfigError
from parallel2d.files.tensor_file import DTYPES, DamagedCheckpointError, printable
from parallel2d.weights.named_tensors import (
    SCALARS,
    describe_optimizer,
    model_tensors,
    optimizer_tensors,
    reshard,
    tied_names,
    trained_parameters,
)
from parallel2d.weights.optimizer_settings import Settings, match_settings

SHOWN = 20  # differences that a message lists in full


def saved_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Everything that all replicas share, by its name in the checkpoint, in the same order on every
    rank. Collective over the replicas with ``sync=diloco``."""
    found = {f"model/{name}": tensor for name, tensor in model_tensors(model).items()}
    found |= shared_tensors(model)
    # Replicas that train on their own have optimizers of their own: `replica_tensors`.
    if optimizer is not None and STEPS not in found:
        found |= {
            f"optimizer/{name}": tensor
            for name, tensor in optimizer_tensors(model, optimizer).items()
        }
    return found


def model_differences(model: nn.Module, checkpoint: Checkpoint) -> list[str]:
    """One line per model tensor that the checkpoint and the model do not share by name and
    shape."""
    here, tied = model_tensors(model), tied_names(model)
    stored = {
        name.removeprefix("model/") for name in checkpoint.tensors if name.startswith("model/")
    }
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
    for name in sorted(stored - set(here) - set(tied)):
        shape = checkpoint.tensors[f"model/{name}"].shape
        lines.append(f"{printable(name)}: {list(shape)} in the checkpoint, not in the model")
    return lines


def optimizer_differences(
    model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint
) -> list[str]:
    """One line per way in which the stored optimizer does not fit this one. Settings such as lr are
    no difference: those of the running configuration hold."""
    stored = checkpoint.manifest.optimizer
    if not stored:
        return ["the checkpoint holds no optimizer state"]
    lines = []
    if stored.get("class") != type(optimizer).__name__:
        lines.append(
            f"optimizer {type(optimizer).__name__} here, {printable(stored.get('class'))} in the "
            "checkpoint"
        )
    trained = set(trained_parameters(model, optimizer))
    before = set(_stored_parameters(checkpoint))
    for name in sorted(trained - before):
        lines.append(f"{name}: trained here, not trained in the checkpoint")
    for name in sorted(before - trained):
        lines.append(f"{printable(name)}: trained in the checkpoint, not trained here")
    return lines


def _stored_parameters(checkpoint: Checkpoint) -> list[str]:
    groups = checkpoint.manifest.optimizer.get("groups")
    names: list[str] = []
    if not isinstance(groups, list):
        raise DamagedCheckpointError(
            f"{checkpoint.folder.label}: the optimizer's groups are no list"
        )
    for group in groups:
        listed = group.get("parameters") if isinstance(group, dict) else None
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            raise DamagedCheckpointError(
                f"{checkpoint.folder.label}: the optimizer's groups do not list parameter names"
            )
        names += listed
    return names


def stored_settings(
    model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint
) -> list[Settings]:
    """The stored settings of each parameter group of ``optimizer``. Raises `ConfigError` when they
    are not unique."""
    _stored_parameters(checkpoint)  # the groups are a list of dicts that list parameters
    stored = [
        (group.get("settings", {}), group["parameters"])
        for group in checkpoint.manifest.optimizer["groups"]
    ]
    if not all(isinstance(settings, dict) for settings, _ in stored):
        raise DamagedCheckpointError(
            f"{checkpoint.folder.label}: the settings of the optimizer's groups are no mapping"
        )
    names = [group["parameters"] for group in describe_optimizer(model, optimizer)["groups"]]
    settings, problems = match_settings(optimizer, names, stored)
    if problems:
        raise ConfigError(f"{checkpoint.folder.label} does not fit: {'; '.join(problems)}")
    return settings


def list_differences(lines: Sequence[str]) -> str:
    """The lines, indented, the rest counted when there are many."""
    shown = [f"  {line}" for line in lines[:SHOWN]]
    if len(lines) > SHOWN:
        shown.append(f"  ... and {len(lines) - SHOWN} more")
    return "\n".join(shown)


def _stored_name(name: str, checkpoint: Checkpoint) -> str | None:
    """Where the checkpoint keeps the model tensor ``name``: under its own name or that of one it
    was tied to."""
    if f"model/{name}" in checkpoint.tensors:
        return f"model/{name}"
    other = checkpoint.manifest.tied.get(name)
    return f"model/{other}" if other is not None else None


def check_model(model: nn.Module, checkpoint: Checkpoint, strict: bool) -> list[str]:
    """`model_differences`; raises `ConfigError` with all of them when there are any and
    ``strict``."""
    differences = model_differences(model, checkpoint)
    if strict and differences:
        raise ConfigError(
            f"{checkpoint.folder.label} holds another model than this one:\n"
            f"{list_differences(differences)}\n"
            "checkpoint.strict=false loads what fits and leaves the rest as initialized"
        )
    return differences


def check_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint, strict: bool = True
) -> list[str]:
    """`optimizer_differences`; raises `ConfigError` with all of them when there are any and
    ``strict``."""
    differences = optimizer_differences(model, optimizer, checkpoint)
    if strict and differences:
        raise ConfigError(
            f"{checkpoint.folder.label} holds another optimizer than this one:\n"
            f"{list_differences(differences)}\n"
            "checkpoint.load=model_only takes the weights alone; checkpoint.strict=false loads "
            "what fits"
        )
    return differences


@torch.no_grad()
def load_model(model: nn.Module, checkpoint: Checkpoint, strict: bool) -> list[str]:
    """Fills the parameters and persistent buffers of ``model`` in place, this rank's part of each;
    no communication.

    Values are converted to the dtype they have here. Returns the differences that were passed over.

    Raises:
        ConfigError: ``strict`` and names or shapes differ; every difference is listed.
        DamagedCheckpointError: a file does not match the manifest.
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
    communication.

    Parameter groups keep their settings. Returns the differences that were passed over; a parameter
    that differs starts with fresh state.

    Raises:
        ConfigError: ``strict`` and the optimizer's class or its parameters differ; every difference
            is listed.
        DamagedCheckpointError: a file does not match the manifest.
    """
    differences = check_optimizer(model, optimizer, checkpoint, strict)
    stored = checkpoint.manifest.optimizer
    # Without ``strict`` another optimizer starts anew: its state means something else.
    if stored.get("class") != type(optimizer).__name__:
        return differences
    prefix = optimizer_prefix(model, checkpoint.tensors)
    keys = _keys_by_name(prefix, checkpoint)
    scalars = stored.get("scalars")
    if not isinstance(scalars, dict):
        scalars = {}
    group_of: dict[int, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        group_of |= {id(parameter): group for parameter in group["params"]}
    for name, parameter in trained_parameters(model, optimizer).items():
        plain = scalars.get(name)
        if _fitting_name(name, parameter, checkpoint) is None or not (name in keys or plain):
            continue
        state = optimizer.state[parameter]
        for key in keys.get(name, []):
            full = f"{prefix}/{key}/{name}"
            # Before its first step an optimizer has no state.
            if not isinstance(state.get(key), Tensor):
                state[key] = _new_state(full, key, parameter, group_of[id(parameter)], checkpoint)
            _fill_state(state[key], full, checkpoint)
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


def _fitting_name(name: str, tensor: Tensor, checkpoint: Checkpoint) -> str | None:
    """`_stored_name`, where what is stored has the shape of ``tensor``."""
    source = _stored_name(name, checkpoint)
    if source is None or checkpoint.tensors[source].shape != tuple(tensor.shape):
        return None
    return source


def _fill_state(tensor: Tensor, full: str, checkpoint: Checkpoint) -> None:
    shape = checkpoint.tensors[full].shape
    if shape != tuple(tensor.shape):
        raise ConfigError(f"{full}: {list(tensor.shape)} here, {list(shape)} in the checkpoint")
    checkpoint.fill(tensor, full)


def _take_scalars(state: dict[str, Any], plain: dict[str, Any]) -> None:
    """Sets the state that is not tensors, where a checkpoint may hold anything."""
    for key, value in plain.items():
        if isinstance(value, SCALARS) and not isinstance(state.get(key), Tensor):
            state[key] = value


def _new_state(
    full: str, key: str, parameter: Tensor, group: dict[str, Any], checkpoint: Checkpoint
) -> Tensor:
    """An empty tensor as the optimizer itself would make it: like the parameter, or a scalar beside
    it.

    A fused or capturable optimizer keeps its step count on the parameter's device, any other on
    CPU.
    """
    stored = checkpoint.tensors[full]
    if stored.shape == tuple(parameter.shape) and key != "step":
        return torch.zeros_like(parameter, memory_format=torch.preserve_format)
    if stored.shape != () and stored.shape != (1,):
        raise ConfigError(
            f"{full} of shape {list(stored.shape)}: how it is split is unknown before the first "
            "step"
        )
    on_device = group.get("fused") or group.get("capturable")
    return torch.zeros(
        stored.shape, dtype=DTYPES[stored.dtype], device=parameter.device if on_device else "cpu"
    )
