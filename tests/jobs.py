"""A job on this process group, built by the same functions as on the command line, and stopped by
the test.
"""

import contextlib
import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

SMALL = (
    "data=text",
    "data.path=corpus.txt",
    "data.cache_dir=cache",
    "train.seq_len=16",
    "train.global_batch_size=16",
    "train.steps=12",
    "model.n_layers=1",
    "model.dim=32",
    "model.hidden_dim=48",
    "train.validate_every=0",
    "checkpoint.every=2",
    "precision=fp64",
    "metrics.console=silent",
    "metrics.tensorboard=false",
)


@functools.cache
def _with_choices(*choices):
    """Return the composition of the group choices by Hydra; it takes half a second, so it is
    cached per process.
    """
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    from parallel2d.base.config.schema import register

    register()
    GlobalHydra.instance().clear()
    with initialize_config_module("parallel2d.conf", version_base="1.3"):
        return compose("train", overrides=list(choices))


def config_of(words):
    """Compose and validate the overrides. Values are set after the group choices are composed, as
    in Hydra.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    from parallel2d.base.config.composition import to_config
    from parallel2d.base.config.overrides import parse_arguments
    from parallel2d.base.config.schema import PRESETS

    choices = [
        word
        for word in words
        if word.partition("=")[0] in {*PRESETS, "model", "data", "experiment"}
    ]
    composed = _with_choices(*choices).copy()
    for word in parse_arguments(
        [word for word in words if word not in choices and not word.startswith("hydra.")]
    ).overrides:
        override = OverridesParser.create().parse_override(word)
        options = {"merge": True, "force_add": word.startswith("+")}
        OmegaConf.update(composed, override.key_or_group, override.value(), **options)
    return to_config(composed)


def build(folder, run_dir, words, hooks=()):
    from parallel2d.training.assemble import build_trainer

    return build_trainer(*job_of(folder, run_dir, words), hooks=hooks)


def job_of(folder, run_dir, words):
    import torch
    import torch.distributed as dist

    from parallel2d.base.config import Job
    from parallel2d.base.launcher_environment import RankIdentity
    from parallel2d.base.runtime import Runtime
    from parallel2d.parallel.mesh import Topology

    os.chdir(folder)
    dropped = ("model.",) if {"model=custom", "model=hf"} & set(words) else ()
    if {"data=custom", "data=stream"} & set(words):
        dropped += ("data", "train.seq_len")
    if any(word.startswith("train.epochs=") for word in words):
        dropped += ("train.steps",)
    config = config_of([*(word for word in SMALL if not word.startswith(dropped)), *words])
    rank, world = dist.get_rank(), dist.get_world_size()
    os.makedirs(run_dir, exist_ok=True)
    if rank == 0:
        end_earlier_start(run_dir)
    identity = RankIdentity(rank, world, rank, 0, 1, "torchrun")
    runtime = Runtime(identity, torch.device("cpu"), Topology.gather())
    return Job(config, run_dir, ()), runtime


def end_earlier_start(run_dir):
    """Mark an earlier start as ended: the process of its rank may continue with other tests."""
    owner = Path(run_dir, "owner.json")
    mark = json.loads(owner.read_text()) if owner.exists() else {}
    if mark and "ended" not in mark:
        owner.write_text(json.dumps({**mark, "ended": "now"}))


def run(folder, run_dir, words, steps, after_step=None):
    """Train up to ``steps`` steps of the job, then end without cleanup. Returns the step from
    which it resumed.

    ``after_step(trainer)`` runs on each rank after each step.
    """
    from parallel2d.training.data.feed import BatchFeed

    trainer = build(folder, run_dir, words)
    begun = trainer.progress.step
    feed = BatchFeed(trainer.training, trainer.plan, "cpu", start=trainer.progress.samples)
    trainer.begin(feed)
    for _ in range(min(steps, trainer.config.train.steps - begun)):
        trainer.step(feed)
        if after_step is not None:
            after_step(trainer)
    trainer.checkpointer.finish()
    feed.close()
    trainer.recorder.close()
    return begun


def run_to_the_end(folder, run_dir, words, hooks=()):
    """Run the complete job as the command runs it. Returns its last step and the reason of an
    earlier stop.
    """
    trainer = build(folder, run_dir, words, hooks)
    trainer.run()
    trainer.recorder.close()
    trainer.ownership.release()
    return trainer.progress.step, trainer.stopped


def rows(run_dir):
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


def peak_memory(from_now=False):
    """Return the peak memory of this process in bytes. The figure of `resource` is at least the
    peak of the parent process. Scripts get the source.
    """
    if from_now:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    with open("/proc/self/status") as file:
        return 1024 * int(file.read().split("VmHWM:")[1].split()[0])


def run_python(*words, **options):
    """Run another Python with these arguments to its end; return its output."""
    given = {"capture_output": True, "text": True, "timeout": 600, **options}
    return subprocess.run([sys.executable, *words], **given)


def wait_for(condition, seconds=240.0):
    """Poll until the condition is true; return its value."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return found


def ranks_of(launcher):
    """Process ids of the live ranks that this launcher has started, in their order."""
    found = []
    for process in psutil.Process(launcher).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # the process has ended meanwhile
            word, _, number = process.name().partition(" ")
            if word == "rank" and process.status() != psutil.STATUS_ZOMBIE:
                found.append((int(number), process.pid))
    return [pid for _, pid in sorted(found)]
