"""Log a run to Weights & Biases, with its client.

    PYTHONPATH=examples python -m parallel2d.train 'train.hooks=[wandb_hook:WandbHook]'

``WANDB_MODE=offline`` writes only to ``wandb/`` in the run directory; ``wandb sync`` uploads this
folder later. A resumed or restarted run keeps its id. This needs
``pip install 'parallel2d[wandb]'``.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from pathlib import Path

import wandb

from parallel2d.hooks import Hook, RunView


class WandbHook(Hook):
    """Log metrics to Weights & Biases.

    Args:
        project: name of the project.
        every: steps between logged training metrics.
    """

    def __init__(self, project: str = "parallel2d", every: int = 10):
        self.project = project
        self.every = every

    def start(self, run: RunView, step: int) -> None:
        if not run.is_first:
            return
        known = Path(run.run_dir) / "wandb_run_id"
        if not known.exists():
            known.write_text(secrets.token_hex(4))
        self.wandb_run = wandb.init(
            project=self.project,
            id=known.read_text(),
            resume="allow",
            dir=run.run_dir,
            name=Path(run.run_dir).name,
            config=dataclasses.asdict(run.config),
        )

    def step(self, run: RunView, step: int, metrics: Mapping[str, float]) -> None:
        if run.is_first and step % self.every == 0:
            self.wandb_run.log(dict(metrics), step=step)

    def validation(self, run: RunView, step: int, metrics: Mapping[str, float]) -> None:
        if run.is_first:
            self.wandb_run.log(dict(metrics), step=step)

    def end(self, run: RunView, step: int, reason: str) -> None:
        if run.is_first:
            self.wandb_run.summary["ended"] = reason
            self.wandb_run.finish()
