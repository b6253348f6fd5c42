"""Check training with delayed gradients against one process, and measure the seconds that the delay
adds to a step.

    torchrun --nproc-per-node=2 tools/bench/gpu/overlap.py [--precision bf16] [--compile] [--steps 10]

The output of each reduce-scatter is NaN until 8 products of large matrices are done on its stream.
If the shard axis has one rank, the same holds for each gradient. `python -m parallel2d.preflight
--self-check` runs the same check under the name `streams`; this script adds other precisions and
compiled blocks. The exit code is 1 if a gradient differs. *Late* is the time of a step of the Llama
of `step_flops.py` with this delay in every group, and *plain* the time without the delay. The
difference is the delay that backward does not hide. Two GPUs run `ddp` and one shard group; four or
more GPUs also run 2 x k. On CPU a tiny Llama shows that the script runs.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist
from against_torch import backend_for, parallelized, step_of, timed

from parallel2d import MeshSpec, ParallelConfig, build_mesh, setup, teardown
from parallel2d.base.config import CompileConfig
from parallel2d.base.device import name_of
from parallel2d.instruments.preflight.gradient_checks import compare, late_gradients


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--compile", action="store_true", help="each block")
    options = parser.parse_args()
    device = setup().device
    ranks = dist.get_world_size()
    if ranks % 2:
        parser.error(f"needs an even number of ranks, and here is {ranks}: use torchrun")
    rows, passed = [], True
    for sizes in dict.fromkeys([(2, ranks // 2), (1, ranks)]):
        config = ParallelConfig("hybrid", precision=options.precision, allow_cross_node=True)
        if options.compile:
            config.compile = CompileConfig("block", backend_for(device))
        spec = MeshSpec(replicate=sizes[0], shard=sizes[1])
        mesh = build_mesh(spec, "hybrid", device_type=device.type, allow_cross_node=True)
        found = compare(mesh, config, late=True)
        passed &= found.passed
        error = max(row.gradient for row in found.parameters.values())
        model = parallelized("hybrid", sizes, device, options.precision, options.compile)
        step = step_of(model, device)
        plain = timed(step, device, options.steps)
        with late_gradients(device):
            late = timed(step, device, options.steps)
        result = "equal" if found.passed else found.discrepancies[0].line()
        figures = f"{error:.1e} | {found.bounds['gradient']:.0e}"
        seconds = f"{plain.device:.4f} | {late.device:.4f}"
        rows.append(f"| {sizes[0]} x {sizes[1]} | {result} | {figures} | {seconds} |")
    if dist.get_rank() == 0:
        print(f"    torchrun --nproc-per-node={ranks} {' '.join(sys.argv)}\n")
        print(f"{ranks} x {name_of(device)}, torch {torch.__version__}\n")
        print("| mesh | gradients | largest error | bound | plain, seconds | late, seconds |")
        print("|---|---|---|---|---|---|")
        print("\n".join(rows))
    teardown()
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
