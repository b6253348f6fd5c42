"""The order of samples: the sample at each position, and the rank that reads each position."""

import random

import numpy as np
import pytest

from parallel2d.base.errors import ConfigError
from parallel2d.training.data.feed import BatchPlan
from parallel2d.training.data.sample_order import MAXIMUM_SIZE, Order, _round


def test_every_epoch_is_a_permutation() -> None:
    for size in (*range(1, 40), 63, 64, 65, 127, 128, 129, 1000, 4096, 10007):
        order = Order(size, seed=3)
        for epoch in range(3):
            indices = order.index(np.arange(epoch * size, (epoch + 1) * size))
            assert sorted(indices.tolist()) == list(range(size))


class Inverse(Order):
    """Undoes the rounds of the network in reverse order."""

    def _permute(self, words, keys):
        low, high = words & self._low_mask, words >> self._low_bits
        for turn in reversed(range(0, len(keys), 2)):
            low = low ^ (_round(high, keys[turn + 1]) & self._low_mask)
            high = high ^ (_round(low, keys[turn]) & self._high_mask)
        return (high << self._low_bits) | low


@pytest.mark.parametrize("size", [10**12, 10**12 + 1, 2**40, 2**40 - 1, MAXIMUM_SIZE])
def test_huge_orders_are_bijections_because_they_can_be_inverted(size: int) -> None:
    generator = np.random.default_rng(size)
    order, inverse = Order(size, seed=11), Inverse(size, seed=11)
    for epoch in (0, 3):
        places = np.concatenate([generator.integers(0, size, 20_000), [0, size - 1]])
        indices = order.index(epoch * size + places)
        assert 0 <= indices.min() <= indices.max() < size
        np.testing.assert_array_equal(inverse.index(epoch * size + indices), places)
        back = inverse.index(epoch * size + places)
        np.testing.assert_array_equal(order.index(epoch * size + back), places)


def test_order_differs_between_epochs_seeds_and_streams_and_repeats_otherwise() -> None:
    positions = np.arange(5000)
    reference = Order(5000, seed=0).index(positions)
    np.testing.assert_array_equal(Order(5000, seed=0).index(positions), reference)
    for other in (
        Order(5000, seed=0).index(positions + 5000),
        Order(5000, seed=1).index(positions),
        Order(5000, seed=0, name="validation").index(positions),
    ):
        assert np.count_nonzero(other == reference) < 20  # of a random permutation 1 is expected


def test_order_does_not_depend_on_how_positions_are_grouped() -> None:
    order = Order(997, seed=5)
    positions = np.random.default_rng(0).integers(0, 10**6, 500)  # many epochs in one call
    together = order.index(positions)
    one_by_one = [int(order.index(np.array([position]))[0]) for position in positions]
    assert together.tolist() == one_by_one


def test_sample_order_passes_statistical_tests_of_randomness() -> None:
    """Chi-squared over (block of positions, block of indices), and the mean distance of neighbours."""
    size, blocks = 1 << 16, 16
    for seed in range(4):
        indices = Order(size, seed=seed).index(np.arange(size))
        counts = np.zeros((blocks, blocks))
        np.add.at(counts, (np.arange(size) * blocks // size, indices * blocks // size), 1)
        expected = size / blocks**2
        chi_squared = ((counts - expected) ** 2 / expected).sum()
        assert 130 < chi_squared < 340, chi_squared  # 225 degrees of freedom: 5 standard deviations
        distance = np.abs(np.diff(indices)).mean() / size
        assert abs(distance - 1 / 3) < 0.01


def test_small_orders_take_every_permutation_about_equally_often() -> None:
    seen = {tuple(Order(4, seed).index(np.arange(4)).tolist()) for seed in range(600)}
    assert len(seen) == 24


@pytest.mark.parametrize("size", [0, -1, MAXIMUM_SIZE + 1])
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"got {size}"):
        Order(size, seed=0)


def plan(batch: int, micro: int | str, rank: int, ranks: int, padding: bool = False) -> BatchPlan:
    sizes = {"global_batch_size": batch, "micro_batch_size": micro}
    return BatchPlan(**sizes, data_rank=rank, data_ranks=ranks, allow_padding=padding)


def _global_batch(first: int, batch: int, micro: int | str, ranks: int, padding: bool) -> list[int]:
    """The positions that all ranks together read; every rank runs the same number of equal micro-batches."""
    plans = [plan(batch, micro, rank, ranks, padding) for rank in range(ranks)]
    assert len({(each.micro_batch_size, each.accumulation) for each in plans}) == 1
    share = -(-batch // ranks)
    if micro == "auto":
        slots = plans[0].micro_batch_size * plans[0].accumulation
        assert slots <= max(share * 9 // 8, share), "padding wastes little"
    found = []
    for each in plans:
        micro_batches = each.positions(first)
        assert len(micro_batches) == each.accumulation
        for positions in micro_batches:
            assert len(positions) == each.micro_batch_size
            found += [position for position in positions if position is not None]
    return found


def test_global_batches_are_the_same_on_every_layout_with_any_change_of_world_size() -> None:
    """Random sizes and seeds; at every step another number of ranks and another micro-batch reads on."""
    random_numbers = random.Random(2)
    for _ in range(40):
        size = random_numbers.randint(1, 300)
        batch = random_numbers.randint(1, 48)
        order = Order(size, seed=random_numbers.randint(0, 2**31))
        steps = -(-3 * size // batch)
        read: list[int] = []
        for step in range(steps):
            ranks = random_numbers.randint(1, 9)
            micro = random_numbers.choice(["auto", random_numbers.randint(1, 8)])
            positions = _global_batch(step * batch, batch, micro, ranks, padding=True)
            assert sorted(positions) == list(range(step * batch, (step + 1) * batch))
            read += order.index(np.array(sorted(positions))).tolist()
        for epoch in range(3):
            assert sorted(read[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_automatic_micro_batch_is_the_largest_divisor_of_the_share_up_to_eight() -> None:
    for share, expected in {1: 1, 6: 6, 7: 7, 8: 8, 9: 3, 11: 1, 24: 8, 30: 6, 26: 2}.items():
        found = plan(share * 4, "auto", 0, 4)
        assert (found.micro_batch_size, found.accumulation) == (expected, share // expected)


def test_sizes_that_do_not_divide_are_refused_with_those_that_do() -> None:
    def message(batch: int, micro: int | str, ranks: int) -> str:
        with pytest.raises(ConfigError) as caught:
            plan(batch, micro, 0, ranks)
        return str(caught.value)

    assert message(24, 4, 4) == (
        "train.global_batch_size=24 is not divisible by micro_batch_size 4 x 4 data ranks = 16; "
        "micro_batch_size may be 1 | 2 | 3 | 6; global_batch_size may be 16, 32, 48"
    )
    assert message(30, 4, 4) == (
        "train.global_batch_size=30 is not divisible by micro_batch_size 4 x 4 data ranks = 16; "
        "global_batch_size may be 16, 32, 48"
    )
    assert message(30, "auto", 4) == (
        "train.global_batch_size=30 is not divisible by 4 data ranks; global_batch_size may be 28, 32, 36"
    )
    assert message(3, "auto", 8).endswith("global_batch_size may be 8, 16")
