"""Measure the cost of reading and preparing data, relative to the minimum work of any implementation.

    python tools/bench/data.py [--seconds 2] [--folder DIR]

The data is the source of Python's standard library, prepared into a temporary folder. The output is one Markdown
table per question:

* the reader, compared with slicing of a ``numpy.memmap``: both copy the same random windows into
  int64 arrays;
* the feed: the time that `next` waits for a batch if the loop computes as long as a small training
  step;
* ``prepare``, compared with only the tokenizer on the same documents, for bytes and for a byte-pair
  tokenizer that this script trains;
* a tensor group of two gloo processes: either both ranks read the same samples, or one rank reads
  and broadcasts.

Times are CPU seconds of the processes that work, or wall seconds if one process waits for another.
All figures are medians of five rounds.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from parallel2d.base.config import DataConfig
from parallel2d.training.data.feed import BatchFeed, BatchPlan
from parallel2d.training.data.opening import open_data
from parallel2d.training.data.prepare import folder_lock, prepare
from parallel2d.training.data.reading import find_units, read_unit
from parallel2d.training.data.sample_order import Order
from parallel2d.training.data.tokenizer import load_tokenizer

ROUNDS = 5


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its ended children."""
    own, children = (
        resource.getrusage(resource.RUSAGE_SELF),
        resource.getrusage(resource.RUSAGE_CHILDREN),
    )
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def rate(function: Callable[[int], object], tokens: int, seconds: float) -> float:
    """Return tokens per CPU second of ``function(step)``, the median of `ROUNDS` rounds."""
    found = []
    for repetition in range(ROUNDS + 1):
        begin, wall, calls = cpu_seconds(), time.perf_counter(), 0
        while time.perf_counter() - wall < seconds / ROUNDS:
            function(repetition * 100_000 + calls)
            calls += 1
        found.append(calls * tokens / (cpu_seconds() - begin))
    return statistics.median(found[1:])


def reader(folder: Path, seconds: float) -> None:
    """Print tokens per second of `SampleStream.read` and of slicing a memmap."""
    print(
        "| micro-batch | memmap slicing | reader | reader without hash | share |\n|---|---|---|---|---|"
    )
    for rows, length in ((8, 128), (8, 2048), (1, 8192)):
        stream = open_data(DataConfig(cache_dir=str(folder)), seq_len=length, seed=0).train
        store = next(iter(Path(folder).glob("stdlib-*")))
        tokens = np.memmap(store / "train-00000.tokens", dtype="<u2", mode="r")
        order = Order(len(stream), 0, "train/0")
        indices = order.index(np.arange(4096 * rows)).reshape(4096, rows)

        def raw(
            step: int,
            rows: int = rows,
            length: int = length,
            tokens: np.ndarray = tokens,
            indices: np.ndarray = indices,
        ) -> tuple[np.ndarray, np.ndarray]:
            inputs, targets = np.empty((rows, length), np.int64), np.empty((rows, length), np.int64)
            for row, index in enumerate(indices[step % 4096]):
                start = min(int(index) * length, len(tokens) - length - 1)
                inputs[row] = tokens[start : start + length]
                targets[row] = tokens[start + 1 : start + length + 1]
            return inputs, targets

        def read(step: int, rows: int = rows, stream: object = stream) -> object:
            return stream.read(range(step * rows, (step + 1) * rows))  # type: ignore[attr-defined]

        slicing, whole = (rate(function, rows * length, seconds) for function in (raw, read))
        hashing = stream._hash
        stream._hash = lambda inputs, targets, positions: np.zeros(1, np.uint64)  # type: ignore[assignment]
        unhashed = rate(read, rows * length, seconds)
        stream._hash = hashing
        print(
            f"| {rows} x {length} | {slicing / 1e6:.0f} M/s | {whole / 1e6:.0f} M/s | "
            f"{unhashed / 1e6:.0f} M/s | {whole / slicing:.2f} |"
        )


def feed(folder: Path) -> None:
    """Print the seconds that a step waits for its batch while the previous step computes."""
    print("\n| global batch | step | waited per step, median | largest |\n|---|---|---|---|")
    weight = torch.randn(512, 512)
    for batch, length in ((32, 128), (32, 2048)):
        stream = open_data(DataConfig(cache_dir=str(folder)), seq_len=length, seed=0).train
        plan = BatchPlan(
            global_batch_size=batch, micro_batch_size="auto", data_rank=0, data_ranks=1
        )
        batches = BatchFeed(stream, plan, "cpu")
        waits, steps = [], []
        for _ in range(200):
            begin = time.perf_counter()
            waits.append(batches.next().waited_s)
            for _ in range(8):
                weight = torch.tanh(weight @ weight)
            steps.append(time.perf_counter() - begin)
        batches.close()
        waits = waits[5:]
        print(
            f"| {batch} x {length} | {statistics.median(steps) * 1e3:.1f} ms | "
            f"{statistics.median(waits) * 1e3:.3f} ms | {max(waits) * 1e3:.3f} ms |"
        )


def preparing(folder: Path) -> None:
    """Print MB of text per CPU second of the tokenizer and of the complete preparation."""
    import tokenizers

    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|endoftext|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=4096, special_tokens=special, show_progress=False
    )
    config = DataConfig(workers=1)
    units, identity = find_units(config)
    texts = [
        document.utf8.decode()
        for unit in units
        for document in read_unit(unit, config, lambda *bad_row: None)
    ]
    library.train_from_iterator(texts[:100], trainer)
    library.save(str(folder / "tokenizer.json"))
    size = sum(len(text.encode()) for text in texts) / 1e6

    print("\n| tokenizer | alone | prepare | share |\n|---|---|---|---|")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for name in ("bytes", str(folder / "tokenizer.json")):
        tokenizer = load_tokenizer(name)
        rounds = ROUNDS if name == "bytes" else 2
        alone, whole = [], []
        for repetition in range(rounds):
            begin = cpu_seconds()
            for first in range(0, len(texts), 16):
                tokenizer.encode(texts[first : first + 16])
            alone.append(cpu_seconds() - begin)
            begin = cpu_seconds()
            output = folder / f"prepared-{tokenizer.name}-{repetition}"
            with folder_lock(output) as lock:
                prepare(replace(config, tokenizer=name), units, identity, output, lock)
            whole.append(cpu_seconds() - begin)
        one, other = statistics.median(alone), statistics.median(whole)
        print(
            f"| {tokenizer.name} | {size / one:.1f} MB/s | {size / other:.1f} MB/s | {one / other:.2f} |"
        )


def tensor_group(folder: Path) -> None:
    """Print the milliseconds until both ranks of a tensor group hold a micro-batch."""
    print("\n| micro-batch | each rank reads | one reads and broadcasts |\n|---|---|---|")
    for rows, length in ((8, 128), (8, 2048)):
        stream = open_data(DataConfig(cache_dir=str(folder)), seq_len=length, seed=0).train
        rendezvous = folder / f"rendezvous-{length}"
        child = os.fork()
        rank = int(child == 0)
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
        times: dict[bool, list[float]] = {False: [], True: []}
        for broadcast in (False, True):
            for step in range(200):
                dist.barrier()
                begin = time.perf_counter()
                if broadcast and rank:
                    tensors = torch.empty(2, rows, length, dtype=torch.int64)
                else:
                    batch = stream.read(range(step * rows, (step + 1) * rows))
                    tensors = (
                        torch.stack([batch.inputs, batch.targets]) if broadcast else batch.inputs
                    )
                if broadcast:
                    dist.broadcast(tensors, src=0)
                times[broadcast].append(time.perf_counter() - begin)
        dist.destroy_process_group()
        if rank:
            os._exit(0)
        os.waitpid(child, 0)
        each, sent = (statistics.median(times[kind]) * 1e3 for kind in (False, True))
        print(f"| {rows} x {length} | {each:.3f} ms | {sent:.3f} ms |")


def main() -> None:
    """Run every measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=2.0, help="per measured rate")
    parser.add_argument(
        "--folder", type=Path, help="where data is prepared; default: a temporary folder"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        data = open_data(DataConfig(cache_dir=str(folder)), seq_len=128, seed=0)
        print(f"{data.description}; {os.cpu_count()} cores\n")
        reader(folder, options.seconds)
        feed(folder)
        preparing(folder)
        tensor_group(folder)


if __name__ == "__main__":
    main()
