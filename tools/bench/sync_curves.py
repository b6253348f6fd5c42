"""Compare the loss of every sync method with synchronous training, for the same seeds.

    python tools/bench/sync_curves.py [--steps 1200] [--batch 64] [--seeds 3] [--methods sync,bf16,diloco,...] [--out FOLDER] [--json FILE]

Each run is the train command on two ranks of this machine. It has the model, data, schedule and
batches of the synchronous run with the same seed; only the section `sync` differs. The loss is the
validation loss of the shared parameters. Finished runs are not repeated. For each method, the
output has the mean loss over seeds; the mean and the spread of the gap to the synchronous run with
the same seed; and the bytes sent, in units of exact fp32 gradients.

Four bits every step, on 3.4 M parameters:

    python tools/bench/sync_curves.py --methods bf16,int8,int4,int4_without_feedback --words "model.dim=256 model.n_layers=4 \\
        model.n_heads=8 model.n_kv_heads=8 model.hidden_dim=704"
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from parallel2d.hooks import Hook, RunView
from parallel2d.parallel.sync.methods import error_feedback

ROOT = Path(__file__).resolve().parents[2]
JOB = [
    "strategy=ddp",
    "launch.nproc_per_node=2",
    "model=llama_debug",
    "model.dim=64",
    "model.n_layers=2",
    "model.n_heads=4",
    "model.n_kv_heads=2",
    "model.hidden_dim=176",
    "train.seq_len=64",
    "optimizer.lr=2e-3",
    "scheduler.warmup_steps=60",
    "checkpoint.enabled=false",
    "metrics.console=silent",
    "metrics.tensorboard=false",
    "train.validate_batches=32",
]
METHODS = {
    "sync": "",
    "bf16": "sync.wire=bf16",
    "int8": "sync.wire=int8",
    "int4": "sync.wire=int4",
    # A control that must have a higher loss, because rounding errors are dropped.
    "int4_without_feedback": "sync.wire=int4 train.hooks=[tools.bench.sync_curves:WithoutFeedback]",
    "split_bf16": "strategy=hybrid_full mesh.shard=1 sync.wire=bf16",
    "diloco": "sync=diloco",
    "diloco_bf16": "sync=diloco sync.wire=bf16",
    "diloco_int8": "sync=diloco sync.wire=int8",
    "diloco_int4": "sync=diloco sync.wire=int4",
    "streaming": "sync=diloco sync.fragments=3 sync.delay=5",
    "streaming_int4": "sync=diloco sync.wire=int4 sync.fragments=3 sync.delay=5",
    "every_100": "sync=diloco sync.every=100",
    # A control that must have a higher loss: with a short period, much momentum is worse than no
    # momentum.
    "every_16_momentum_0.9": "sync=diloco sync.every=16 sync.outer_momentum=0.9",
    "every_16_momentum_0": "sync=diloco sync.every=16 sync.outer_momentum=0",
}  # fmt: skip


class WithoutFeedback(Hook):
    """Turn off error feedback."""

    def start(self, run: RunView, step: int) -> None:
        error_feedback.ERROR_FEEDBACK_DECAY = 0.0


def words_of(method: str) -> list[str]:
    """Return the overrides of a method; ``outer-LR-MOMENTUM`` is diloco with these settings."""
    if method.startswith("outer-"):
        _, rate, momentum = method.split("-")
        return ["sync=diloco", f"sync.outer_lr={rate}", f"sync.outer_momentum={momentum}"]
    return METHODS[method].split()


def run(
    method: str, seed: int, steps: int, batch: int, more: list[str], folder: Path
) -> list[dict[str, float]]:
    """Return the rows of one run."""
    place = folder / f"{method}-{seed}-{steps}-{batch}"
    rows = place / "metrics.jsonl"
    if not (place / "done").exists():
        words = [
            *JOB,
            f"train.global_batch_size={batch}",
            f"train.steps={steps}",
            f"train.seed={seed}",
            f"hydra.run.dir={place}",
        ]
        words += [
            f"train.validate_every={max(steps // 20, 1)}",
            f"metrics.log_every={max(steps // 20, 1)}",
        ]
        words += [*more, *words_of(method)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run(
            [sys.executable, "-m", "parallel2d.train", *words, "checkpoint.resume=never"],
            check=True,
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        (place / "done").touch()
    return [json.loads(line) for line in rows.read_text().splitlines()]


def last_loss(rows: list[dict[str, float]]) -> float:
    return [row["validation/loss"] for row in rows if "validation/loss" in row][-1]


def summary(found: dict[str, list[list[dict[str, float]]]]) -> dict[str, dict[str, object]]:
    """Return, by method, its losses by seed, their gaps to synchronous training, and the factor of saved bytes."""
    exact = [last_loss(rows) for rows in found["sync"]]
    methods: dict[str, dict[str, object]] = {}
    for method, runs in found.items():
        losses = [last_loss(rows) for rows in runs]
        saved = [row["sync/compression"] for row in runs[0] if "sync/compression" in row]
        methods[method] = {
            "losses": losses,
            "gaps": [loss / base - 1 for loss, base in zip(losses, exact, strict=False)],
            "saved": saved[-1] if saved else 1.0,
        }
    return methods


def table(methods: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| method | loss | gap to synchronous | spread of the gap | bytes saved |",
        "|---|---|---|---|---|",
    ]
    for method, each in methods.items():
        losses, gaps = each["losses"], each["gaps"]
        if method == "sync":
            mean = statistics.fmean(losses)
            gap = f"| | {_spread([loss / mean for loss in losses])} (of the losses)"
        else:
            gap = f"| {statistics.fmean(gaps):+.2%} | {_spread(gaps)}"
        lines.append(f"| {method} | {statistics.fmean(losses):.4f} {gap} | {each['saved']:.1f} |")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    return f"± {statistics.stdev(values):.2%}" if len(values) > 1 else "-"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="sequences of a global batch")
    parser.add_argument(
        "--methods",
        default="sync,diloco,bf16,int8,split_bf16,diloco_int8,diloco_int4,streaming_int4,"
        "every_16_momentum_0.9,every_16_momentum_0",
    )
    parser.add_argument("--words", default="", help="overrides of every run, such as model.dim=128")
    parser.add_argument("--out", type=Path, default=Path("outputs/sync_curves"))
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers")
    arguments = parser.parse_args()
    names = ["sync", *(name for name in arguments.methods.split(",") if name != "sync")]
    found: dict[str, list[list[dict[str, float]]]] = {name: [] for name in names}
    for seed in range(arguments.seeds):
        for name in names:
            found[name].append(
                run(
                    name,
                    seed,
                    arguments.steps,
                    arguments.batch,
                    arguments.words.split(),
                    arguments.out.resolve(),
                )
            )
            print(
                f"{name}, seed {seed}: {last_loss(found[name][-1]):.4f}",
                file=sys.stderr,
                flush=True,
            )
    print(f"{arguments.steps} steps, {arguments.seeds} seeds")
    methods = summary(found)
    print(table(methods))
    if arguments.json:
        arguments.json.write_text(json.dumps(methods, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
