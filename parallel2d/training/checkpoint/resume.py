"""Chooses the checkpoint that a run starts from, verifies it and loads it, on all ranks alike:
`Resume.run`.

Candidates are the run's own store, the copies elsewhere and the path in ``checkpoint.resume``. Rank
0 chooses, and broadcasts the manifest. Ranks share the verification: each file is read once.
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
from parallel2d.parallel.sync.average import average_of
from parallel2d.parallel.weights.named_tensors import masters_were_loaded
from parallel2d.parallel.weights.optimizer_settings import Settings, put_settings
from parallel2d.training.checkpoint.in_memory import MemoryCopies
from parallel2d.training.checkpoint.manifest import (
    MANIFEST,
    MAX_BYTES,
    Checkpoint,
    Manifest,
    from_json,
)
from parallel2d.training.checkpoint.save import Group
from parallel2d.training.checkpoint.state import (
    check_model,
    check_optimizer,
    list_differences,
    load_averages,
    load_model,
    load_optimizer,
    load_replica_state,
    names_under,
    restore_rng,
    stored_settings,
)
from parallel2d.training.checkpoint.storage import Store, describe_error, find_checkpoint, step_name

log = logging.getLogger(__name__)

_DAMAGED = "damaged"  # why a checkpoint is moved aside


@dataclass
class Resume:
    """One search for a checkpoint, on every rank."""

    config: CheckpointConfig
    store: Store
    group: Group
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    copies: MemoryCopies | None
    settings: bool
    own_step: int | None = None  # of this run's own checkpoint that was loaded, not of a copy
    stored: int = 0  # the newest step that is on disk; 0: none
    seen: Sequence[int] = ()  # all that are
    _aside: dict[int, str] = field(default_factory=dict)  # steps that are not continued, and why

    def run(self, restarted: bool) -> dict[str, Any] | None:
        """See `Checkpointer.restore`."""
        resume = self.config.resume
        own = self.seen = self._own_steps()
        copies: list[int] = []
        # Started anew by hand, copies count only where the newest state of this run is asked for.
        if self.copies is not None and (restarted or resume == "auto"):
            copies = self.copies.steps()
        if restarted:
            state = self._newest(own, copies, "all")
            if state is not None:
                return state
            # Here the run has no checkpoint of its own, and none of its copies is sound.
            copies = []
        if resume == "auto":
            return self._newest(own, copies, self.config.load)
        if resume == "never":
            self._aside = dict.fromkeys(own, "checkpoint.resume=never")
            return None
        step = self._own_step(resume)
        if step is not None:
            state = self._load_path(self.store.path_of(step), step)
            later = [other for other in own if other > step]
            self._aside = dict.fromkeys(later, f"checkpoint.resume={resume}")
            return state
        if not own:
            found = self.group.on_first(lambda: _find(resume), f"checkpoint.resume={resume}")
            return self._load_path(found, None)
        self.group.say(
            "this run has checkpoints of its own and goes on there, not at "
            f"checkpoint.resume={resume}"
        )
        return self._newest(own, copies, "all")

    def set_aside(self) -> None:
        """Moves checkpoints aside that the run does not go on from: later ones than the chosen
        one, damaged ones, and what another start has written in the meantime. Collective."""
        if self.config.enabled:
            for step in self._own_steps():
                if step not in self.seen:
                    self._aside[step] = "written by another start of this run"

        def move() -> None:
            for step, why in self._aside.items():
                # They are in the way of what this run will write alone.
                if why == _DAMAGED and not self.config.enabled:
                    continue
                try:
                    name = self.store.move_aside(step)
                    log.warning("%s: %s is now %s", why, step_name(step), name)
                except Exception as fault:
                    # It is passed over the next time too.
                    if why != _DAMAGED:
                        raise
                    log.warning("%s could not be moved aside: %s", step_name(step), fault)

        self.group.on_first(move, "a checkpoint could not be moved aside")

    def _own_steps(self) -> list[int]:
        own: list[int] = self.group.on_first(self.store.steps, f"{self.store.root} cannot be read")
        return own

    def _newest(self, own: list[int], copies: list[int], load: str) -> dict[str, Any] | None:
        """Loads the newest sound one in the store or among the copies; a copy where both have the
        step. None for the weights alone, and when there were copies alone and none was sound."""
        damaged: dict[int, str] = {}
        candidates = [(step, False) for step in own] + [(step, True) for step in copies]
        for step, is_copy in sorted(candidates, reverse=True):
            try:
                state = self._load_copy(step, load) if is_copy else self._load_own(step, load)
            except DamagedCheckpointError as fault:
                what = step_name(step)
                if is_copy:
                    what = f"the copy of {what} in memory"
                else:
                    damaged[step] = f"{what}: {fault}"
                self.group.say(f"passing over {what}: {fault}", logging.WARNING)
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
        """Return the advice for damaged checkpoints of this run; ``never``: what
        ``checkpoint.resume=never`` does."""
        resume = self.config.resume
        if resume in ("auto", "never"):
            return f"checkpoint.resume=never {never}"
        # With `never` the run would not begin with the weights that the user has named.
        return f"use a new hydra.run.dir with checkpoint.resume={resume} to start again from there"

    def _load_own(self, step: int, load: str) -> dict[str, Any]:
        checkpoint = self._verified(self.store.path_of(step), follow=False)
        if checkpoint.manifest.step != step:
            raise DamagedCheckpointError(f"its manifest is that of step {checkpoint.manifest.step}")
        return self._load(checkpoint, load)

    def _load_copy(self, step: int, load: str) -> dict[str, Any]:
        assert self.copies is not None
        checkpoint = self.copies.open(step)
        try:
            return self._load(checkpoint, load)
        except DamagedCheckpointError as fault:
            # With none on disk, the run would begin with what was loaded so far.
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
        """The step, when ``path`` names a checkpoint in this run's own folder."""
        parent, name = os.path.split(path.rstrip("/"))
        number = name.removeprefix("step-")
        root = self.store.root
        if not is_remote(path) and not is_remote(root):
            parent, root = os.path.realpath(parent), os.path.realpath(root)
        return int(number) if parent == root and number.isdecimal() else None

    def _verified(self, path: str, follow: bool = True) -> Checkpoint:
        """Opens a checkpoint on all ranks and reads it through once. Raises
        `DamagedCheckpointError` on all of them alike."""
        data = self.group.on_first(lambda: _read_manifest(path, follow))
        folder = open_folder(path)
        checkpoint = Checkpoint(folder, Manifest.decode(data, f"{folder.label}/{MANIFEST}"))
        # The largest first, and each rank reads every so many of them: about the same bytes.
        sizes = {name: file.bytes for name, file in checkpoint.manifest.files.items()}
        files = sorted(sizes, key=lambda name: -sizes[name])
        self.group.agree(lambda: checkpoint.verify(files[self.group.rank :: self.group.size]))
        return checkpoint

    def _load(self, checkpoint: Checkpoint, load: str) -> dict[str, Any]:
        strict, manifest = self.config.strict, checkpoint.manifest
        label, same_ranks = checkpoint.folder.label, manifest.world_size == self.group.size

        def fill() -> list[str]:
            # Everything is checked before anything is changed.
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
        self.group.agree(lambda: load_averages(self.model, checkpoint, restart=restarts))
        if restarts and average_of(self.model) is not None:
            self.group.say(f"the averages of train.ema begin with the weights of {label}")
        if load == "all":
            self.group.agree(lambda: load_replica_state(self.model, checkpoint))
            if names_under(["rng"], checkpoint.tensors) and not same_ranks:
                self.group.say(
                    f"{label} was written by {manifest.world_size} ranks, here are "
                    f"{self.group.size}: the ranks' random generators start afresh"
                )
        if passed_over:
            self.group.say(
                f"checkpoint.strict=false passed over:\n{list_differences(passed_over)}",
                logging.WARNING,
            )
        what = "all" if load == "all" else "weights only"
        self.group.say(f"loaded {label} ({what})")
        return from_json(manifest.state) | {"step": manifest.step}


def _find(path: str) -> str:
    found = find_checkpoint(path)
    if not is_remote(path) and not os.path.isdir(found):
        raise ConfigError(
            f"checkpoint.resume={path}: there is no such folder; it may be auto, never, or a path"
        )
    return found


def _read_manifest(path: str, follow: bool) -> bytes:
    # A checkpoint of the run's own is never a link: somebody has put it there.
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
