"""``python -m parallel2d.certify <overrides of train>``: 0 where the layout computes what one
process computes, 1 otherwise."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from parallel2d import train

_PURPOSE = (
    "Compares a few steps of the job that the arguments describe with one process, parameter by "
    "parameter. Exit code 0: the layout computes what one process computes."
)


def main(
    arguments: Sequence[str] | None = None, program: str = "python -m parallel2d.certify"
) -> int:
    """Returns the exit code: 0 certified, 1 not, or it cannot run, 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    code = train.main([*words, "train.certify_only=true"], program, _PURPOSE)
    return code if code in (0, 130) else 1


if __name__ == "__main__":
    sys.exit(main())
