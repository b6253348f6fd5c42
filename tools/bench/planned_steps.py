"""Predicted and measured step times of many jobs on nodes joined by slow links, and how well the predictions order them.

    python tools/bench/planned_steps.py calibrate    # cluster files of both clusters at every rate
    python tools/bench/planned_steps.py predict      # predicted.json; commit it before measuring
    python tools/bench/planned_steps.py measure      # measured.json
    python tools/bench/planned_steps.py compare

Nodes are network namespaces of this machine (docs/cluster.md); `calibrate` and `measure` need root. All jobs of a cluster and rate
live in one process per rank and take turns, so that what else the machine does falls on all. A round is one period for sync=diloco
and `--steps` steps for the others; the measured figure is the median over rounds of the mean step. `--jobs second` takes other jobs,
for a prediction after the model was changed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

FOLDER = ROOT / "docs/benchmarks/planned_steps"
MARK = "PLANNED "
EVERY = 4
RATES = (50, 200, 1000)
CLUSTERS = {"2x2": (2, 2), "4x1": (4, 1)}
BASE = [
    "model=llama_debug",
    "model.vocab_size=1024",
    "model.max_seq_len=32",
    "train.seq_len=32",
    "optimizer=sgd",
    "train.micro_batch_size=1",
    "mesh.allow_cross_node=true",
    "plan.verify=false",
    "launch.insecure=true",
]
FOUR, EIGHT = "train.global_batch_size=4", "train.global_batch_size=8"
DILOCO = f"sync=diloco sync.every={EVERY} {FOUR}"
JOBS: dict[str, dict[str, str]] = {
    "2x2": {
        "hybrid": f"strategy=hybrid {FOUR}",
        "hybrid_layer": f"strategy=hybrid bucketing=layer {FOUR}",
        "hybrid_zero2": f"strategy=hybrid_zero2 {FOUR}",
        "hybrid_full": f"strategy=hybrid_full {FOUR}",
        "hybrid_bf16": f"strategy=hybrid sync.wire=bf16 {FOUR}",
        "hybrid_int8": f"strategy=hybrid sync.wire=int8 {FOUR}",
        "zero3": f"strategy=zero3 {FOUR}",
        "zero2": f"strategy=zero2 {FOUR}",
        "ddp": f"strategy=ddp {FOUR}",
        "diloco": f"strategy=hybrid {DILOCO}",
        "diloco_fragments": f"strategy=hybrid sync.fragments=2 sync.delay=1 {DILOCO}",
        "hybrid_twice": f"strategy=hybrid {EIGHT}",
        "hybrid_twice_full": f"strategy=hybrid sync.during_accumulation=full {EIGHT}",
        "zero3_twice_none": f"strategy=zero3 sync.during_accumulation=none {EIGHT}",
    },
    "4x1": {
        "ddp": f"strategy=ddp {FOUR}",
        "ddp_layer": f"strategy=ddp bucketing=layer {FOUR}",
        "ddp_bf16": f"strategy=ddp sync.wire=bf16 {FOUR}",
        "ddp_int8": f"strategy=ddp sync.wire=int8 {FOUR}",
        "zero3": f"strategy=zero3 {FOUR}",
        "zero3_layer": f"strategy=zero3 bucketing=layer {FOUR}",
        "zero2": f"strategy=zero2 {FOUR}",
        "hybrid": f"strategy=hybrid mesh.replicate=2 mesh.shard=2 {FOUR}",
        "diloco": f"strategy=ddp {DILOCO}",
        "ddp_twice": f"strategy=ddp {EIGHT}",
    },
}
SECOND: dict[str, dict[str, str]] = {
    "2x2": {
        "hybrid_size": f"strategy=hybrid bucketing=size bucketing.size_mib=1 {FOUR}",
        "hybrid_prefetch": f"strategy=hybrid prefetch.forward=1 {FOUR}",
        "full_bf16": f"strategy=hybrid_full sync.wire=bf16 {FOUR}",
        "hybrid_zero2_bf16": f"strategy=hybrid_zero2 sync.wire=bf16 {FOUR}",
        "zero3_layer": f"strategy=zero3 bucketing=layer {FOUR}",
        "zero3_twice": f"strategy=zero3 {EIGHT}",
        "diloco_int4": f"strategy=hybrid sync.wire=int4 {DILOCO}",
        "ddp_bf16": f"strategy=ddp sync.wire=bf16 {FOUR}",
        "ddp_twice_full": f"strategy=ddp sync.during_accumulation=full {EIGHT}",
    },
    "4x1": {
        "hybrid_bf16": f"strategy=hybrid mesh.replicate=2 mesh.shard=2 sync.wire=bf16 {FOUR}",
        "hybrid_zero2": f"strategy=hybrid_zero2 mesh.replicate=2 mesh.shard=2 {FOUR}",
        "zero3_twice": f"strategy=zero3 {EIGHT}",
        "ddp_twice_full": f"strategy=ddp sync.during_accumulation=full {EIGHT}",
        "diloco_fragments": f"strategy=ddp sync.fragments=2 sync.delay=1 {DILOCO}",
    },
}
SETS = {"first": JOBS, "second": SECOND}


def calibration_file(cluster: str, rate: int, set_name: str) -> Path:
    return FOLDER / f"cluster_{cluster}_{rate}mbit{suffix_of(set_name)}.yaml"


def suffix_of(set_name: str) -> str:
    """Of the files of a set of jobs."""
    return "" if set_name == "first" else f"_{set_name}"


def calibrate(set_name: str, rates: list[int]) -> None:
    """Runs ``preflight --write`` on every cluster and rate."""
    from tools.cluster import Cluster

    for (name, (nodes, ranks)), rate in itertools.product(CLUSTERS.items(), rates):
        words = [sys.executable, "-m", "parallel2d.preflight", f"--nnodes={nodes}"]
        words += [f"--nproc={ranks}", "--endpoint=node0:29555", "--seconds=0.2", "--largest-mib=4"]
        words += [f"--write={calibration_file(name, rate, set_name)}"]
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with Cluster(nodes, ranks, rate=f"{rate}mbit", environment=environment) as cluster:
            processes = [cluster.start(node, words, cwd=str(ROOT)) for node in range(nodes)]
            codes = [process.wait(timeout=180) for process in processes]
            if any(codes):
                raise SystemExit(cluster.log_path(0).read_text())
        print(f"{name} {rate} Mbit/s: calibrated", flush=True)


def predict(set_name: str, rates: list[int]) -> dict[str, Any]:
    """Seconds and their parts by cluster and rate, then by job."""
    from parallel2d.config.composition import compose
    from parallel2d.planner.layout_cost import cost_of

    jobs = SETS[set_name]
    found: dict[str, Any] = {}
    for name, rate in itertools.product(CLUSTERS, rates):
        rows = found[f"{name} {rate}"] = {}
        for job, words in jobs[name].items():
            composed = compose(
                [*BASE, *words.split(), f"cluster={calibration_file(name, rate, set_name)}"]
            )
            assert composed is not None
            estimate = cost_of(composed.config).time
            if isinstance(estimate, str):
                raise SystemExit(f"{name} {rate} {job}: {estimate}")
            parts = vars(estimate.seconds)
            rows[job] = {key: round(value, 5) for key, value in parts.items()}
    return found


class PlannedJob:
    """One job, as training runs it but for its data, on the ranks of this process group."""

    def __init__(self, words: str) -> None:
        from parallel2d import build_mesh, parallelize
        from parallel2d.config.composition import compose
        from parallel2d.mesh import MeshSpec
        from parallel2d.model_families import build_model
        from parallel2d.optimizer import build_optimizer

        composed = compose([*BASE, *words.split()])
        assert composed is not None
        self.config = composed.config
        sizes = self.config.mesh
        spec = MeshSpec(sizes.replicate, sizes.shard, sizes.tensor)
        mesh = build_mesh(spec, self.config.strategy, allow_cross_node=True)
        parts = build_model(self.config.model)
        self.loss = parts.loss
        self.model = parallelize(parts.module, mesh, self.config.parallel(), seed=0)
        self.optimizer = build_optimizer(self.model, self.config.optimizer)
        self.is_periodic = self.config.sync.name == "diloco"
        generator = torch.Generator().manual_seed(dist.get_rank())
        length = self.config.train.seq_len
        tokens = torch.randint(0, 1024, (1, length + 1), generator=generator)
        accumulation = self.config.train.global_batch_size // dist.get_world_size()
        self.micro_batches = [tokens] * accumulation

    def step(self) -> None:
        from parallel2d import accumulate

        mode = self.config.sync.during_accumulation
        for tokens in accumulate(self.model, self.micro_batches, mode):
            self.loss(self.model(tokens[:, :-1]), tokens[:, 1:]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def round(self, steps: int) -> float:
        """The mean of ``steps`` steps in seconds, or of one period."""
        count = EVERY if self.is_periodic else steps
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            self.step()
        return (time.perf_counter() - begin) / count


def worker(cluster: str, jobs: dict[str, str], rounds: int, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    running = {name: PlannedJob(words) for name, words in jobs.items()}
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for job in running.values():
        job.round(1)
    for number in range(rounds):
        for name in list(jobs)[:: 1 if number % 2 else -1]:
            found[name].append(running[name].round(steps))
    if dist.get_rank() == 0:
        print(MARK + json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def measure(set_name: str, rates: list[int], rounds: int, steps: int) -> dict[str, Any]:
    """Seconds of every round by cluster and rate, then by job."""
    from tools.cluster import Cluster

    found: dict[str, Any] = {}
    for (name, (nodes, ranks)), rate in itertools.product(CLUSTERS.items(), rates):
        words = [__file__, "worker", "--cluster", name, "--jobs", set_name]
        words += ["--rounds", str(rounds), "--steps", str(steps)]
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with Cluster(nodes, ranks, rate=f"{rate}mbit", environment=environment) as cluster:
            cluster.run(words).check(600.0)
            text = cluster.log_path(0).read_text(errors="replace")
        line = next(line for line in text.splitlines() if MARK in line)
        found[f"{name} {rate}"] = json.loads(line.partition(MARK)[2])
        print(f"{name} {rate} Mbit/s: measured", flush=True)
    return found


def compare(predicted: dict[str, Any], measured: dict[str, Any]) -> str:
    """The errors, the order of pairs, and how good the predicted best is."""
    lines = [
        "| cluster, Mbit/s | job | predicted (s) | measured (s) | error |",
        "|---|---|---|---|---|",
    ]
    verdicts = []
    right_in_all = pairs_in_all = 0
    for place, rounds in measured.items():
        seconds = {job: statistics.median(values) for job, values in rounds.items()}
        expected = {job: predicted[place][job]["total"] for job in seconds}
        for job, value in seconds.items():
            error = expected[job] / value - 1
            lines.append(f"| {place} | {job} | {expected[job]:.3f} | {value:.3f} | {error:+.0%} |")
        right = pairs = 0
        wrong = []
        for first, second in itertools.combinations(seconds, 2):
            fast, slow = sorted((first, second), key=seconds.__getitem__)
            if seconds[slow] <= 1.15 * seconds[fast]:
                continue
            pairs += 1
            if expected[fast] < expected[slow]:
                right += 1
            else:
                wrong.append(f"{fast} < {slow}")
        chosen = min(expected, key=expected.__getitem__)
        above = seconds[chosen] / min(seconds.values()) - 1
        verdicts.append(
            f"{place}: {right} of {pairs} pairs ordered right; the predicted best, {chosen}, takes "
            f"{above:.0%} longer than the best"
        )
        verdicts += [f"  ordered wrongly: {pair}" for pair in wrong]
        right_in_all += right
        pairs_in_all += pairs
    verdicts.append(f"all: {right_in_all} of {pairs_in_all} = {right_in_all / pairs_in_all:.1%}")
    return "\n".join([*lines, "", *verdicts])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("calibrate", "predict", "measure", "compare", "worker"))
    parser.add_argument("--jobs", choices=tuple(SETS), default="first")
    parser.add_argument("--rates", default=",".join(str(rate) for rate in RATES), help="Mbit/s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1, help="per round")
    parser.add_argument("--cluster", choices=tuple(CLUSTERS), help="this one alone")
    given = parser.parse_args()
    if given.cluster and given.what != "worker":
        for name in set(CLUSTERS) - {given.cluster}:
            del CLUSTERS[name]
    rates = [int(rate) for rate in given.rates.split(",")]
    suffix = suffix_of(given.jobs)
    predicted = FOLDER / f"predicted{suffix}.json"
    measured = FOLDER / f"measured{suffix}.json"
    if given.what == "calibrate":
        FOLDER.mkdir(parents=True, exist_ok=True)
        calibrate(given.jobs, rates)
    elif given.what == "predict":
        text = json.dumps(predict(given.jobs, rates), indent=1)
        predicted.write_text(text + "\n")
    elif given.what == "measure":
        text = json.dumps(measure(given.jobs, rates, given.rounds, given.steps), indent=1)
        measured.write_text(text + "\n")
    elif given.what == "compare":
        print(compare(json.loads(predicted.read_text()), json.loads(measured.read_text())))
    else:
        worker(given.cluster, SETS[given.jobs][given.cluster], given.rounds, given.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
