"""Weights in other formats: `open_source` reads them, `convert` writes them.

Nothing else of the package reads or writes a file of another format; saving and resuming a run
need none of this.
"""

from parallel2d.checkpoint.convert.conversion import FORMATS, convert, guess_format
from parallel2d.checkpoint.convert.sources import Source, open_source

__all__ = ["FORMATS", "Source", "convert", "guess_format", "open_source"]
