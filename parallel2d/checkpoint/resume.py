"""Chooses the checkpoint that a run starts from, verifies it and loads it, on all ranks alike:
`Resume.run`.

Candidates are the run's own store, the copies in memory and the path in ``checkpoint.resume``. Rank
0 chooses, and broadcasts the manifest. Verification is spread over the ranks, so that each file is
read once.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallel2d.checkpoint.archive import Checkpoint
from parallel2d.checkpoint.copies import Copies
from parallel2d.checkpoint.manifest import MAX_BYTES, NAME, Manifest
from parallel2d.checkpoint.replica_state import load_replica_state
from parallel2d.checkpoint.rng import restore_rng
from parallel2d.checkpoint.save import Group
from parallel2d.checkpoint.state import (
    check_model,
    check_optimizer,
    list_differences,
    load_model,
    load_optimizer,
    stored_settings,
)
from parallel2d.checkpoint.storage import Store, describe_error, find_checkpoint, step_name
from parallel2d.config import CheckpointConfig
from parallel2d.errors import ConfigError
from parallel2d.files.folder import is_remote, open_folder
from parallel2d.files.tensor_file import DamagedCheckpointError
from parallel2d.weights.named_tensors import masters_were_loaded
from parallel2d.weights.optimizer_settings import Settings, put_settings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """What was loaded. ``own_step``: the step of this run's own checkpoint in its store, None when
    it was another's or a copy in memory. ``stored``: the newest step that is on disk, 0 for
    none."""

    step: int
    state: dict[str, Any]
    own_step: int | None
    stored: int


class Resume:
    """One search for a checkpoint. Every rank makes one and calls `run`."""

    def __init__(
        self,
        config: CheckpointConfig,
        store: Store,
        group: Group,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        memory: Copies | None = None,
        settings: bool = False,
    ) -> None:
        self.config, self.store, self.group = config, store, group
        self.model, self.optimizer, self.memory, self.settings = model, optimizer, memory, settings
        self._not_continued: tuple[list[int], str] | None = None  # steps and the reason
        self._damaged: list[int] = []
        self._seen: list[int] = []

    def run(self, restarted: bool = False) -> Restored | None:
        """See `StoreCheckpointer.restore`."""
        resume = self.config.resume
        own = self._seen = self._own_steps()
        copies = self._copies(restarted)
        if restarted:
            found = self._newest(own, copies, "all")
            if found is not None:
                return found
        if resume == "never":
            self._not_continued = own, "checkpoint.resume=never"
            return None
        if resume == "auto":
            if restarted:  # what there was could not be loaded
                return None
            return self._newest(own, copies, self.config.load)
        step = self._own_step(resume)
        if step is not None:
            restored = self._load_path(self.store.path_of(step), step)
            later = [other for other in own if other > step]
            self._not_continued = later, f"checkpoint.resume={resume}"
            return restored
        if not own:
            return self._from_elsewhere(resume)
        self._say(
            "this run has checkpoints of its own and goes on there, not at "
            f"checkpoint.resume={resume}"
        )
        return None if restarted else self._newest(own, copies, "all")

    def set_aside(self) -> None:
        """Moves checkpoints aside that the run does not go on from: later ones than the chosen
        one, damaged ones, and what another start has written in the meantime. Collective."""
        if self.config.enabled:
            written = [step for step in self._own_steps() if step not in self._seen]
            self._set_aside(written, "written by another start of this run")
        if self._damaged:
            self._clear_damaged(self._damaged)
        if self._not_continued is not None:
            self._set_aside(*self._not_continued)

    def _copies(self, restarted: bool) -> list[int]:
        # Started anew by hand, copies in memory count only where the newest state of this run is
        # asked for.
        if self.memory is None or not (restarted or self.config.resume == "auto"):
            return []
        return self.memory.steps()

    def _own_steps(self) -> list[int]:
        def read() -> list[int]:
            try:
                return self.store.steps()
            except Exception as fault:
                reason = describe_error(fault)
                raise ConfigError(f"{self.store.root} cannot be read: {reason}") from None

        own: list[int] = self.group.on_first(read)
        return own

    def _newest(self, own: list[int], copies: list[int], load: str) -> Restored | None:
        """The newest sound one in the store or in memory; in memory where both have the step. None
        when the weights alone were asked for, and when there were copies in memory alone and none
        could be loaded."""
        damaged: dict[int, str] = {}
        candidates = [(step, False) for step in own] + [(step, True) for step in copies]
        for step, in_memory in sorted(candidates, reverse=True):
            if in_memory:
                state = self._from_memory(step, load)
            else:
                state = self._from_disk(step, load, damaged)
            if state is None:
                continue
            if self.config.enabled:
                self._damaged = list(damaged)
            if load == "model_only":
                return None
            stored = max((other for other in own if other not in damaged), default=0)
            return Restored(step, state, None if in_memory else step, stored)
        if not own:
            return None
        listed = list_differences(list(damaged.values()))
        raise ConfigError(
            f"no checkpoint in {self.store.root} can be resumed from:\n{listed}\n"
            "checkpoint.resume=never moves them aside and starts again"
        )

    def _from_disk(self, step: int, load: str, damaged: dict[int, str]) -> dict[str, Any] | None:
        """The state of an own checkpoint, loaded; None if it is damaged, which is added to
        ``damaged`` with the reason."""
        try:
            checkpoint = self._verified(self.store.path_of(step), follow=False)
            if checkpoint.manifest.step != step:
                raise DamagedCheckpointError(
                    f"its manifest is that of step {checkpoint.manifest.step}"
                )
        except DamagedCheckpointError as fault:
            damaged[step] = f"{step_name(step)}: {fault}"
            self._say(f"passing over {damaged[step]}", logging.WARNING)
            return None
        return self._load(checkpoint, load)

    def _from_memory(self, step: int, load: str) -> dict[str, Any] | None:
        """The state of a copy in memory, loaded, or None and the reason in the log."""
        assert self.memory is not None
        loaded = None
        try:
            checkpoint = self.memory.open(step, self.model, self.optimizer)
            try:
                state = self._load(checkpoint, load)
                loaded = step
            finally:
                self.memory.close(loaded=loaded)
        except DamagedCheckpointError as fault:
            self._say(
                f"passing over the copy of {step_name(step)} in memory: {fault}", logging.WARNING
            )
            return None
        return state

    def _from_elsewhere(self, path: str) -> Restored | None:
        """A path given by hand: a checkpoint, or a run directory or its ``checkpoints`` folder,
        whose newest is meant."""
        return self._load_path(self.group.on_first(lambda: _find(path)), None)

    def _load_path(self, path: str, own_step: int | None) -> Restored | None:
        checkpoint = self._verified(path)
        state = self._load(checkpoint, self.config.load)
        if self.config.load == "model_only":
            return None
        return Restored(checkpoint.manifest.step, state, own_step, checkpoint.manifest.step)

    def _own_step(self, path: str) -> int | None:
        """The step, when ``path`` names a checkpoint in this run's own folder."""
        if is_remote(path) != is_remote(self.store.root):
            return None
        parent, name = os.path.split(path.rstrip("/"))
        same = parent == self.store.root
        if not is_remote(path):
            same = os.path.realpath(parent) == os.path.realpath(self.store.root)
        if not same or not name.removeprefix("step-").isdecimal():
            return None
        return int(name.removeprefix("step-"))

    def _clear_damaged(self, steps: list[int]) -> None:
        """Moves damaged checkpoints aside, so that they do not stand where this run will write its
        own and do not count for retention. A failure is only logged."""
        if self.group.rank == 0:
            for step in steps:
                try:
                    log.warning(
                        "the damaged %s is now %s", step_name(step), self.store.move_aside(step)
                    )
                except Exception as fault:
                    log.warning(
                        "the damaged %s could not be moved aside: %s",
                        step_name(step),
                        describe_error(fault),
                    )

    def _set_aside(self, steps: list[int], why: str) -> None:
        def move() -> None:
            try:
                for step in steps:
                    name = self.store.move_aside(step)
                    log.warning("%s: %s is now %s", why, step_name(step), name)
            except Exception as fault:
                raise ConfigError(
                    f"{why}: a checkpoint could not be moved aside: {describe_error(fault)}"
                ) from None

        self.group.on_first(move)

    def _verified(self, path: str, follow: bool = True) -> Checkpoint:
        """Opens a checkpoint on all ranks and reads it through once. Raises
        `DamagedCheckpointError` on all of them alike."""
        data = self.group.on_first(lambda: _read_manifest(path, follow))
        folder = open_folder(path)
        checkpoint = Checkpoint(folder, Manifest.decode(data, f"{folder.label}/{NAME}"))
        # The largest first, and each rank reads every so many of them: about the same bytes.
        sizes = {name: file.bytes for name, file in checkpoint.manifest.files.items()}
        files = sorted(sizes, key=lambda name: -sizes[name])
        self.group.agree(lambda: checkpoint.verify(files[self.group.rank :: self.group.size]))
        return checkpoint

    def _load(self, checkpoint: Checkpoint, load: str) -> dict[str, Any]:
        config, manifest = self.config, checkpoint.manifest
        passed_over: list[str] = []

        def fill() -> None:
            check_model(self.model, checkpoint, config.strict)  # all, before anything is changed
            settings: list[Settings] = []
            if load == "all" and self.optimizer is not None:
                check_optimizer(self.model, self.optimizer, checkpoint, config.strict)
                if self.settings:
                    settings = stored_settings(self.model, self.optimizer, checkpoint)
            passed_over.extend(load_model(self.model, checkpoint, config.strict))
            if load == "model_only":
                return
            if self.optimizer is not None:
                passed_over.extend(
                    load_optimizer(self.model, self.optimizer, checkpoint, config.strict)
                )
                if self.settings:
                    put_settings(self.optimizer, settings)
            if manifest.world_size == self.group.size:
                restore_rng(self.group.rank, checkpoint)

        self.group.agree(fill)
        masters_were_loaded(self.model)
        if load == "all":
            self.group.agree(lambda: load_replica_state(self.model, checkpoint))
        if passed_over:
            self._say(
                f"checkpoint.strict=false passed over:\n{list_differences(passed_over)}",
                logging.WARNING,
            )
        has_generators = any(name.startswith("rng/") for name in checkpoint.tensors)
        if load == "all" and has_generators and manifest.world_size != self.group.size:
            self._say(
                f"{checkpoint.folder.label} was written by {manifest.world_size} ranks, here are "
                f"{self.group.size}: the ranks' random generators start afresh"
            )
        self._say(
            f"loaded {checkpoint.folder.label} "
            f"({'weights only' if load == 'model_only' else 'all'})"
        )
        return dict(manifest.state) | {"step": manifest.step}

    def _say(self, text: str, level: int = logging.INFO) -> None:
        if self.group.rank == 0:
            log.log(level, "%s", text)


def _find(path: str) -> str:
    """The checkpoint that ``path`` means. Raises `ConfigError`."""
    try:
        found = find_checkpoint(path)
    except Exception as fault:
        raise ConfigError(f"checkpoint.resume={path}: {describe_error(fault)}") from None
    if not is_remote(path) and not os.path.isdir(found):
        raise ConfigError(
            f"checkpoint.resume={path}: there is no such folder; it may be auto, never, or a path"
        )
    return found


def _read_manifest(path: str, follow: bool) -> bytes:
    """The manifest of the checkpoint at ``path``. Raises `DamagedCheckpointError`."""
    # A checkpoint of the run's own is never a link: somebody has put it there.
    if not follow and not is_remote(path) and os.path.islink(path):
        name = os.path.basename(path)
        raise DamagedCheckpointError(
            f"{name} is a symbolic link, which is not followed{_hint(path)}"
        )
    try:
        return open_folder(path).read(NAME, MAX_BYTES)
    except DamagedCheckpointError as fault:
        raise DamagedCheckpointError(f"{fault}{_hint(path)}") from None
    except Exception as fault:
        raise DamagedCheckpointError(f"{path}: {describe_error(fault)}") from None


def _hint(path: str) -> str:
    if not is_remote(path) and os.path.exists(os.path.join(path, ".metadata")):
        return (
            "; this is a torch.distributed.checkpoint folder, whose .metadata is a pickle and is "
            "never read"
        )
    return ""
