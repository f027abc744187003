"""Divide work between the ranks of a command."""

import itertools
from collections.abc import Sequence


def shares(costs: Sequence[int], count: int) -> list[range]:
    """Which items each of `count` processes does: neighbours, in order, whose costs are alike.

    Every process comes to the same result. An item's middle lies in its process's part of all costs.
    """
    total = sum(costs) or 1
    begins = itertools.accumulate(costs, initial=0)
    whose = [
        min(count - 1, (2 * begin + cost) * count // (2 * total)) for begin, cost in zip(begins, costs, strict=False)
    ]
    ends = list(itertools.accumulate(whose.count(process) for process in range(count)))
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
