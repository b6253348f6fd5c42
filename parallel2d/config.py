"""The dataclasses of a job, one per section of the command line (docs/configuration.md)."""

from parallel2d.base.config import *  # noqa: F403
from parallel2d.base.config import __all__ as __all__
