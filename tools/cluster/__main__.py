"""Command line: ``python -m tools.cluster run|clean|status``. See docs/cluster.md."""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import shlex
import sys
import time

from tools.cluster import leftovers
from tools.cluster.cluster import Cluster, why_not
from tools.cluster.endings import until_signalled
from tools.cluster.faults import Schedule, parse_fault
from tools.cluster.job import LAUNCHERS
from tools.cluster.network import ClusterError, Network, parse_rate


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="run a job on several nodes of this machine",
        usage="%(prog)s [options] -- WORDS OF THE JOB",
    )
    run.add_argument("--nodes", type=int, default=2)
    run.add_argument(
        "--ranks", default="1", help="workers per node: a number, or one per node such as 3,1"
    )
    run.add_argument(
        "--rate",
        help="of each node's link in each direction, such as 200mbit; default: as fast as the machine",
    )
    run.add_argument("--launcher", choices=LAUNCHERS, default="torchrun", help="torchrun: WORDS follow `torchrun`; "
                     "own: `python WORDS launch.nnodes=...`; none: WORDS are a command that runs on every node")  # fmt: skip
    run.add_argument(
        "--min-nodes", type=int, help="the job goes on with this many nodes; default: all"
    )
    run.add_argument(
        "--max-restarts", type=int, help="default: what the launcher takes by itself (torchrun: 0)"
    )
    run.add_argument(
        "--store",
        choices=("node0", "outside"),
        default="node0",
        help="who hosts the rendezvous store",
    )
    run.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="'at=30s kill-worker node=1 rank=0'",
        help="can be repeated",
    )
    run.add_argument(
        "--output", help="folder for logs and counters; default: outputs/cluster/DATE-TIME"
    )
    run.add_argument(
        "--counters-every",
        type=float,
        metavar="SECONDS",
        help="write counters.jsonl, a time series",
    )
    run.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="end the job after this long, exit code 124",
    )
    run.add_argument("words", nargs="+", help=argparse.SUPPRESS)
    commands.add_parser("clean", help="remove what killed tools left behind")
    commands.add_parser("status", help="running clusters and their byte counters, as JSON")
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
    output = options.output or os.path.join(
        "outputs", "cluster", time.strftime("%Y-%m-%d-%H-%M-%S")
    )
    cluster = Cluster(
        options.nodes, ranks if len(ranks) > 1 else ranks[0], rate=options.rate, store=options.store, output=output,
        echo=lambda line: print(line, flush=True),
    )  # fmt: skip
    with cluster:
        for limitation in cluster.limitations:
            print(f"[cluster] {limitation}", flush=True)
        if options.counters_every is not None:
            cluster.record_counters(options.counters_every)
        job = cluster.run(
            options.words,
            launcher=options.launcher,
            min_nodes=options.min_nodes,
            max_restarts=options.max_restarts,
        )
        schedule = Schedule(cluster, faults)
        begun = time.monotonic()
        timed_out = False
        try:
            while schedule.error is None and any(code is None for code in job.poll().values()):
                if options.timeout is not None and time.monotonic() - begun > options.timeout:
                    timed_out = True
                    break
                time.sleep(0.05)
        finally:
            schedule.stop()
            cluster_counters = cluster.counters()
            report = {
                "command": shlex.join(options.words), "nodes": options.nodes, "ranks": cluster.ranks, "rate": cluster.rate,
                "launcher": options.launcher, "limitations": cluster.limitations, "seconds": round(time.monotonic() - begun, 3),
                "exit_codes": {cluster.nodes[node].name: code for node, code in job.poll().items()}, "events": cluster.events,
                "counters": cluster_counters,
            }  # fmt: skip
            with open(os.path.join(output, "counters.json"), "w") as file:
                json.dump(report, file, indent=1)
        if schedule.error is not None:
            raise ClusterError(f"a fault could not be carried out: {schedule.error}")
        if timed_out:
            print(f"[cluster] not done after {options.timeout:g} s; logs in {output}", flush=True)
            return 124
        codes = {node: code for node, code in job.wait().items() if node not in cluster.killed}
    for fault in schedule.waiting:
        print(f"[cluster] the job ended before its time came: {fault.kind}", flush=True)
    for name, devices in cluster_counters.items():
        sent = ", ".join(
            f"{counts['tx_bytes']:,} bytes over {device}"
            for device, counts in sorted(devices.items())
        )
        print(f"[cluster] {name} sent {sent}", flush=True)
    print(
        f"[cluster] exit codes {report['exit_codes']}; logs and counters.json in {output}",
        flush=True,
    )
    return next((code if code > 0 else 128 - code for code in codes.values() if code), 0)


def _status() -> None:
    found = {}
    for tag, state in leftovers.states().items():
        if state["alive"]:
            network = Network(tag, state["hosts"], ipaddress.IPv4Network(state["subnet"]))
            found[tag] = {
                "pid": state["pid"],
                "subnet": state["subnet"],
                "counters": {h: network.counters(h) for h in state["hosts"]},
            }
    print(json.dumps(found, indent=1))


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        if (reason := why_not()) is not None:
            raise ClusterError(reason)
        if options.command == "clean":
            removed = leftovers.clean()
            print("\n".join(f"removed {name}" for name in removed) or "nothing to remove")
        elif options.command == "status":
            _status()
        else:
            return until_signalled(lambda: _run(options))
    except ClusterError as error:
        print(f"tools.cluster: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
