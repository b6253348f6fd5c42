"""Values between ranks arrive with the types that were sent, and received values are never
executed.
"""

import json
import math

import pytest
import torch
import torch.distributed as dist

from parallel2d.base import exchange
from parallel2d.base.errors import ConfigError
from parallel2d.base.files.tensor_file import DamagedCheckpointError
from parallel2d.base.store.address import PortTaken
from parallel2d.parallel.weights.geometry import Region
from parallel2d.parallel.weights.states import TensorEntry
from parallel2d.training.checkpoint.manifest import StoredFile

VALUES = (
    None, True, 0, -(2**70), 1.5, float("-inf"), "", "ü\n", b"\0\xff", [], [1, [2]], (), (1, ("a", b"b")),
    {}, {1: {2: 3}, "a": (None,)},
    {(1, "x"): [b"y"]}, set(), {1, "b"}, torch.Size([2, 3]), torch.float8_e4m3fn, Region((0, 1), (2, 3)),
    [("f", StoredFile(3, "00"))],
    TensorEntry(torch.Size([1, 2]), torch.bfloat16), {"dict": 1}, {"tuple": [1]},
)  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_arrive_with_their_types(value):
    arrived = exchange.decode(exchange.encode(value))
    assert arrived == value
    assert type(arrived) is type(value)


def test_nan_errors_and_tensors_arrive():
    assert math.isnan(exchange.decode(exchange.encode(float("nan"))))
    error = exchange.decode(exchange.encode(DamagedCheckpointError("it is\ndamaged")))
    assert (type(error), str(error)) == (DamagedCheckpointError, "it is\ndamaged")
    error = exchange.decode(exchange.encode(PortTaken("port 1 is taken")))
    assert (type(error), str(error)) == (ConfigError, "port 1 is taken")
    empty = torch.empty(0, 4, dtype=torch.int64)
    for tensor in (torch.tensor(1.5), torch.randn(2, 3).bfloat16(), empty, torch.tensor([True])):
        arrived = exchange.decode(exchange.encode(tensor))
        assert arrived.dtype == tensor.dtype
        assert torch.equal(arrived, tensor)


@pytest.mark.parametrize(
    "value", [object(), len, lambda: None, {"a": [RuntimeError("no")]}, torch.device("cpu")]
)
def test_unsupported_value_is_refused_on_its_rank(value):
    with pytest.raises(TypeError, match="cannot be sent to other ranks"):
        exchange.encode(value)


@pytest.mark.parametrize(
    "told", [{"builtins.eval": ["1"]}, {"os.system": ["true"]}, {"dtype": "nn"}, {"a": 1}]
)
def test_unregistered_type_is_refused(told):
    with pytest.raises(KeyError):
        exchange.decode(json.dumps(told))


def _exchanged(groups):
    rank = dist.get_rank()
    pair = [dist.new_group(ranks) for ranks in groups][rank // 2]
    own = {"rank": rank, "long": "x" * 1000 * rank}
    last = groups[rank // 2][1]
    everybody, both = exchange.all_gather(own), exchange.all_gather(rank, pair)
    sent = exchange.broadcast(own, 2), exchange.broadcast(rank, last, pair)
    return everybody, both, *sent, exchange.gather((rank,), pair, to=last)


def test_ranks_exchange_values(ranks):
    own = [{"rank": rank, "long": "x" * 1000 * rank} for rank in range(4)]
    for rank, answer in enumerate(ranks.run(4, _exchanged, ([0, 1], [2, 3]))):
        first = rank // 2 * 2
        pair = [first, first + 1]
        gathered = [(other,) for other in pair] if rank == pair[1] else []
        assert answer == (own, pair, own[2], pair[1], gathered)
