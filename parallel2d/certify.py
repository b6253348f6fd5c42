"""``python -m parallel2d.certify <overrides of train>``: parity check of a layout.

The exit code is 0 if the layout computes the results of a reference run in one process, else 1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from parallel2d import train
from parallel2d.base.exit_codes import FAILED, INTERRUPTED

_PURPOSE = (
    "Compares a few steps of the job that the arguments describe with one process, parameter by "
    "parameter. Exit code 0: the layout computes the results of one process."
)


def main(
    arguments: Sequence[str] | None = None, program: str = "python -m parallel2d.certify"
) -> int:
    """Return the exit code: 0 the check passed, 1 the check failed or could not run, 130
    interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    code = train.main([*words, "train.certify_only=true"], program, _PURPOSE)
    return code if code in (0, INTERRUPTED) else FAILED


if __name__ == "__main__":
    sys.exit(main())
