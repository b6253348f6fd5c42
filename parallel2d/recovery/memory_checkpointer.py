"""`Checkpointer`: saves and restores a run, and keeps copies of its state in memory between the
saves."""

from __future__ import annotations

from parallel2d.checkpoint import StoreCheckpointer
from parallel2d.recovery.net import MemoryNet, wanted


class Checkpointer(StoreCheckpointer):
    """Saves and restores one run. Collective: every rank builds it and calls its methods at the
    same points.

    Args:
        config: the ``checkpoint`` section of the configuration.
        run_dir: the run's folder; checkpoints go to ``checkpoints/`` in it unless ``config.folder``
            is set.
        mesh: the job's mesh; None for a single process without one.
        model, optimizer: sharded or plain. ``optimizer=None`` saves the model alone.
        layout: facts for the manifest (strategy, configuration, versions): numbers, strings, lists
            and dicts.

    Attributes:
        blocked_s: seconds the last `save_if_due` kept the loop waiting.
        blocked_total_s: all of them.
        age_steps: steps since the state that the newest published checkpoint holds.
        failures: saves in a row that failed.
        published: steps published by this object, ascending.
        memory: copies in the nodes' shared memory, None without; see [Note: memory net].

    Raises:
        ConfigError: the folder cannot be written, or is not the same folder on every rank; the
            message names the host.
    """

    memory: MemoryNet | None

    def _open_copies(self, run_dir: str) -> MemoryNet | None:
        every = wanted(self.config, self.group)
        if not every:
            return None
        self._votes = self._votes or self._new_group()
        return MemoryNet(every, run_dir, self.mesh, self._votes)
