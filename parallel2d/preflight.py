"""``python -m parallel2d.preflight``: started once on every node, by hand or by a launcher."""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from parallel2d.cluster_check.slurm import defaults_of_launcher
from parallel2d.errors import ConfigError
from parallel2d.files import for_terminal

if TYPE_CHECKING:
    from parallel2d.cluster_check.check import CheckOutcome


def parser(program: str) -> argparse.ArgumentParser:
    """The arguments of the command, which was called as ``program``."""
    words = argparse.ArgumentParser(
        prog=program,
        description="Is this cluster fit to train on? Start it once on every node. Exit code: 0 "
        "fit, 1 not fit, 2 wrong arguments.",
        epilog="Under srun (--ntasks-per-node=1) and torchrun (--nproc-per-node=1) the first "
        "three are taken from the launcher.",
    )
    words.add_argument(
        "--nnodes", type=int, metavar="N", help="number of nodes (default 1: this machine alone)"
    )
    words.add_argument(
        "--endpoint",
        metavar="HOST:PORT",
        help="where the nodes meet; the node that owns the address listens there",
    )
    words.add_argument(
        "--node-rank",
        type=int,
        metavar="K",
        help="this node's number from 0 (default: in the order of arrival)",
    )
    words.add_argument(
        "--nproc", type=int, metavar="N", help="ranks per node (default: one per GPU, 4 without)"
    )
    words.add_argument(
        "--run-dir",
        default=".",
        metavar="PATH",
        help="where runs will be written (default: the current folder)",
    )
    words.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds to wait for other nodes (default 60)",
    )
    words.add_argument(
        "--seconds",
        type=float,
        default=0.3,
        metavar="S",
        help="measuring time per link and direction (default 0.3)",
    )
    words.add_argument(
        "--name", metavar="WORD", help="tells apart several checks on one outside store"
    )
    words.add_argument(
        "--secret-file",
        metavar="FILE",
        help="of the job; by default PARALLEL2D_SECRET, or everybody takes part",
    )
    words.add_argument(
        "--write",
        metavar="FILE",
        help="write what was measured as a cluster file (YAML); node 0 does",
    )
    words.add_argument(
        "--calibrate",
        metavar="FILE",
        help="instead of the check: start the ranks, measure compute and collectives, and write a "
        "file for cluster=FILE (YAML); node 0 does",
    )
    words.add_argument(
        "--largest-mib",
        type=float,
        default=16.0,
        metavar="MIB",
        help="with --calibrate: the largest collective (default 16)",
    )
    words.add_argument(
        "--json", action="store_true", help="print everything as JSON instead; node 0 does"
    )
    words.add_argument("--strict", action="store_true", help="warnings count as not fit")
    return words


def main(
    arguments: Sequence[str] | None = None, program: str = "python -m parallel2d.preflight"
) -> int:
    """Returns the exit code: 0 fit, 1 not fit, 2 wrong arguments."""
    given = parser(program).parse_args(arguments)
    try:
        known = defaults_of_launcher(os.environ)
        typed = {
            "nodes": given.nnodes,
            "endpoint": given.endpoint,
            "node": given.node_rank,
            "name": given.name,
        }
        typed["secret_file"] = given.secret_file
        known |= {key: value for key, value in typed.items() if value is not None}
        _refuse(given, known)
    except ConfigError as error:
        print(f"preflight: {for_terminal(error)}", file=sys.stderr)
        return 2

    from parallel2d.cluster_check.check import NotFit
    from parallel2d.cluster_check.meeting import NodeMissing

    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    try:
        if given.calibrate is not None:
            return _calibrate(given, known, program)
        return _check(given, known)
    except ConfigError as error:
        print(f"preflight: {for_terminal(error)}", file=sys.stderr)
        return 2
    except (NotFit, NodeMissing) as error:
        print(f"preflight on {socket.gethostname()}: {for_terminal(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _check(given: argparse.Namespace, known: dict[str, Any]) -> int:
    """Checks, and prints what was found. Returns the exit code."""
    from parallel2d.cluster_check.check import Request, check
    from parallel2d.cluster_check.outcome import show, to_json, verdict_of_other_node

    request = Request(
        ranks_per_node=given.nproc,
        run_dir=os.path.abspath(given.run_dir),
        timeout_s=given.timeout,
        seconds=given.seconds,
        **known,
    )
    outcome = check(request)
    if outcome.node != 0:
        print(for_terminal(verdict_of_other_node(outcome, socket.gethostname())), file=sys.stderr)
    elif given.json:
        print(json.dumps(to_json(outcome)))
    else:
        show(outcome)
    if outcome.node == 0 and given.write and not _is_written(given, outcome):
        return 2
    return 0 if outcome.flawless or (outcome.fit and not given.strict) else 1


def _is_written(given: argparse.Namespace, outcome: CheckOutcome) -> bool:
    """Writes the cluster file; prints why where it cannot be written."""
    from parallel2d.cluster_check.outcome import write_cluster_file
    from parallel2d.launch.processes import CPU_WORKERS

    ranks = given.nproc or len(outcome.reports[0].facts.gpus) or CPU_WORKERS
    try:
        write_cluster_file(given.write, outcome, ranks)
    except OSError as error:
        _print_unwritable(given.write, error)
        return False
    return True


def _print_unwritable(path: str, error: OSError) -> None:
    print(f"preflight: cannot write {path}: {error.strerror}", file=sys.stderr)


def _calibrate(given: argparse.Namespace, known: dict[str, Any], program: str) -> int:
    """Measures, and writes the cluster file on node 0. Returns the exit code."""
    from parallel2d.calibration.measurement import calibrate, write_calibrated
    from parallel2d.cluster_check.check import Request

    request = Request(
        ranks_per_node=given.nproc, timeout_s=given.timeout, seconds=given.seconds, **known
    )
    try:
        measured = calibrate(request, int(given.largest_mib * 2**20))
        if measured is None:
            return 0
        name = os.path.splitext(os.path.basename(given.calibrate))[0]
        command = f"{program} --nnodes {request.nodes} --nproc {measured.ranks_per_node}"
        command += f" --seconds {given.seconds:g} --largest-mib {given.largest_mib:g}"
        write_calibrated(given.calibrate, measured, name, f"{command} --calibrate {name}.yaml")
    except OSError as error:
        _print_unwritable(given.calibrate, error)
        return 2
    print(f"written: {given.calibrate}; plan with cluster={given.calibrate}")
    return 0


def _refuse_calibration(given: argparse.Namespace) -> None:
    path = given.calibrate
    if not path.endswith((".yaml", ".yml")):
        raise ConfigError(f"--calibrate={path} must end with .yaml, as cluster=FILE.yaml does")
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path) or not os.access(folder, os.W_OK):
        raise ConfigError(f"--calibrate={path} cannot be written")
    if not 0.0625 <= given.largest_mib <= 1024:
        raise ConfigError(f"--largest-mib={given.largest_mib:g} must be from 0.0625 to 1024")
    if given.seconds > 2:
        raise ConfigError(f"--seconds={given.seconds:g} must be at most 2 with --calibrate")
    for name in ("write", "json", "strict"):
        if getattr(given, name):
            raise ConfigError(f"--{name} is of the check, which --calibrate does not make")


def _refuse_nodes(known: dict[str, object]) -> None:
    nodes, node = known.get("nodes", 1), known.get("node")
    assert isinstance(nodes, int)
    if nodes < 1:
        raise ConfigError(f"--nnodes={nodes} must be at least 1")
    if nodes > 1 and not known.get("endpoint"):
        raise ConfigError(
            f"--nnodes={nodes} needs --endpoint HOST:PORT, where HOST is an address of one of the "
            "nodes"
        )
    if isinstance(node, int) and not 0 <= node < nodes:
        raise ConfigError(f"--node-rank={node} must be from 0 to {nodes - 1} (--nnodes={nodes})")


def _refuse(given: argparse.Namespace, known: dict[str, object]) -> None:
    _refuse_nodes(known)
    if given.nproc is not None and given.nproc < 1:
        raise ConfigError(f"--nproc={given.nproc} must be at least 1")
    if given.calibrate is not None:
        _refuse_calibration(given)
    for name in ("timeout", "seconds"):
        if not getattr(given, name) > 0:
            raise ConfigError(f"--{name}={getattr(given, name):g} must be above 0")
    if known.get("endpoint"):
        from parallel2d.store.address import split_endpoint

        split_endpoint(str(known["endpoint"]))


if __name__ == "__main__":
    sys.exit(main())
