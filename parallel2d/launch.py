"""``python -m parallel2d.launch store | secret | run``.

``store`` runs a rendezvous store outside of the nodes of a job, so that any node may fail.
``secret`` makes the secret that the nodes of a job share. ``run`` starts a custom training script.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence

from parallel2d.base.store.address import DEFAULT_PORT
from parallel2d.base.store.secret import find_secret, new_secret, write_secret
from parallel2d.launching.run_command import exit_code_of


def main(
    arguments: Sequence[str] | None = None, program: str = "python -m parallel2d.launch"
) -> int:
    """Run one command and return the exit code.

    0 on success; 2 for arguments, an address or a secret that cannot be used; otherwise the exit
    codes of the train command.
    """
    parser = argparse.ArgumentParser(
        prog=program,
        description="Runs a training script on every rank, keeps the rendezvous of jobs outside of "
        "the nodes, or makes the secret that the nodes of a job share.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    text = "keep the rendezvous of jobs; stores no other data, needs few resources"
    add = commands.add_parser("store", help=text).add_argument
    add("--host", required=True, help="name or address to listen on; no other interface is opened")
    add("--port", type=int, default=DEFAULT_PORT, help="0: any free one (default: %(default)s)")
    text = "that the jobs have too (default: from PARALLEL2D_SECRET)"
    add("--secret-file", metavar="FILE", help=text)
    text = "without a secret: any process that reaches it controls the jobs"
    add("--insecure", action="store_true", help=text)
    text = "make a new secret, in a file that only you can read"
    add = commands.add_parser("secret", help=text).add_argument
    text = "to write to, for launch.secret_file; printed without it"
    add("file", nargs="?", metavar="FILE", help=text)
    text = "run a training script on every rank, and restart failed ranks"
    words = "launch.KEY=VALUE, as of train; then the script and its arguments"
    add = commands.add_parser("run", help=text).add_argument
    add("words", nargs=argparse.REMAINDER, metavar="...", help=words)
    options = parser.parse_args(arguments)
    return exit_code_of(lambda: _do(options))


def _do(options: argparse.Namespace) -> int:
    if options.command == "store":
        _serve(options)
    elif options.command == "run":
        from parallel2d.launching.scripts import start_script

        start_script(options.words)
    elif options.file is None:
        print(new_secret())
    else:
        path = options.file
        write_secret(path)
        give = "give every node a copy with mode 600"
        print(f"wrote {path}; {give}, and launch.secret_file={path}")
    return 0


def _serve(options: argparse.Namespace) -> None:
    from parallel2d.base.store.address import join_endpoint
    from parallel2d.base.store.client import StoreClient
    from parallel2d.base.store.server import StoreServer, log_dropped_connection
    from parallel2d.launching.rendezvous import OUTSIDE

    secret = find_secret(options.secret_file, options.insecure)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    server = StoreServer.at(options.host, options.port, secret, log_dropped_connection)
    StoreClient(server.address, secret).set(OUTSIDE, "1")
    endpoint = join_endpoint(options.host, server.port)
    print(f"store listens on {endpoint}: launch.rdzv_endpoint={endpoint}", flush=True)
    ended.wait()


if __name__ == "__main__":
    sys.exit(main())
