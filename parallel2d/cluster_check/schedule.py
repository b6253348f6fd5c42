"""Which pairs of nodes measure their link at the same time: `rounds_of` returns rounds of disjoint
pairs, so that no node serves two measurements at once."""

from __future__ import annotations

import random

# nodes; 15 rounds. Beyond: the ring that collectives use, and RANDOM_ROUNDS of random pairs
ALL_PAIRS_UP_TO = 16
RANDOM_ROUNDS = 4

Pair = tuple[int, int]
Round = list[Pair]


def rounds_of(nodes: int, seed: int = 0) -> list[Round]:
    """Rounds of disjoint pairs ``(a, b)``, a < b. Up to 16 nodes every pair occurs exactly once;
    beyond, every node meets both neighbours on the ring and four others at random, in 6 or 7 rounds
    whatever the number of nodes. Same seed, same rounds."""
    if nodes < 2:
        return []
    if nodes <= ALL_PAIRS_UP_TO:
        return _round_robin(nodes)
    ring = [(node, (node + 1) % nodes) for node in range(nodes)]
    rounds = disjoint_rounds([_ordered(pair) for pair in ring])
    draw = random.Random(seed)
    for _ in range(RANDOM_ROUNDS):
        order = list(range(nodes))
        draw.shuffle(order)
        rounds.append([_ordered((a, b)) for a, b in zip(order[::2], order[1::2], strict=False)])
    return rounds


def disjoint_rounds(pairs: list[Pair]) -> list[Round]:
    """``pairs`` spread over rounds in which no node occurs twice, each in the first round that has
    room for it."""
    rounds: list[Round] = []
    busy: list[set[int]] = []
    for pair in pairs:
        for taken, members in zip(busy, rounds, strict=True):
            if not taken & set(pair):
                members.append(pair)
                taken |= set(pair)
                break
        else:
            rounds.append([pair])
            busy.append(set(pair))
    return rounds


def _round_robin(nodes: int) -> list[Round]:
    """The circle method for tournaments: one node stays, the others turn; with an odd number one
    pauses."""
    seats: list[int | None] = [*range(nodes)]
    if nodes % 2:
        seats.append(None)
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([_ordered((a, b)) for a, b in pairs if a is not None and b is not None])
        seats.insert(1, seats.pop())
    return rounds


def _ordered(pair: Pair) -> Pair:
    return (min(pair), max(pair))
