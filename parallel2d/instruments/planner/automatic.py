"""``strategy=auto``: the layout that `python -m parallel2d.plan` chooses for the detected machines.
Start at `with_chosen_layout`.

The search runs in a separate process, because it creates a fake process group. The calling process
may be a rank or may fork ranks later.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from parallel2d.base.config import TrainConfig
from parallel2d.base.config.composition import from_yaml, to_yaml
from parallel2d.base.errors import ConfigError
from parallel2d.instruments.planner.layout_search import SearchResult, fixed_keys, search
from parallel2d.training.auto_precision import resolved_for_plan

_ADVICE = (
    "measure these machines with python -m parallel2d.preflight --write FILE and name it as "
    "cluster, choose a cluster, or name a strategy"
)


def with_chosen_layout(
    config: TrainConfig, words: Sequence[str], nodes: int, ranks: int
) -> tuple[TrainConfig, list[str]]:
    """Return ``config`` with the fastest layout, and lines that explain the choice. If ``config``
    names a strategy, return it unchanged and no lines.

    Args:
        config: its ``cluster`` section describes links, devices and memory.
        words: overrides of the command line; the search does not change keys that they set.
        nodes: number of equal nodes.
        ranks: number of all ranks.

    Raises:
        ConfigError: if no layout fits, or ``cluster`` lacks figures.
    """
    if not config.is_automatic:
        return config, []
    if ranks % nodes:
        raise ConfigError(
            f"auto: {ranks} ranks on {nodes} nodes are not equally many on each; name a strategy"
        )
    cluster = dataclasses.replace(config.cluster, nodes=nodes, ranks_per_node=ranks // nodes)
    planned = dataclasses.replace(config, cluster=cluster)
    request = {"config": to_yaml(planned), "fixed": sorted(fixed_keys(words))}
    # The same search path, so that the child process can import a user's model.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "parallel2d.instruments.planner.automatic"],
        input=json.dumps(request),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise RuntimeError(f"auto: the search failed: {done.stderr}") from None
    if "error" in answer:
        raise ConfigError(f"auto: {answer['error']}")
    chosen = from_yaml(answer["config"])
    return dataclasses.replace(chosen, cluster=config.cluster), answer["lines"]


def _lines(result: SearchResult) -> list[str]:
    chosen = result.chosen
    place = result.ranked.index(chosen)
    lines = [
        f"layout      {' '.join(chosen.words)}",
        f"            {chosen.time.seconds.total:.3g} s per step by the planner, the fastest of "
        f"{len(result.ranked)} that can run",
    ]
    # Explain the fastest layout that does not fit, and the best layout of another strategy or mesh.
    slower = []
    for layout in result.ranked[place:]:
        is_other = layout.words[:4] != chosen.words[:4]
        if is_other and not layout.reason.startswith("does not fit"):
            slower.append(layout)
    for head, found in (("", result.ranked[:place]), ("runner-up", slower)):
        for each in found[:1]:
            lines.append(f"{head:<12}{' '.join(each.words)}: {each.reason}")
    return lines


def main() -> None:
    """Read a request from standard input, and write the answer as a line of JSON."""
    import torch

    torch.set_num_threads(1)
    request = json.load(sys.stdin)
    try:
        config = from_yaml(request["config"])
        result = search(resolved_for_plan(config), request["fixed"])
    except ConfigError as error:
        text = str(error)
        if text.startswith("layouts cannot be ranked"):
            text = f"{text.partition(';')[0]}; {_ADVICE}"
        print(json.dumps({"error": text}))
        return
    print(json.dumps({"config": to_yaml(result.chosen.config), "lines": _lines(result)}))


if __name__ == "__main__":
    main()
