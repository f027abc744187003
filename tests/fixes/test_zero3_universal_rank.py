"""zero3_universal_rank: a universal load at ZeRO-3 on several nodes gives each rank its own shard."""

import re
from pathlib import Path

from trainers.lazy import dt
from upstream import proof

test_each_node_has_the_shards_of_the_first, test_a_resume_goes_on_bit_for_bit = proof(
    __file__,
    re.compile("^1 rank on each node: [^;]* after the load[^;]*; 2 ranks on each node: [^;]* after the load[^;]*$"),
)


# What the ranks run

NODES = {"1 rank on each node": (2, 1), "2 ranks on each node": (4, 2), "one node": (4, 4)}


def bug(folder: Path) -> str:
    dt.allow_pickles()
    found = {
        nodes: dt.resumed("stage3-1", folder / nodes, ranks=ranks, node=node, universal=True)
        for nodes, (ranks, node) in NODES.items()
    }
    return "; ".join(f"{nodes}: {wrong}" for nodes, wrong in found.items() if wrong)
