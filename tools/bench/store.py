"""What a request to our store costs beside torch's TCPStore, on this machine.

    python tools/bench/store.py [--clients 4] [--seconds 2]

Processes that set, get and add in turns, first on one store, then on the other. Prints requests per second of all together.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from datetime import timedelta

from parallel2d.store.client import StoreClient
from parallel2d.store.secret import new_secret
from parallel2d.store.server import StoreServer


def ask(store, number: int, seconds: float) -> int:
    done, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        store.set(f"key/{number}", "value")
        store.get(f"key/{number}")
        store.add("count", 1)
        done += 3
    return done


def client(kind: str, address: str, secret: str, number: int, seconds: float, answers) -> None:
    if kind == "torch":
        from torch.distributed import TCPStore

        host, _, port = address.rpartition(":")
        store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=30))
    else:
        store = StoreClient(address, secret)
    answers.put(ask(store, number, seconds))


def measure(kind: str, address: str, secret: str, clients: int, seconds: float) -> float:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [
        context.Process(target=client, args=(kind, address, secret, n, seconds, answers))
        for n in range(clients)
    ]
    for process in processes:
        process.start()
    total = sum(answers.get(timeout=120) for _ in processes)
    for process in processes:
        process.join()
    return total / seconds


def main() -> None:
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--clients", type=int, default=4)
    words.add_argument("--seconds", type=float, default=2.0)
    options = words.parse_args()
    from torch.distributed import TCPStore

    secret = new_secret()
    torchs = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours = StoreServer.at("127.0.0.1", 0, secret)
    with tempfile.TemporaryDirectory() as folder:
        within = StoreServer.within(folder, secret)
        rows = [
            ("torch's TCPStore", "torch", f"127.0.0.1:{torchs.port}"),
            ("ours, TCP", "ours", ours.address),
        ]
        rows.append(("ours, Unix socket", "ours", within.address))
        print(f"| store | requests per second, {options.clients} clients |\n|---|---|")
        for name, kind, address in rows:
            print(
                f"| {name} | {measure(kind, address, secret, options.clients, options.seconds):,.0f} |",
                flush=True,
            )
        within.close()
    ours.close()


if __name__ == "__main__":
    main()
