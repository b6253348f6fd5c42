"""``python -m parallel2d.launch store``: a rendezvous store outside of the nodes, so that no node is the one that must not die."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence

from parallel2d.config import ConfigError
from parallel2d.store import bound_store


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT. Returns the exit code: 0, or 2 for an address that cannot be listened on."""
    parser = argparse.ArgumentParser(prog="python -m parallel2d.launch", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    store = commands.add_parser("store", help="keep the rendezvous of jobs; holds no data of theirs, needs next to nothing")
    store.add_argument("--host", required=True, help="name or address to listen on; no other interface is opened")
    store.add_argument("--port", type=int, default=29500, help="0: any free one (default: 29500)")
    options = parser.parse_args(arguments)

    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    try:
        server = bound_store(options.host, options.port)
    except ConfigError as error:
        print(f"parallel2d: {error}", file=sys.stderr)
        return 2
    print(f"store listens on {options.host}:{server.port}: launch.rdzv_endpoint={options.host}:{server.port}", flush=True)
    ended.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
