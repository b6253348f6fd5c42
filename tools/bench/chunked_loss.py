"""What the loss in chunks of rows saves and costs: peak memory of a step and CPU-seconds, against the loss of whole logits.

    python tools/bench/chunked_loss.py [--vocab 131072] [--precision fp32] [--rounds 7]

One process, one thread, a small Llama with a large vocabulary; a step is forward and backward of one micro-batch. *Peak* is the most
that is allocated at once in a step, above what was there before, from the allocator's own reports of each allocation and release.
CPU-seconds are paired: in each round every variant runs one step, in turn, and a ratio is taken of steps of one round.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable

import torch
from activation_checkpointing import allocated
from torch import Tensor, nn

from parallel2d import ChunkedHead, build_on_meta, cross_entropy_sum
from parallel2d.models.llama import Llama

LLAMA = {"n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "max_seq_len": 2048}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build(dim: int, vocab: int, dtype: torch.dtype) -> nn.Module:
    with build_on_meta():
        model = Llama(dim=dim, hidden_dim=3 * dim, vocab_size=vocab, **LLAMA)
    model = model.to(dtype).to_empty(device="cpu")
    torch.manual_seed(0)
    for name, module in model.named_modules():
        model.init_weights(module, name)
    return model


def step(model: nn.Module, loss_of: Callable[[], Tensor]) -> None:
    loss_of().backward()
    model.zero_grad()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1024, help="of a micro-batch, in 2 sequences")
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dtype = DTYPES[arguments.precision]
    model = build(arguments.dim, arguments.vocab, dtype)
    tokens = torch.randint(0, arguments.vocab, (2, arguments.tokens // 2))

    def whole() -> Tensor:
        return cross_entropy_sum(model(tokens), tokens)

    variants: dict[str, Callable[[], None]] = {"whole": functools.partial(step, model, whole)}
    head = ChunkedHead(model, arguments.chunks[0], "output")
    head.compare(tokens, tokens)

    def chunked(chunk: int) -> Tensor:
        head.chunk = chunk
        return head.loss(tokens, tokens)

    for chunk in arguments.chunks:
        variants[str(chunk)] = functools.partial(step, model, functools.partial(chunked, chunk))
    peaks = {name: allocated(run)[1] for name, run in variants.items()}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(arguments.rounds):
        for name, run in variants.items():
            begin = time.process_time()
            run()
            seconds[name].append(time.process_time() - begin)
    logits = arguments.tokens * arguments.vocab * dtype.itemsize / 2**20
    print(
        f"{arguments.precision}: {arguments.tokens} tokens, vocabulary {arguments.vocab:,}, dim ",
        end="",
    )
    print(f"{arguments.dim}; the logits have {logits:.0f} MiB, {arguments.rounds} rounds\n")
    print(
        "| rows of a chunk | peak, MiB | below whole | CPU-s | CPU-s / whole, median | least | most |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in variants:
        ratios = [own / other for own, other in zip(seconds[name], seconds["whole"], strict=True)]
        saved = peaks["whole"] - peaks[name]
        print(
            f"| {name} | {peaks[name]:.0f} | {saved:.0f} | {statistics.median(seconds[name]):.3f} | "
            f"{statistics.median(ratios):.3f} | {min(ratios):.3f} | {max(ratios):.3f} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
