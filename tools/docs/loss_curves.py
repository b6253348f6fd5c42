"""Train one model on five layouts and draw their losses on one pair of axes.

    python -m tools.docs.loss_curves             # draws docs/benchmarks/loss_curves.json
    python -m tools.docs.loss_curves --measure   # trains first: five runs of some 30 seconds

Every run has the same seed and the same global batch, in fp32, on this machine's CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from matplotlib import pyplot

DOCS = Path(__file__).resolve().parents[2] / "docs"
MEASURED = DOCS / "benchmarks" / "loss_curves.json"
STEPS = 60
WORDS = f"train.steps={STEPS} train.validate_every=0 checkpoint.enabled=false"
LAYOUTS = {
    "one process": "launch.nproc_per_node=1",
    "ddp, 4 ranks": "strategy=ddp",
    "zero3, 4 ranks": "strategy=zero3",
    "hybrid, 2 replicas x 2 shards": "strategy=hybrid mesh.replicate=2 mesh.shard=2",
    "hybrid, 2 shards x 2 tensor ranks": (
        "strategy=hybrid mesh.replicate=1 mesh.shard=2 mesh.tensor=2"
    ),
}
# The line that is drawn first is the widest, so that each line stays visible below the next line.
STYLES = (("#d9d2bf", 13), ("#8fb8de", 9.5), ("#e39b63", 6.5), ("#5b9a57", 3.8), ("#222222", 1.3))


def measure() -> None:
    """Train every layout and write the losses of all steps."""
    losses = {}
    for name, words in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "parallel2d.train", *WORDS.split(), *words.split()]
            command += [f"hydra.run.dir={folder}/run", "metrics.console=silent"]
            subprocess.run(command, check=True)
            rows = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
            losses[name] = [json.loads(row)["loss"] for row in rows]
        assert len(losses[name]) == STEPS, name
        print(name, losses[name][-1], flush=True)
    MEASURED.write_text(json.dumps({"words": WORDS, "layouts": LAYOUTS, "losses": losses}) + "\n")


def largest_difference(losses: dict[str, list[float]]) -> float:
    """Return the largest difference between two layouts in one step, relative to the loss."""
    steps = zip(*losses.values(), strict=True)
    return max((max(step) - min(step)) / min(step) for step in steps)


def draw(losses: dict[str, list[float]]) -> None:
    """Draw all curves on one pair of axes."""
    pyplot.rcParams["svg.hashsalt"] = "loss_curves"  # the same picture from the same numbers
    figure, axes = pyplot.subplots(figsize=(7.9, 3.8))
    for (name, curve), (color, width) in zip(losses.items(), STYLES, strict=True):
        axes.plot(range(1, STEPS + 1), curve, color=color, linewidth=width, label=name)
    difference = f"largest relative difference in a step: {largest_difference(losses):.0e}"
    axes.set(xlabel="step", ylabel="loss", title=f"Five layouts; {difference}")
    axes.grid(axis="y", alpha=0.4)
    axes.legend(frameon=False)
    figure.tight_layout()
    picture = DOCS / "images" / "loss_curves.svg"
    figure.savefig(picture, metadata={"Date": None})
    print(f"wrote {picture}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true", help="train the five layouts first")
    if parser.parse_args().measure:
        measure()
    draw(json.loads(MEASURED.read_text())["losses"])
