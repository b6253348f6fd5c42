"""Draws the pictures of README.md and docs/concepts.md that hold no measurement.

python -m tools.docs.concept_pictures
"""

from __future__ import annotations

from tools.docs import svg

HOST, RANK = "#f3f5f8", "#ffffff"
LIGHT = {"replicate": "#fbe6d9", "shard": "#dce9f7", "none": svg.COMPUTE, "save": "#e5f2e2"}


def mesh() -> None:
    """Two nodes of four ranks: shard inside a node, replicate across nodes."""
    parts = [svg.text(20, 28, "hybrid on 2 nodes of 4 ranks", "bold 15px")]
    for node in range(2):
        top = 50 + 130 * node
        parts.append(svg.box(100, top, 560, 90, HOST))
        parts.append(svg.text(20, top + 40, f"node {node}", "bold 14px"))
        parts.append(svg.text(20, top + 58, f"replica {node}", "12px"))
        for rank in range(4):
            x = 120 + 136 * rank
            parts.append(svg.box(x, top + 16, 112, 58, RANK, svg.SHARD))
            name = f"rank {4 * node + rank}"
            parts.append(svg.text(x + 56, top + 40, name, "bold 13px", anchor="middle"))
            parts.append(svg.text(x + 56, top + 60, f"shard {rank}", "12px", anchor="middle"))
            if rank:
                parts.append(_arrow((x - 22, top + 45), (x - 2, top + 45), svg.SHARD))
            if node:
                parts.append(_arrow((x + 56, top - 38), (x + 56, top + 14), svg.REPLICATE))
    parts += [
        _arrow((20, 310), (56, 310), svg.SHARD),
        svg.text(66, 314, "shard axis, the fast link: all-gather of parameters,"),
        svg.text(66, 332, "reduce-scatter of gradients, once per block and micro-batch"),
        _arrow((20, 356), (56, 356), svg.REPLICATE),
        svg.text(66, 360, "replicate axis, the slow link: all-reduce of each rank's"),
        svg.text(66, 378, "shard of the gradients, once per global batch"),
    ]
    title = "Two nodes of four ranks; parameters are sharded inside a node and replicated across"
    svg.save("mesh.svg", 680, 396, title, parts)


def _arrow(start: tuple[float, float], end: tuple[float, float], color: str) -> str:
    return svg.line([start, end], color, 2, arrows="both")


def strategies() -> None:
    """Which part of the parameters each of four ranks on two nodes holds."""
    rows = {
        "ddp": ((1, 1, 1, 1), "every rank holds all; gradients cross the slow link whole"),
        "zero2, zero3": ((0.25,) * 4, "a quarter each; every all-gather crosses the slow link"),
        "hybrid, hybrid_zero2": ((0.5,) * 4, "half each; the shard of the gradients crosses"),
        "hybrid_full": ((0.5,) * 4, "as hybrid; each rank keeps a quarter of the moments"),
    }
    parts = [svg.text(20, 28, "Parameters on 2 nodes of 2 ranks", "bold 15px")]
    for node in range(2):
        parts.append(svg.text(242 + 128 * node, 54, f"node {node}", "12px", anchor="middle"))
    for index, (name, (shares, meaning)) in enumerate(rows.items()):
        top = 64 + 70 * index
        parts.append(svg.text(20, top + 28, name, "bold 13px", "monospace"))
        parts += _held(top, shares)
        parts.append(svg.text(186, top + 60, meaning, "12px"))
    svg.save("strategies.svg", 600, 350, "Which part of the parameters each rank holds", parts)


def _held(top: float, shares: tuple[float, ...]) -> list[str]:
    """Four ranks as frames; the filled part is what the rank holds."""
    parts = []
    for rank, share in enumerate(shares):
        x = 186 + 58 * rank + (12 if rank > 1 else 0)
        # With shares below 1 the parts of a group follow each other.
        first = (rank * share) % 1
        parts.append(svg.box(x, top + 4, 50, 40, RANK))
        parts.append(svg.box(x, top + 4 + 40 * first, 50, 40 * share, svg.SHARD, "none"))
    return parts


def step() -> None:
    """What moves when in a step of hybrid with two micro-batches."""
    blocks = [
        ("micro-batch 1", "forward", "shard", "all-gather"),
        ("", "backward", "shard", "all-gather, reduce-scatter"),
        ("micro-batch 2", "forward", "shard", "all-gather"),
        ("", "backward", "shard", "all-gather, reduce-scatter"),
    ]
    parts = [svg.text(20, 28, "One global batch of two micro-batches, hybrid", "bold 15px")]
    for row, name in enumerate(("compute", "shard axis", "replicate axis")):
        parts.append(svg.text(20, 88 + 46 * row, name, "13px"))
    x = 130.0
    for batch, phase, axis, collective in blocks:
        width = 90 if phase == "forward" else 150
        parts.append(svg.text(x, 56, batch, "12px"))
        parts += _cell(x, 66, width, phase, LIGHT["none"])
        parts += _cell(x, 112, width, collective, LIGHT[axis])
        x += width + 4
    parts += _cell(x - 134, 158, 130, "all-reduce", LIGHT["replicate"])
    parts += _cell(x, 66, 120, "agree, clip, update", LIGHT["none"])
    parts.append(
        svg.text(130, 218, "The all-reduce starts while the last backward still computes.", "12px")
    )
    svg.save("step.svg", 770, 236, "What moves when in a step of two micro-batches", parts)


def _cell(x: float, y: float, width: float, words: str, fill: str) -> list[str]:
    return [
        svg.box(x, y, width, 34, fill),
        svg.text(x + width / 2, y + 21, words, "11.5px", anchor="middle"),
    ]


def recovery() -> None:
    """A node is lost: the steps since the newest copy are repeated on the nodes that remain."""
    parts = [svg.text(20, 28, "A node is lost, and comes back", "bold 15px")]
    for node in range(2):
        parts.append(svg.text(20, 88 + 46 * node, f"node {node}", "13px"))
    parts += _cell(90, 66, 220, "steps 1 to 23, copy in memory at 20", LIGHT["none"])
    parts += _cell(90, 112, 220, "steps 1 to 23", LIGHT["none"])
    parts.append(svg.text(318, 134, "lost", "bold 13px", color="#b3261e"))
    parts += _cell(314, 66, 90, "ranks restart", LIGHT["replicate"])
    parts += _cell(408, 66, 170, "steps 21 to 40, alone", LIGHT["none"])
    parts += _cell(582, 66, 70, "save", LIGHT["save"])
    parts += _cell(582, 112, 70, "joins", LIGHT["save"])
    parts += _cell(656, 66, 94, "41, 42, …", LIGHT["none"])
    parts += _cell(656, 112, 94, "41, 42, …", LIGHT["none"])
    same = "The global batch stays the same: alone, node 0 runs twice as many micro-batches."
    parts.append(svg.text(90, 172, same, "12px"))
    parts.append(svg.text(90, 190, "So the losses are those of a run without the fault.", "12px"))
    svg.save("recovery.svg", 770, 206, "What happens when a node is lost and comes back", parts)


if __name__ == "__main__":
    mesh()
    strategies()
    step()
    recovery()
