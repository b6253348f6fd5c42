"""`Checkpointer` decides when a run saves, which checkpoints are kept (``keep_last``,
``keep_best``), from which checkpoint the run resumes, and how failed saves are handled.

Every decision depends only on values that are equal on all ranks, or rank 0 decides and broadcasts
the result.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base import exchange
from parallel2d.base.config import CheckpointConfig
from parallel2d.base.errors import ConfigError
from parallel2d.base.files import refuse_link
from parallel2d.base.files.tensor_file import DamagedCheckpointError
from parallel2d.base.replicas import ReplicaLost, current
from parallel2d.base.store.address import in_thread
from parallel2d.parallel.mesh import mesh_shape
from parallel2d.parallel.mesh_sizes import MeshShape
from parallel2d.parallel.parallelize import average_buffers
from parallel2d.parallel.weights.named_tensors import (
    describe_optimizer,
    join_optimizers,
    masters_in,
    meet,
    refuse_extra_state,
    reshard,
    spread_state,
    tied_names,
)
from parallel2d.parallel.weights.states import Models, Optimizers
from parallel2d.training.checkpoint.in_memory import (
    InMemoryCheckpoints,
    forget_in_memory_checkpoints,
)
from parallel2d.training.checkpoint.local_state import Staging
from parallel2d.training.checkpoint.manifest import Manifest, to_json
from parallel2d.training.checkpoint.reader import Checkpoint
from parallel2d.training.checkpoint.resume import Resume
from parallel2d.training.checkpoint.save import (
    Group,
    SavedState,
    check_folder,
    take,
    write_checkpoint,
)
from parallel2d.training.checkpoint.state import (
    buffer_names,
    replica_tensors,
    rng_tensors,
    saved_tensors,
)
from parallel2d.training.checkpoint.storage import (
    CheckpointError,
    as_config_error,
    describe_error,
    open_store,
    step_name,
)

log = logging.getLogger(__name__)

_POINT = "saves or restores a checkpoint"  # name of this point for `meet`, at which all ranks meet
BEST = "best.json"  # file in the folder of the checkpoints with the step of the best checkpoint


def _joined(models: Mapping[str, nn.Module]) -> nn.Module:
    """Join several models into one module. The name of each parameter then begins with the name of
    its model."""
    joined = nn.ModuleDict(models)
    if any(each.replicas_differ for each in masters_in(joined)):
        raise ConfigError(
            "sync=diloco: a Checkpointer saves one model; make one for each, in its own folder"
        )
    return joined


class Checkpointer:
    """Saves and restores one run. Collective: every rank constructs a `Checkpointer` and calls its
    methods in the same order.

    Args:
        config: the ``checkpoint`` section of the job.
        run_dir: the run directory. Checkpoints are written to its folder ``checkpoints/`` unless
            ``config.folder`` is set.
        mesh: the job's mesh; None for a single process.
        model, optimizer: a sharded or unsharded model and its optimizer, or dicts of several, such
            as ``{"generator": ..., "critic": ...}``. With ``optimizer=None`` only models are saved.
        layout: facts for the manifest: numbers, strings, lists and dicts.
        copies: the result of `in_memory_checkpoints` for the same ``config``; None: no in-memory
            checkpoints.
        more_state: called before each save with the ``state`` to save; returns entries that are
            added to ``state``, or replace entries in it. The call may be collective.

    Attributes:
        blocked_s: seconds for which the last call of `save_if_due` blocked the loop.
        age_steps: steps since the newest published checkpoint.
        failures: number of consecutive failed saves.
        published: steps that this object has published, ascending.

    Raises `ConfigError` if the folder is not writable, if it is not the same folder on every rank,
    or if ``config.memory_every`` is a number and ``copies`` is None.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        run_dir: str | os.PathLike[str],
        mesh: DeviceMesh | None,
        model: Models,
        optimizer: Optimizers | None,
        *,
        layout: dict[str, Any] | None = None,
        copies: InMemoryCheckpoints | None = None,
        more_state: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda _state: {},
    ) -> None:
        self.config, self.mesh, self._optimizer, self._run_dir = config, mesh, optimizer, run_dir
        self.model = model if isinstance(model, nn.Module) else _joined(model)
        if config.enabled:
            refuse_extra_state(self.model, "Checkpointer")
        meet(self.model, _POINT)
        self.layout, self.in_memory, self._more_state = layout or {}, copies, more_state
        if copies is None and config.enabled and config.memory_every not in ("auto", 0):
            raise ConfigError(
                f"checkpoint.memory_every={config.memory_every}: give the copies to Checkpointer, "
                "copies=parallel2d.training.checkpoint.in_memory_checkpoints(config, run_dir, mesh)"
            )
        if copies is not None and optimizer is not None:
            copies.follow_updates(
                optimizer.values() if isinstance(optimizer, Mapping) else [optimizer]
            )
        self.group = Group.new(mesh)
        # A save in a thread uses `group`. The broadcast in `save_if_due` needs a second group,
        # because it may run during a save, and two concurrent collectives on one group would mix
        # their messages.
        self._votes = Group.new(mesh) if config.enabled and config.every_minutes else None
        own_folder = os.path.join(os.fspath(run_dir), "checkpoints")
        if not config.folder:
            with as_config_error("hydra.run.dir"):
                refuse_link(own_folder)
        self.store = open_store(config.folder or own_folder)
        self.blocked_s, self.bytes_written, self.failures = 0.0, 0, 0
        self.published: list[int] = []
        self._known_good: set[int] = set()
        self._resume: Resume | None = None
        # On rank 0 with `keep_best`: the entry ``best`` of the best checkpoint; empty if none
        # exists
        self._best: dict[str, Any] = {}
        self._staging = Staging()
        # The result is (step, error, bytes), or None if a replica failed during the save.
        self._saving: Future[tuple[int, str | None, int] | None] | None = None
        self._given: tuple[int, dict[str, Any]] = 0, {}  # the arguments of the last save
        self._has_lost = False  # a replica failed during this save, which must be repeated
        self._last_step = self._base = 0
        self._first_call = True
        self._last_save = time.monotonic()
        if config.enabled:
            check_folder(self.store, self.group)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer. Several optimizers are joined into one."""
        given = self._optimizer
        return join_optimizers(given) if isinstance(given, Mapping) else given

    def follow(self, step: int) -> None:
        """Continue from ``step`` with the state that another replica has sent."""
        self._last_step = self._base = step
        if self.in_memory is not None:
            self.in_memory.follow()

    @property
    def age_steps(self) -> int:
        return self._last_step - max([self._base, *self.published])

    def restore(
        self, *, restarted: bool = False, settings: bool = False, begin: bool = True
    ) -> dict[str, Any] | None:
        """Restore the model, the optimizer and the random generators according to
        ``config.resume``.

        ``auto`` loads the newest complete checkpoint of this run after verification, and skips
        damaged checkpoints with a warning that gives the reason. ``never`` moves existing
        checkpoints aside, which renames them to ``aside-...``, and starts a new run. A path loads
        the checkpoint at this path. If the path belongs to another run and this run already has
        checkpoints, for example after a restart, the newest checkpoint of this run is loaded
        instead. Collective.

        Args:
            restarted: True if these workers replace earlier workers of the same run, or if the run
                rolls back. The newest checkpoint on disk or in memory is loaded, and
                ``config.resume`` is ignored. One rank with True is enough.
            settings: True to load the saved lr, betas and weight decay into the parameter groups,
                so that a torch scheduler continues. By default the groups keep the settings of
                their construction.
            begin: False leaves the run's folders unchanged until `begin` is called, for callers
                that may still reject the restored state.

        Returns the ``state`` of the loaded checkpoint, including ``step``. Returns None if the run
        starts from step 0: no checkpoint was found, or ``load=model_only`` loaded only the weights.

        Raises `ConfigError` if all checkpoints are damaged, if the path is not a checkpoint, or if
        the checkpoint does not fit the model or the optimizer.
        """
        meet(self.model, _POINT)
        self.collect()
        self.group.stay()
        restarted = any(self.group.all_gather(restarted))
        self._resume = Resume(
            self.config,
            self.store,
            self.group,
            self.model,
            self.optimizer,
            self.in_memory,
            settings,
        )
        state = self._resume.run(restarted)
        if state is not None:
            self._last_step, self._base = int(state["step"]), self._resume.stored
            if self._resume.own_step is not None:
                self._known_good.add(self._resume.own_step)
        if self.config.enabled:
            self._find_best(state or {}, self._resume.seen)
        if begin:
            self.begin()
        self._last_save = time.monotonic()
        return state

    def begin(self) -> None:
        """Continue the run from the state that `restore` has loaded: move the skipped checkpoints
        aside, delete all in-memory checkpoints except the loaded one, and record the best
        checkpoint. Collective."""
        if self._resume is None:
            return
        self._resume.set_aside()
        self._resume = None
        if self.in_memory is not None:
            self.in_memory.begin(self._last_step)
        elif self.group.is_first:
            forget_in_memory_checkpoints(self._run_dir)
        if self.config.enabled and self.group.is_first:
            self._name_best()

    def newest(self) -> str | None:
        """Return the path of the newest checkpoint of this run that is known to be intact."""
        return self.store.path_of(max(self._known_good)) if self._known_good else None

    def best(self) -> str | None:
        """Return the path of the best checkpoint of ``keep_best`` on rank 0; None on other
        ranks."""
        return self.store.path_of(self._best["step"]) if self._best else None

    def take_over(self, state: dict[str, Any]) -> None:
        """Make this rank responsible for deleting old checkpoints.

        Args:
            state: the current state of the run.
        """
        best = state.get("best")
        if best and best.get("metric") == self.config.keep_best:
            self._best = best

    def _find_best(self, state: dict[str, Any], own: Sequence[int]) -> None:
        """Continue with the best step in ``state``. If the best checkpoint is not among the ``own``
        steps of this run, remove ``best`` from ``state``; the next measured value then counts as
        the best."""
        self._best = {}
        # The state has not been validated yet and may have any origin.
        best = state.get("best")
        keep_best = self.config.keep_best
        if keep_best is None or not isinstance(best, dict) or best.get("metric") != keep_best:
            return
        if best.get("step") not in own:
            state["best"] = None
            what = "the best step so far has no checkpoint, so it no longer counts"
            self.group.log(what, logging.WARNING)
        elif self.group.is_first:
            self._best = best

    def save_if_due(
        self,
        step: int,
        state: dict[str, Any],
        *,
        last: bool = False,
        preempted: bool = False,
        due: bool | None = None,
        wanted: bool = False,
    ) -> None:
        """Save a checkpoint after ``step`` if a save is due. Steps count from 1.

        By default the call returns after the copy to CPU, and a thread writes the files.
        Collective.

        Args:
            state: the state of the run except model and optimizer: numbers, strings, lists, dicts.
                The entry ``samples`` is the position in the data. With ``keep_best``, the entry
                ``best`` has the ``step``, ``value``, ``metric`` and ``mode`` of the best state so
                far.
            last: True if the run ends after this step: save regardless of the interval.
            preempted: True to save now, and return only after the checkpoint is published.
            due: True if ``every_minutes`` have passed; the value must be equal on all ranks (see
                `time_is_up`). None: rank 0's clock decides, with one broadcast per step.
            wanted: True to save regardless of the interval.

        Raises `CheckpointError` on every rank after ``max_failures`` consecutive failures.
        """
        begin = time.perf_counter()
        self._last_step = step
        self.blocked_s = 0.0
        # The last state and the state at a preemption are always saved to disk, so they need no
        # in-memory checkpoint.
        if self.in_memory is not None and self.in_memory.is_due(step) and not (last or preempted):
            self.in_memory.save(self._state(step, state))
            self.blocked_s = time.perf_counter() - begin
        if due is None and self._votes is not None:
            meet(self.model, _POINT)
            due = bool(self._votes.broadcast(self.time_is_up()))
        is_due = any((due, last, preempted, wanted, self._is_of_interval(step)))
        self._first_call = False
        if self.config.enabled and is_due:
            # One save at a time, because all saves share the staging buffers.
            self.collect()
            if step not in self._known_good:
                self._start(step, state, wait=preempted or not self.config.asynchronous)
            self.blocked_s = time.perf_counter() - begin
        elif preempted:
            self.collect()

    def _is_of_interval(self, step: int) -> bool:
        if self._first_call and self.config.on_first_step:
            return True
        return self.config.every > 0 and step % self.config.every == 0

    def time_is_up(self) -> bool:
        """True if ``every_minutes`` have passed on this rank's clock, or if a save must be repeated
        because a replica failed during it."""
        minutes = self.config.every_minutes
        is_up = minutes > 0 and time.monotonic() - self._last_save >= minutes * 60
        return self._has_lost or is_up

    @property
    def save_is_done(self) -> bool:
        """True if a background save has ended on this rank and `collect` has not been called since
        then."""
        return self._saving is not None and self._saving.done()

    def collect(self) -> None:
        """Wait for the save in progress, so that all ranks learn its result at the same step.
        Collective. Raises as `save_if_due`."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        if not saving.done():
            self.group.log("waiting for the checkpoint that is still being written")
        outcome = saving.result()
        if outcome is None:
            return
        step, error, size = outcome
        if error is None:
            self.failures = 0
            self.bytes_written += size
            self.published.append(step)
            self._known_good.add(step)
            return
        self.failures += 1
        if self.failures >= self.config.max_failures:
            raise CheckpointError(
                f"{self.failures} checkpoints in a row could not be written "
                f"(checkpoint.max_failures={self.config.max_failures}), the last, of step {step}: "
                f"{error}"
            )

    def finish(self) -> None:
        """End a successful run: wait for the save in progress, then delete the in-memory
        checkpoints. Collective. Raises `CheckpointError` if the last save failed."""
        self._complete()
        if self.failures:
            failed = f"({self.failures} failed in a row); see the log"
            raise CheckpointError(f"the last checkpoint could not be written {failed}")
        if self.in_memory is not None:
            self.in_memory.finish()

    def _complete(self) -> None:
        """Wait for the save in progress; the survivors repeat it if a replica failed."""
        self.collect()
        if current() is None or not any(exchange.all_gather(self._has_lost)):
            return
        self._start(*self._given, wait=True)

    def _start(self, step: int, state: dict[str, Any], wait: bool) -> None:
        self._last_save = time.monotonic()
        self._given, self._has_lost = (step, state), False
        # The members are fixed on this thread, before the thread of the save starts. Later steps
        # run during the save, and replicas may fail or join in these steps. If ranks disagreed
        # about the members of a save, it would wait for a rank that does not take part. The copy to
        # CPU also runs on this thread, because the next step changes the tensors.
        self.group.stay()
        taken = take(self._state(step, state), self.mesh, self.group.rank, self._staging)

        def write() -> tuple[int, str | None, int] | None:
            try:
                error, size = write_checkpoint(*taken, self.store, self.group, self._clear_the_way)
            except ReplicaLost:  # not a fault of the storage
                self._has_lost = True
                return None
            except Exception:  # a rank has ended: the loop will get an error as well
                error = "another rank ended meanwhile; the next start checks whether it is complete"
                size = 0
            if self.group.is_first:
                if error:
                    log.error("the checkpoint of step %d could not be written: %s", step, error)
                else:
                    log.info("%s is published: %.1f MiB", step_name(step), size / 2**20)
                    self._retire(step, state.get("best"))
            return step, error, size

        self._saving = in_thread(write)
        if wait:
            self._saving.result()
            self._complete()

    def _state(self, step: int, state: dict[str, Any]) -> SavedState:
        meet(self.model, _POINT)
        state = {**state, **self._more_state(state)}
        # After a forward, the module may still have the unsharded parameters in place of the
        # sharded parameters.
        reshard(self.model)
        # Running statistics differ between ranks. Without this average, a checkpoint could combine
        # one rank's mean with another rank's variance.
        average_buffers(self.model)
        described, optimizer = {}, self.optimizer
        if optimizer is not None:
            spread_state(optimizer)
            described = to_json(describe_optimizer(self.model, optimizer), "the optimizer")
        shape = MeshShape(1, 1) if self.mesh is None else mesh_shape(self.mesh)
        manifest = Manifest(
            step=step,
            state=to_json({**state, "step": step}, "state"),
            layout=self.layout,
            mesh=shape.shown,
            world_size=self.group.size,
            optimizer=described,
            tied=tied_names(self.model),
            buffers=buffer_names(self.model),
        )
        shared = saved_tensors(self.model, optimizer)
        of_replica = replica_tensors(self.model, optimizer)
        return SavedState(manifest, shared, of_replica, rng_tensors(self.group.rank))

    def _clear_the_way(self, step: int) -> str | None:
        """Called on rank 0. If an intact checkpoint of ``step`` exists, return a message; the save
        is then skipped. Otherwise move a damaged checkpoint of this step aside, if it exists, and
        return None."""
        if step not in self.store.steps():
            return None
        try:
            Checkpoint.open(self.store.path_of(step)).verify()
        except DamagedCheckpointError as fault:
            name = self.store.move_aside(step)
            log.warning("%s was damaged (%s) and is now %s", step_name(step), fault, name)
            return None
        return f"{step_name(step)} exists already and is intact, so it is kept"

    def _retire(self, newest: int, best: dict[str, Any] | None) -> None:
        """Record the best checkpoint, and delete the checkpoints beyond ``keep_last``. Called on
        rank 0.

        Called only after a publication. The new checkpoint was read back before it was published,
        so a deletion never removes the last intact checkpoint.
        """
        config = self.config
        try:
            steps = self.store.steps()
            # If the best step could not be saved, the previous best checkpoint stays the best.
            if config.keep_best is not None and best and best["step"] in steps:
                self._best = best
                self._name_best()
            if not config.keep_last:
                return
            kept = {*steps[-config.keep_last :], newest, self._best.get("step")}
            if config.keep_every:
                kept.update(step for step in steps if step % config.keep_every == 0)
            for step in sorted(set(steps) - kept):
                self.store.delete(step)
        except Exception as fault:
            log.warning("an old checkpoint could not be deleted: %s", describe_error(fault))

    def _name_best(self) -> None:
        """Write the file `BEST`, or delete it if no best checkpoint exists. Called on rank 0."""
        text = None
        if self._best:
            named = {}
            for key in ("metric", "mode", "step", "value"):
                named[key] = self._best.get(key)
            named["checkpoint"] = step_name(self._best["step"])
            text = json.dumps(named, indent=1) + "\n"
        try:
            self.store.put_note(BEST, text)
        except Exception as fault:
            log.warning("%s could not be written: %s", BEST, describe_error(fault))
