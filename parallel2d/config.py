"""The dataclasses of a job, one per section of the command line (docs/configuration.md)."""

from parallel2d.base.config import *  # noqa: F403
