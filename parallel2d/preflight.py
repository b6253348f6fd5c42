"""``python -m parallel2d.preflight``: check a cluster before training.

The command is started like the train command: once on every node, or by torchrun or srun as every
rank.
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from parallel2d.base.config import TrainConfig
from parallel2d.base.config.composition import compose
from parallel2d.base.config.overrides import quoted
from parallel2d.base.errors import ConfigError
from parallel2d.base.exit_codes import FAILED, INTERRUPTED, INVALID
from parallel2d.base.files import for_terminal
from parallel2d.base.launcher_environment import RankIdentity, find_rank
from parallel2d.instruments.preflight.self_check import check_runs, chosen_checks
from parallel2d.launching.failures import WorkersFailed, failures_reported_once
from parallel2d.launching.launcher import start_node
from parallel2d.launching.processes import end_with_parent, open_standard_streams, workers_per_node
from parallel2d.launching.rank_processes import start_server

# Option -> key of train, type, meaning.
_LAUNCHING: dict[str, tuple[str, type, str]] = {
    "nnodes": ("launch.nnodes", int, "number of nodes (default 1: only this machine)"),
    "endpoint": ("launch.rdzv_endpoint", str, "HOST:PORT where nodes meet, an address of one"),
    "nproc": ("launch.nproc_per_node", int, "ranks per node (default: one per GPU, 4 without)"),
    "timeout": ("launch.rendezvous_timeout", float, "seconds to wait for others (default 60)"),
    "secret-file": ("launch.secret_file", str, "of the job (default: PARALLEL2D_SECRET, or none)"),
}


def parser(program: str) -> argparse.ArgumentParser:
    """Return the argument parser; ``program`` is the name of the command."""
    words = argparse.ArgumentParser(
        prog=program,
        allow_abbrev=False,
        description="Is this cluster fit to train on? Start it as train: once on every node, or by "
        "torchrun or srun as every rank. Exit code: 0 fit, 1 not fit, 2 wrong arguments.",
    )
    words.add_argument(
        "words", nargs="*", metavar="ARGUMENT", help="of train, for the job that the check is for"
    )
    for option, (key, kind, meaning) in _LAUNCHING.items():
        words.add_argument(f"--{option}", dest=key, type=kind, metavar="X", help=meaning)
    words.add_argument("--run-dir", default=".", help="where runs will be written (default: here)")
    words.add_argument("--seconds", type=float, default=0.3, help="of a measurement (default 0.3)")
    words.add_argument("--largest-mib", type=float, default=16.0, help="of a collective (16)")
    words.add_argument("--write", metavar="FILE", help="measure all that cluster=FILE (YAML) needs")
    words.add_argument("--json", action="store_true", help="print everything as JSON instead")
    words.add_argument("--strict", action="store_true", help="warnings count as not fit")
    words.add_argument("--self-check", action="store_true", help="check training here instead")
    words.add_argument("--only", metavar="CHECK,...", help="these checks of the self-check")
    # File for the exit code of the ranks, read by their launcher.
    words.add_argument("--verdict", help=argparse.SUPPRESS)
    return words


def main(
    arguments: Sequence[str] | None = None, program: str = "python -m parallel2d.preflight"
) -> int:
    """Return the exit code: 0 all checks passed, 1 a check failed, 2 wrong arguments, 130
    interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    open_standard_streams()
    try:
        given, config = understand(words, program)
        identity = find_rank()
    except ConfigError as error:
        print(f"parallel2d: {for_terminal(error)}", file=sys.stderr)
        return INVALID
    if identity is not None:
        return _take_part(identity, given, config)
    try:
        if given.self_check:
            return _check_training(words, given, config)
        return _start_ranks(words, config)
    except (ConfigError, WorkersFailed) as error:
        print(f"parallel2d: on {socket.gethostname()}: {for_terminal(error)}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def understand(words: Sequence[str], program: str) -> tuple[argparse.Namespace, TrainConfig]:
    """Return the arguments and the job that they describe. Raises `ConfigError`."""
    given = parser(program).parse_intermixed_args(words)
    keys = ["launch.rendezvous_timeout=60", "launch.insecure=true", *given.words]
    for key, _, _ in _LAUNCHING.values():
        value = getattr(given, key)
        if value is not None:
            keys.append(f"{key}={quoted(value)}")
    path = given.write or "cluster.yaml"
    is_fine = {
        f"--write={path} must end with .yaml, as cluster=FILE.yaml does": (
            path.endswith((".yaml", ".yml"))
        ),
        f"--write={path} cannot be written": (
            not given.write or os.access(os.path.dirname(path) or ".", os.W_OK)
        ),
        f"--seconds={given.seconds:g} must be above 0 and at most 10": 0 < given.seconds <= 10,
        f"--largest-mib={given.largest_mib:g} must be from 0.0625 to 1024": (
            0.0625 <= given.largest_mib <= 1024
        ),
        "--self-check has no --json": not given.self_check or not given.json,
        f"--self-check --write={given.write} adds to a cluster file, and there is none; write it "
        "first, without --self-check": not (given.self_check and given.write)
        or os.path.exists(path),
        "--only needs --self-check": given.self_check or not given.only,
    }
    if not all(is_fine.values()):
        raise ConfigError("\n".join(itertools.filterfalse(is_fine.get, is_fine)))
    chosen_checks(given.only)
    composition = compose(keys)
    if composition is None:
        raise ConfigError("the check is for one job: use one value for each key")
    settings = composition.config.launch
    # The check needs all nodes. A restart would only repeat a failed check.
    settings.nnodes, settings.max_restarts = settings.node_range[1], 0
    return given, composition.config


def _start_ranks(words: Sequence[str], config: TrainConfig) -> int:
    """Start the ranks of this node as the train command does, and wait until they end. Return their
    exit code."""
    start_server()
    workers = workers_per_node(config.launch)
    with tempfile.TemporaryDirectory(prefix="parallel2d-") as folder:
        verdict = Path(folder, "verdict")
        own = [*words, f"--verdict={verdict}"]
        start_node(config, own, workers, "parallel2d.preflight:main")
        return int(verdict.read_text())


def _check_training(words: Sequence[str], given: argparse.Namespace, config: TrainConfig) -> int:
    """Run the self-check: first in the ranks of this node, then, on a single node, with the train
    command. Return the exit code."""
    try:
        code = _start_ranks(words, config)
    except WorkersFailed as error:
        code = 1
        # completes the line of the check that has started
        print(f" FAILED: {for_terminal(error)}", flush=True)
    if config.launch.nnodes == 1:
        ranks = workers_per_node(config.launch)
        passed = check_runs(chosen_checks(given.only), ranks, given.write)
        code = max(code, int(not passed))
    print("self-check: FAILED" if code else "self-check: no check failed", flush=True)
    return code


def _take_part(identity: RankIdentity, given: argparse.Namespace, config: TrainConfig) -> int:
    """Run the checks in this rank, together with the other ranks. Return the exit code."""
    from torch.distributed import DistError

    from parallel2d.base.runtime import connect, process_group
    from parallel2d.instruments.preflight.check import ClusterCheck
    from parallel2d.instruments.preflight.gradient_checks import check_gradients

    settings = config.launch
    if identity.launcher == "torchrun":
        end_with_parent()
    with failures_reported_once(identity, None):
        store = connect(identity, settings)
    with failures_reported_once(identity, store):
        try:
            with process_group(
                identity,
                store,
                timeout_s=settings.rendezvous_timeout,
                host_id=settings.host_id,
                first_timeout_s=settings.rendezvous_timeout,
            ) as runtime:
                if given.self_check:
                    code = check_gradients(runtime, given)
                else:
                    code = ClusterCheck(runtime, given).run(config)
        except RuntimeError as error:
            if "gloo" not in str(error).lower() and not isinstance(error, DistError):
                raise
            text = str(error).partition("\n")[0]
            where = f"rank {identity.rank} on {socket.gethostname()}"
            raise ConfigError(f"{where}: {text}") from None
    if given.verdict is None:
        return code
    if identity.local_rank == 0:
        Path(given.verdict).write_text(str(code))
    return 0


if __name__ == "__main__":
    sys.exit(main())
