"""`Resume.run` chooses, verifies and loads the checkpoint from which a run starts. All ranks load
the same checkpoint.

Candidates are the checkpoints in the run's store, its in-memory checkpoints, and the path in
``checkpoint.resume``. Rank 0 chooses a checkpoint and broadcasts its manifest. Each file is
verified by one rank.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from parallel2d.base.config import CheckpointConfig
from parallel2d.base.errors import ConfigError
from parallel2d.base.files.folder import is_remote, open_folder
from parallel2d.base.files.tensor_file import DamagedCheckpointError
from parallel2d.parallel.sync.ema import ema_of
from parallel2d.parallel.weights.named_tensors import masters_were_loaded
from parallel2d.parallel.weights.optimizer_settings import Settings, put_settings
from parallel2d.training.checkpoint.in_memory import InMemoryCheckpoints
from parallel2d.training.checkpoint.manifest import MANIFEST, MAX_BYTES, Manifest, from_json
from parallel2d.training.checkpoint.reader import Checkpoint
from parallel2d.training.checkpoint.save import Group
from parallel2d.training.checkpoint.state import (
    check_model,
    check_optimizer,
    list_differences,
    load_ema,
    load_model,
    load_optimizer,
    load_replica_state,
    names_under,
    restore_rng,
    stored_settings,
)
from parallel2d.training.checkpoint.storage import Store, describe_error, find_checkpoint, step_name

log = logging.getLogger(__name__)

_DAMAGED = "damaged"  # the reason for moving a checkpoint aside


@dataclass
class Resume:
    """The search for a checkpoint to load. Every rank runs it."""

    config: CheckpointConfig
    store: Store
    group: Group
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    in_memory: InMemoryCheckpoints | None
    settings: bool
    own_step: int | None = None  # step of the loaded checkpoint, if that is in this run's store
    stored: int = 0  # the newest intact step on disk; 0: none
    seen: Sequence[int] = ()  # all steps in this run's store
    _aside: dict[int, str] = field(default_factory=dict)  # step -> reason for moving it aside

    def run(self, restarted: bool) -> dict[str, Any] | None:
        """Find and load a checkpoint; see `Checkpointer.restore`."""
        resume = self.config.resume
        own = self.seen = self._own_steps()
        copies: list[int] = []
        # After a manual start, in-memory checkpoints are candidates only with
        # checkpoint.resume=auto, which requests the newest state of this run.
        if self.in_memory is not None and (restarted or resume == "auto"):
            copies = self.in_memory.steps()
        if restarted:
            state = self._newest(own, copies, "all")
            if state is not None:
                return state
            # The run has no checkpoint on disk, and no intact checkpoint in memory.
            copies = []
        if resume == "auto":
            return self._newest(own, copies, self.config.load)
        if resume == "never":
            self._aside = dict.fromkeys(own, "checkpoint.resume=never")
            return None
        step = self._own_step(resume)
        if step is not None:
            state = self._load_path(self.store.path_of(step), step)
            later = []
            for other in own:
                if other > step:
                    later.append(other)
            self._aside = dict.fromkeys(later, f"checkpoint.resume={resume}")
            return state
        if not own:
            found = self.group.on_first(lambda: _find(resume), f"checkpoint.resume={resume}")
            return self._load_path(found, None)
        self.group.log(
            f"this run continues from its own checkpoints, not from checkpoint.resume={resume}"
        )
        return self._newest(own, copies, "all")

    def set_aside(self) -> None:
        """Move aside (rename to ``aside-...``) the checkpoints from which the run does not
        continue: checkpoints after the chosen step, damaged checkpoints, and checkpoints that
        another start has written since `run`. Collective."""
        if self.config.enabled:
            for step in self._own_steps():
                if step not in self.seen:
                    self._aside[step] = "written by another start of this run"

        def move() -> None:
            for step, why in self._aside.items():
                # A run that writes no checkpoints leaves damaged checkpoints in place.
                if why == _DAMAGED and not self.config.enabled:
                    continue
                try:
                    name = self.store.move_aside(step)
                    log.warning("%s: %s is now %s", why, step_name(step), name)
                except Exception as fault:
                    # A damaged checkpoint may stay: the next start skips it again.
                    if why != _DAMAGED:
                        raise
                    log.warning("%s could not be moved aside: %s", step_name(step), fault)

        self.group.on_first(move, "a checkpoint could not be moved aside")

    def _own_steps(self) -> list[int]:
        own: list[int] = self.group.on_first(self.store.steps, f"{self.store.root} cannot be read")
        return own

    def _newest(self, own: list[int], copies: list[int], load: str) -> dict[str, Any] | None:
        """Load the newest intact checkpoint on disk or in memory. If both have this step, load it
        from memory.

        Returns None if only weights were loaded, or if only in-memory checkpoints existed and all
        of them were damaged.
        """
        damaged: dict[int, str] = {}
        candidates = [(step, False) for step in own] + [(step, True) for step in copies]
        for step, is_copy in sorted(candidates, reverse=True):
            try:
                state = self._load_copy(step, load) if is_copy else self._load_own(step, load)
            except DamagedCheckpointError as fault:
                what = step_name(step)
                if is_copy:
                    what = f"{what} in memory"
                else:
                    damaged[step] = f"{what}: {fault}"
                self.group.log(f"skipping {what}: {fault}", logging.WARNING)
                continue
            self._aside = dict.fromkeys(damaged, _DAMAGED)
            self.own_step = None if is_copy else step
            self.stored = max((other for other in own if other not in damaged), default=0)
            return state if load == "all" else None
        if not own:
            return None
        raise ConfigError(
            f"no checkpoint in {self.store.root} can be resumed from:\n"
            f"{list_differences(list(damaged.values()))}\n"
            f"{self._way_to_start_again('moves them aside and starts again')}"
        )

    def _way_to_start_again(self, never: str) -> str:
        """Return the advice for a run with only damaged checkpoints. ``never``: the effect of
        ``checkpoint.resume=never``, as text."""
        resume = self.config.resume
        if resume in ("auto", "never"):
            return f"checkpoint.resume=never {never}"
        # With `never` the run would not start from the checkpoint that the user has named.
        return f"use a new hydra.run.dir with checkpoint.resume={resume} to start again from there"

    def _load_own(self, step: int, load: str) -> dict[str, Any]:
        checkpoint = self._verified(self.store.path_of(step), follow=False)
        if checkpoint.manifest.step != step:
            raise DamagedCheckpointError(f"its manifest belongs to step {checkpoint.manifest.step}")
        return self._load(checkpoint, load)

    def _load_copy(self, step: int, load: str) -> dict[str, Any]:
        assert self.in_memory is not None
        checkpoint = self.in_memory.open(step)
        try:
            return self._load(checkpoint, load)
        except DamagedCheckpointError as fault:
            # Without a checkpoint on disk, the run would start from partly loaded state.
            if not self.seen:
                way = self._way_to_start_again("starts again")
                raise ConfigError(f"{fault}; {way}") from None
            raise

    def _load_path(self, path: str, own_step: int | None) -> dict[str, Any] | None:
        checkpoint = self._verified(path)
        state = self._load(checkpoint, self.config.load)
        self.own_step, self.stored = own_step, checkpoint.manifest.step
        return state if self.config.load == "all" else None

    def _own_step(self, path: str) -> int | None:
        """Return the step if ``path`` names a checkpoint in this run's own folder."""
        parent, name = os.path.split(path.rstrip("/"))
        number = name.removeprefix("step-")
        root = self.store.root
        if not is_remote(path) and not is_remote(root):
            parent, root = os.path.realpath(parent), os.path.realpath(root)
        return int(number) if parent == root and number.isdecimal() else None

    def _verified(self, path: str, follow: bool = True) -> Checkpoint:
        """Open a checkpoint on all ranks, and verify it: each file is read by one rank. Raises
        `DamagedCheckpointError` on every rank."""
        data = self.group.on_first(lambda: _read_manifest(path, follow))
        folder = open_folder(path)
        checkpoint = Checkpoint(folder, Manifest.decode(data, f"{folder.label}/{MANIFEST}"))
        # The files are sorted by size and assigned to the ranks in turn, so that all ranks read
        # about the same number of bytes.
        sizes = {name: file.bytes for name, file in checkpoint.manifest.files.items()}
        files = sorted(sizes, key=lambda name: -sizes[name])
        self.group.agree(lambda: checkpoint.verify(files[self.group.rank :: self.group.size]))
        return checkpoint

    def _load(self, checkpoint: Checkpoint, load: str) -> dict[str, Any]:
        strict, manifest = self.config.strict, checkpoint.manifest
        label, same_ranks = checkpoint.folder.label, manifest.world_size == self.group.size

        def fill() -> list[str]:
            # All checks come before the first change. A checkpoint that does not fit must leave the
            # model and the optimizer unchanged, because the next candidate is loaded into them.
            passed_over = check_model(self.model, checkpoint, strict)
            settings: list[Settings] = []
            optimizer = self.optimizer if load == "all" else None
            if optimizer is not None:
                passed_over += check_optimizer(self.model, optimizer, checkpoint, strict)
                settings = stored_settings(self.model, optimizer, checkpoint, self.settings)
            load_model(self.model, checkpoint)
            if optimizer is not None:
                load_optimizer(self.model, optimizer, checkpoint)
                put_settings(optimizer, settings)
            if load == "all" and same_ranks:
                restore_rng(self.group.rank, checkpoint)
            return passed_over

        passed_over = self.group.agree(fill)
        masters_were_loaded(self.model)
        restarts = load != "all" or not names_under(["ema"], checkpoint.tensors)
        self.group.agree(lambda: load_ema(self.model, checkpoint, restart=restarts))
        if restarts and ema_of(self.model) is not None:
            self.group.log(f"the averages of train.ema begin with the weights of {label}")
        if load == "all":
            self.group.agree(lambda: load_replica_state(self.model, checkpoint))
            if names_under(["rng"], checkpoint.tensors) and not same_ranks:
                self.group.log(
                    f"{label} was written by {manifest.world_size} ranks, and this run has "
                    f"{self.group.size}: the ranks' random generators start from the seed"
                )
        if passed_over:
            self.group.log(
                f"checkpoint.strict=false skipped:\n{list_differences(passed_over)}",
                logging.WARNING,
            )
        what = "all" if load == "all" else "weights only"
        self.group.log(f"loaded {label} ({what})")
        return from_json(manifest.state) | {"step": manifest.step}


def check_resume(path: str) -> None:
    """Raise `ConfigError` if ``checkpoint.resume`` names a folder of this machine that does not
    exist."""
    if path not in ("auto", "never") and not is_remote(path):
        _find(path)


def _find(path: str) -> str:
    found = find_checkpoint(path)
    if not is_remote(path) and not os.path.isdir(found):
        raise ConfigError(
            f"checkpoint.resume={path}: this folder does not exist; use auto, never, or a path"
        )
    return found


def _read_manifest(path: str, follow: bool) -> bytes:
    # No run writes its own checkpoint as a link, so a link was placed there by another program.
    if not follow and not is_remote(path) and os.path.islink(path):
        raise DamagedCheckpointError("it is a symbolic link, which is not followed")
    try:
        return open_folder(path).read(MANIFEST, MAX_BYTES)
    except DamagedCheckpointError as fault:
        hint = ""
        if not is_remote(path) and os.path.exists(os.path.join(path, ".metadata")):
            hint = (
                "; this is a torch.distributed.checkpoint folder, whose .metadata is a pickle and "
                "is never read"
            )
        raise DamagedCheckpointError(f"{fault}{hint}") from None
    except Exception as fault:
        raise DamagedCheckpointError(f"{path}: {describe_error(fault)}") from None
