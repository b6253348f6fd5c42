"""Messages of an out-of-memory error, from the errors that torch and numpy raise for it."""

import numpy
import pytest
import torch

from parallel2d.training.metrics.out_of_memory import out_of_memory_named, save_snapshot

CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB "
    "of which 1.20 GiB is free."
)


def notes_of(tmp_path, fail):
    with pytest.raises(Exception) as caught:
        with out_of_memory_named(3, "node-b/77", str(tmp_path), torch.device("cpu")):
            fail()
    return getattr(caught.value, "__notes__", [])


def out_of_gpu_memory():
    raise torch.OutOfMemoryError(CUDA)


@pytest.mark.parametrize(
    ("fail", "of_host"),
    [
        (lambda: torch.empty(2**60, dtype=torch.uint8), True),
        (lambda: numpy.empty(2**58, dtype=numpy.uint8), True),
        (lambda: bytearray(2**60), True),
        (out_of_gpu_memory, False),
    ],
)
def test_out_of_memory_message_names_rank_host_and_keys(tmp_path, fail, of_host):
    (said,) = notes_of(tmp_path, fail)
    assert said.startswith("rank 3 on node-b ran out of memory; ")
    assert ("GiB were free" in said) == of_host
    assert "a smaller train.micro_batch_size, activation_checkpointing=full" in said


def test_other_errors_are_unchanged(tmp_path):
    assert notes_of(tmp_path, lambda: torch.ones(2) @ torch.ones(3)) == []


def test_failed_memory_snapshot_keeps_the_original_error(tmp_path, monkeypatch):
    def fail(path):
        raise OSError("disk full")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: None)
    path = str(tmp_path / "memory" / "rank-3.pickle")
    assert save_snapshot(path) == [path]
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", fail)
    assert save_snapshot(path) == []
