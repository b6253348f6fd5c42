"""A worker process that prepares data: ``python -m parallel2d.data.worker``, started by
`preparation_pool`.

It reads jobs from standard input and writes answers to standard output, each as one line of JSON.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from parallel2d.data.prepare import Preparation, run_unit
from parallel2d.data.tokenizer import load_tokenizer
from parallel2d.errors import ConfigError


def main() -> None:
    """Answers jobs until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it and stops its workers
    tokenizer = None
    for line in sys.stdin:
        values = json.loads(line)
        job = Preparation.from_json(values)
        try:
            if tokenizer is None:
                tokenizer = load_tokenizer(job.options.tokenizer, job.options.end_token)
            answer = {
                "number": job.number,
                "record": run_unit(job, Path(values["folder"]), tokenizer),
            }
        except ConfigError as error:
            answer = {"number": job.number, "error": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
