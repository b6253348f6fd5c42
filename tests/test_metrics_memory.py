"""What is said when memory runs out, from the errors that torch and numpy raise for it."""

from __future__ import annotations

import numpy
import pytest
import torch

from parallel2d.metrics.out_of_memory import OutOfMemoryNote, is_out_of_memory
from parallel2d.metrics.watch import Position

CUDA = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.20 GiB is free."


def notes_of(tmp_path, fail, save=None):
    note = OutOfMemoryNote(3, "node-b/77", str(tmp_path), torch.device("cpu"))
    with pytest.raises(Exception) as caught:
        with note:
            note.position = lambda: Position(12, 4, "all_gather over the shard axis")
            if save:
                note.save(save)
            fail()
    return getattr(caught.value, "__notes__", [])


def out_of_gpu_memory():
    raise torch.OutOfMemoryError(CUDA)


@pytest.mark.parametrize(("fail", "asked"), [
    (lambda: torch.empty(2**60, dtype=torch.uint8), "1073741824.00 GiB"),
    (lambda: numpy.empty(2**58, dtype=numpy.uint8), "256. PiB"),
    (lambda: bytearray(2**60), "memory of a size that is not told"),
    (out_of_gpu_memory, "2.50 GiB"),
])  # fmt: skip
def test_the_message_names_rank_host_step_and_what_was_asked_for(tmp_path, fail, asked):
    (said,) = notes_of(tmp_path, fail)
    assert said.startswith(
        f"rank 3 on node-b ran out of memory in step 12: it asked for {asked}; it held "
    )


def test_other_errors_are_left_as_they_are(tmp_path):
    assert notes_of(tmp_path, lambda: torch.ones(2) @ torch.ones(3)) == []
    assert not is_out_of_memory(RuntimeError("Timed out"))


def test_the_snapshot_is_named_and_one_that_cannot_be_written_hides_nothing(tmp_path):
    def write(path):
        with open(path, "w") as file:
            file.write("blocks")

    (said,) = notes_of(tmp_path, out_of_gpu_memory, write)
    path = tmp_path / "memory" / "rank-3.pickle"
    assert f"snapshot for pytorch.org/memory_viz: {path}" in said
    assert path.read_text() == "blocks"

    def fail(path):
        raise OSError("disk full")

    (said,) = notes_of(tmp_path, out_of_gpu_memory, fail)
    assert "snapshot" not in said
