"""Command line: ``python -m tools.cluster run|clean``. See docs/cluster.md."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from tools.cluster import leftovers
from tools.cluster.cluster import Cluster, why_not
from tools.cluster.faults import Schedule, parse_fault
from tools.cluster.job import LAUNCHERS, Job
from tools.cluster.network import ClusterError, parse_rate

LAUNCHER_HELP = (
    "torchrun: WORDS follow `torchrun`; own: `python WORDS launch.nnodes=...`; "
    "none: WORDS are a command that runs on every node"
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    usage = "%(prog)s [options] -- WORDS OF THE JOB"
    run = commands.add_parser("run", help="run a job on several nodes of this machine", usage=usage)
    run.add_argument("--nodes", type=int, default=2)
    run.add_argument("--ranks", default="1", help="per node: a number, or one per node (3,1)")
    run.add_argument("--rate", help="of each link in each direction (200mbit); default: unlimited")
    run.add_argument("--launcher", choices=LAUNCHERS, default="torchrun", help=LAUNCHER_HELP)
    run.add_argument(
        "--min-nodes", type=int, help="the job continues with this number; default: all"
    )
    run.add_argument("--max-restarts", type=int, help="default: the launcher's (torchrun: 0)")
    run.add_argument(
        "--store", choices=("node0", "outside"), default="node0", help="host of the rendezvous"
    )
    run.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="'at=30s kill-worker node=1 rank=0'",
        help="can be repeated",
    )
    now = time.strftime("%Y-%m-%d-%H-%M-%S")
    run.add_argument(
        "--output", type=Path, default=Path("outputs", "cluster", now), help="for logs and counters"
    )
    run.add_argument(
        "--timeout", type=float, help="end the job after this number of seconds, code 124"
    )
    run.add_argument("words", nargs="+", help=argparse.SUPPRESS)
    commands.add_parser("clean", help="remove the remains of killed tools")
    return parser


def _run(options: argparse.Namespace) -> int:
    faults = [parse_fault(text) for text in options.fault]
    try:
        ranks = [int(part) for part in options.ranks.split(",")]
    except ValueError:
        raise ClusterError(
            f"--ranks={options.ranks} must be a number, or one per node such as 3,1"
        ) from None
    parse_rate(options.rate)
    if options.min_nodes is not None and not 1 <= options.min_nodes <= options.nodes:
        raise ClusterError(
            f"--min-nodes={options.min_nodes} must lie between 1 and --nodes={options.nodes}"
        )
    cluster = Cluster(
        options.nodes,
        ranks if len(ranks) > 1 else ranks[0],
        rate=options.rate,
        store=options.store,
        output=options.output,
        echo=lambda line: print(line, flush=True),
    )
    with cluster:
        job = cluster.run(
            options.words,
            launcher=options.launcher,
            min_nodes=options.min_nodes,
            max_restarts=options.max_restarts,
        )
        schedule = Schedule(cluster, faults)
        try:
            # If a signal arrives after this line, the counters are still written.
            print(f"[cluster] started on {len(cluster.nodes)} nodes", flush=True)
            has_ended = _wait(job, schedule, options.timeout)
        finally:
            schedule.stop()
            report = _report(cluster, job)
            (options.output / "counters.json").write_text(json.dumps(report, indent=1))
        if schedule.error is not None:
            raise ClusterError(f"a fault could not be carried out: {schedule.error}")
        if not has_ended:
            print(f"[cluster] not done after {options.timeout:g} s; logs in {options.output}")
            return 124
        codes = [code for node, code in job.wait().items() if node not in cluster.killed]
    for fault in schedule.waiting:
        print(f"[cluster] the job ended before its time came: {fault.kind}")
    for name, devices in report["counters"].items():
        print(f"[cluster] {name} sent {devices['eth0']['tx_bytes']:,} bytes to others")
    said = f"exit codes {report['exit_codes']}; logs and counters.json in {options.output}"
    print(f"[cluster] {said}", flush=True)
    failed = [code for code in codes if code]
    if not failed:
        return 0
    return failed[0] if failed[0] > 0 else 128 - failed[0]


def _wait(job: Job, schedule: Schedule, timeout: float | None) -> bool:
    """Wait until the job has ended or a fault has failed. Return False after ``timeout`` seconds."""
    begun = time.monotonic()
    while schedule.error is None and job.is_running():
        if timeout is not None and time.monotonic() - begun > timeout:
            return False
        time.sleep(0.05)
    return True


def _report(cluster: Cluster, job: Job) -> dict[str, Any]:
    return {
        "command": shlex.join(job.words),
        "nodes": len(cluster.nodes),
        "ranks": cluster.ranks,
        "rate": cluster.rate,
        "launcher": job.launcher,
        "exit_codes": {cluster.nodes[node].name: code for node, code in job.poll().items()},
        "events": cluster.events,
        "counters": cluster.counters(),
    }


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        if (reason := why_not()) is not None:
            raise ClusterError(reason)
        if options.command == "run":
            return _run(options)
        removed = leftovers.clean()
        print("\n".join(f"removed {name}" for name in removed) or "nothing to remove")
    except ClusterError as error:
        print(f"tools.cluster: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    leftovers.exit_on_signals()
    sys.exit(main())
