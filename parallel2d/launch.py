"""``python -m parallel2d.launch store`` runs a rendezvous store outside of the nodes, so that any
node may fail. ``python -m parallel2d.launch secret`` writes the secret that the nodes of a job
share."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence

from parallel2d.base.errors import ConfigError
from parallel2d.base.files import for_terminal
from parallel2d.base.store.secret import find_secret, new_secret, write_secret


def main(
    arguments: Sequence[str] | None = None, program: str = "python -m parallel2d.launch"
) -> int:
    """Returns the exit code: 0; 2 for an address that cannot be listened on, or for a secret that
    cannot be read or written."""
    parser = argparse.ArgumentParser(
        prog=program,
        description="Keeps the rendezvous of jobs outside of the nodes, or makes the secret that "
        "the nodes of a job share.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    store = commands.add_parser(
        "store", help="keep the rendezvous of jobs; holds no data of theirs, needs next to nothing"
    )
    store.add_argument(
        "--host", required=True, help="name or address to listen on; no other interface is opened"
    )
    store.add_argument("--port", type=int, default=29500, help="0: any free one (default: 29500)")
    store.add_argument(
        "--secret-file",
        metavar="FILE",
        help="that the jobs have too (default: from PARALLEL2D_SECRET)",
    )
    store.add_argument(
        "--insecure",
        action="store_true",
        help="without a secret: whoever reaches it decides what the jobs run",
    )
    secret = commands.add_parser(
        "secret", help="make a new secret, in a file that only you can read"
    )
    secret.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="to write to, for launch.secret_file; printed without it",
    )
    options = parser.parse_args(arguments)
    try:
        if options.command == "store":
            _serve(options)
        elif options.file is None:
            print(new_secret())
        else:
            path = options.file
            write_secret(path)
            give = "give every node a copy with mode 600"
            print(f"wrote {path}; {give}, and launch.secret_file={path}")
    except ConfigError as error:
        print(f"parallel2d: {for_terminal(error)}", file=sys.stderr)
        return 2
    return 0


def _serve(options: argparse.Namespace) -> None:
    from parallel2d.base.store.address import join_endpoint
    from parallel2d.base.store.client import StoreClient
    from parallel2d.base.store.server import StoreServer, say_who_came
    from parallel2d.launching.rendezvous import OUTSIDE

    secret = find_secret(options.secret_file, options.insecure)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    server = StoreServer.at(options.host, options.port, secret, say_who_came)
    StoreClient(server.address, secret).set(OUTSIDE, "1")
    endpoint = join_endpoint(options.host, server.port)
    print(f"store listens on {endpoint}: launch.rdzv_endpoint={endpoint}", flush=True)
    ended.wait()


if __name__ == "__main__":
    sys.exit(main())
