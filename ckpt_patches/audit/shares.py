"""Divide work between the ranks of a command."""

import itertools
from collections.abc import Sequence


def shares(costs: Sequence[int], count: int) -> list[range]:
    """Divide items into consecutive ranges of similar cost, one per process (`count`).

    The result is deterministic. An item goes to the process whose part of the total cost contains the item's middle.
    """
    total = sum(costs) or 1
    begins = itertools.accumulate(costs, initial=0)
    whose = [
        min(count - 1, (2 * begin + cost) * count // (2 * total)) for begin, cost in zip(begins, costs, strict=False)
    ]
    ends = list(itertools.accumulate(whose.count(process) for process in range(count)))
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
