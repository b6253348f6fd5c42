"""Which samples of a global batch a rank reads, and in how many micro-batches: `BatchPlan`.

Only the data ranks (the replicate and shard axes) count. The tensor ranks of one data rank have the
same plan and read the same sequences.
"""

from __future__ import annotations

from parallel2d.errors import ConfigError

Position = int | None
_AUTO_LIMIT = 8


class BatchPlan:
    """The share of one data rank in every global batch.

    Args:
        global_batch_size: sequences per optimizer step, over all data ranks.
        micro_batch_size: sequences per forward on a rank; ``"auto"`` takes the largest divisor of
            the rank's share up to 8.
        data_rank, data_ranks: this rank's coordinate on, and the size of, the flattened replicate
            and shard axes.
        allow_padding: accept sizes that do not divide (an elastic restart on another number of
            ranks). Every rank runs the same number of micro-batches, and missing sequences have
            position None, which means weight zero.

    Raises `ConfigError` that lists the sizes that divide.
    """

    def __init__(
        self,
        *,
        global_batch_size: int,
        micro_batch_size: int | str,
        data_rank: int,
        data_ranks: int,
        allow_padding: bool = False,
    ) -> None:
        assert 0 <= data_rank < data_ranks, (data_rank, data_ranks)
        share = -(-global_batch_size // data_ranks)
        if micro_batch_size == "auto":
            # Padding may cost an eighth, so that micro-batches stay large
            slots = share * 9 // 8 if allow_padding else share
            micro = max(
                size for size in range(1, _AUTO_LIMIT + 1) if -(-share // size) * size <= slots
            )
        else:
            micro = int(micro_batch_size)
        if global_batch_size % (micro * data_ranks) and not allow_padding:
            raise ConfigError(_indivisible(global_batch_size, micro_batch_size, micro, data_ranks))
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro
        self.accumulation = -(-global_batch_size // (micro * data_ranks))
        self.pads = allow_padding
        self._data_rank, self._data_ranks = data_rank, data_ranks

    def positions(self, first: int) -> list[list[Position]]:
        """Positions of this rank's micro-batches in the global batch that starts at position
        ``first``.

        One list of ``micro_batch_size`` positions per micro-batch. Micro-batch m of all ranks
        together is one contiguous range, so the union over ranks is
        ``first .. first + global_batch_size - 1`` for every layout.
        """
        batches: list[list[Position]] = []
        for step in range(self.accumulation):
            begin = (step * self._data_ranks + self._data_rank) * self.micro_batch_size
            slots = range(begin, begin + self.micro_batch_size)
            batches.append(
                [first + slot if slot < self.global_batch_size else None for slot in slots]
            )
        return batches


def _indivisible(global_batch: int, asked: int | str, micro: int, ranks: int) -> str:
    product = ranks if asked == "auto" else micro * ranks
    if asked == "auto":
        problem = f"train.global_batch_size={global_batch} is not divisible by {ranks} data ranks"
    else:
        problem = (
            f"train.global_batch_size={global_batch} is not divisible by micro_batch_size {micro} "
            f"x {ranks} data ranks = {product}"
        )
    below = global_batch // product * product
    sizes = [str(size) for size in (below, below + product, below + 2 * product) if size]
    advice = f"global_batch_size may be {', '.join(sizes)}"
    if asked != "auto" and global_batch % ranks == 0:
        share = global_batch // ranks
        divisors = [str(size) for size in range(1, min(share, 64) + 1) if share % size == 0]
        advice = f"micro_batch_size may be {' | '.join(divisors)}; {advice}"
    return f"{problem}; {advice}"
