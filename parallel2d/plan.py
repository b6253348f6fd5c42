"""``python -m parallel2d.plan <overrides of train>``: find the fastest layout that fits a cluster.

The command prints the layout and its cost. With ``plan.dry_run=true`` the command prints the cost
of the given layout, as the train command does. With ``plan.scaling`` the command prints the best
layouts on 8 to 16,384 ranks. The command starts no training.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from parallel2d import train
from parallel2d.base.config.composition import Composition, compose
from parallel2d.base.config.help_page import information, show
from parallel2d.base.errors import ConfigError
from parallel2d.base.files import for_terminal
from parallel2d.launching.run_command import exit_code_of

_PURPOSE = (
    "Finds the fastest layout of the described job that fits on a cluster, and what "
    "it would cost. Nothing is started."
)


def main(arguments: Sequence[str] | None = None, program: str = "python -m parallel2d.plan") -> int:
    """Return the exit code: 0 planned, 1 the given layout does not fit, 2 invalid configuration or
    no layout fits, 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return exit_code_of(lambda: _run(words, program))


def _run(words: list[str], program: str) -> int:
    answer = information(words, program, _PURPOSE)
    if answer is not None:
        show(answer)
        return 0
    composition = compose(words)
    if composition is None or composition.config.plan.dry_run:
        return train.main([*words, "plan.dry_run=true"])
    _plan(composition)
    return 0


def _plan(composition: Composition) -> None:
    import torch

    from parallel2d.instruments.planner import plan_text
    from parallel2d.instruments.planner.layout_cost import seconds_in_bf16
    from parallel2d.instruments.planner.layout_search import command_line, fixed_keys, search
    from parallel2d.instruments.planner.scaling import scale
    from parallel2d.training.auto_precision import resolved_for_plan

    torch.set_num_threads(1)
    given = composition.words
    config = resolved_for_plan(composition.config)
    if config.plan.scaling is not None:
        points = scale(config, fixed_keys(given))
        text = plan_text.scaling_json(points, config)
        lines = plan_text.scaling_lines(points, config)
    else:
        result = search(config, fixed_keys(given))
        command = command_line(given, result.chosen)
        text = plan_text.ranking_json(result, command)
        lines = [
            *plan_text.ranking_lines(result),
            *plan_text.summary(result.chosen.config, result.chosen.cost),
        ]
        in_bf16 = seconds_in_bf16(result.chosen.config)
        if in_bf16 is not None:
            lines.append(f"            precision=bf16 would take {in_bf16:.3f} s per step")
        lines.append(f"command     {command}")
    path = config.plan.json
    if path is not None:
        try:
            with open(path, "x") as file:
                file.write(text + "\n")
        except OSError as error:
            raise ConfigError(f"plan.json={path} cannot be written: {error.strerror}") from None
    for line in lines:
        print(for_terminal(line))


if __name__ == "__main__":
    sys.exit(main())
