"""Log a run to MLflow, with MLflow's client.

    PYTHONPATH=examples python -m parallel2d.train 'train.hooks=[mlflow_hook:MLflowHook]'

Without ``uri`` the hook writes a local file, ``mlflow.db`` in the run directory:
``mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db``. A resumed or restarted run continues the
same MLflow run. This needs ``pip install 'parallel2d[mlflow]'``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric

from parallel2d.hooks import Hook, RunView


class MLflowHook(Hook):
    """Log metrics to MLflow.

    Args:
        uri: address of a tracking server; None: ``mlflow.db`` in the run directory.
        experiment: name of the MLflow experiment.
        every: steps between logged training metrics.
    """

    def __init__(self, uri: str | None = None, experiment: str = "parallel2d", every: int = 10):
        self.uri = uri
        self.experiment = experiment
        self.every = every

    def start(self, run: RunView, step: int) -> None:
        if not run.is_first:
            return
        self.client = MlflowClient(self.uri or f"sqlite:///{run.run_dir}/mlflow.db")
        known = Path(run.run_dir) / "mlflow_run_id"
        if known.exists():
            self.run_id = known.read_text()
            self.client.update_run(self.run_id, status="RUNNING")
            return
        found = self.client.get_experiment_by_name(self.experiment)
        number = found.experiment_id if found else self.client.create_experiment(self.experiment)
        self.run_id = self.client.create_run(number, run_name=Path(run.run_dir).name).info.run_id
        known.write_text(self.run_id)
        self.client.log_param(self.run_id, "lr", run.config.optimizer.lr)

    def step(self, run: RunView, step: int, metrics: Mapping[str, float]) -> None:
        if run.is_first and step % self.every == 0:
            self.log(step, metrics)

    def validation(self, run: RunView, step: int, metrics: Mapping[str, float]) -> None:
        if run.is_first:
            self.log(step, metrics)

    def end(self, run: RunView, step: int, reason: str) -> None:
        if run.is_first:
            self.client.set_terminated(self.run_id, "KILLED" if reason == "preempted" else None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        values = [Metric(key, value, now, step) for key, value in metrics.items()]
        self.client.log_batch(self.run_id, values)
