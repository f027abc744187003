"""What a migration stores beside each file: it decodes to the same, and other data is refused."""

from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from ckpt_patches.audit.judging.blocks import CERTAIN
from ckpt_patches.audit.judging.scan import Odd, OddRuns, Part, Tally
from ckpt_patches.errors import UserError
from ckpt_patches.formats.elements import PartRead
from ckpt_patches.migrate.judged_parts import decoded, encoded

pytestmark = pytest.mark.quick


@st.composite
def parts(draw: st.DrawFn) -> Part:
    count = draw(st.integers(0, 5))
    edges = sorted(draw(st.sets(st.integers(0, 1 << 50), min_size=2 * count, max_size=2 * count)))
    code = draw(st.lists(st.integers(1, 0xFFFF), min_size=count, max_size=count))
    runs = OddRuns(np.array(edges[::2], np.int64), np.array(edges[1::2], np.int64), np.array(code, np.uint16))
    tallies = draw(st.dictionaries(st.sampled_from(sorted(CERTAIN)), st.builds(Tally, *[st.integers(0, 1 << 50)] * 3)))
    number = st.integers(0, 1 << 40)
    pieces = draw(st.lists(st.builds(PartRead, st.text(), number, number, number), max_size=3))
    return Part(draw(number), Odd(runs, draw(st.booleans()), tallies), pieces)


def plain(found: list[Part]) -> Any:
    return [(p.shard, [column.tolist() for column in p.odd.runs], p.odd.is_cut, p.odd.tallies, p.pieces) for p in found]


@hypothesis.given(st.lists(parts(), max_size=4))
def test_what_is_written_is_what_is_read(found: list[Part]) -> None:
    assert plain(decoded(encoded(found))) == plain(found)


@hypothesis.given(st.lists(parts(), max_size=4), st.data())
def test_what_is_cut_or_longer_is_refused(found: list[Part], data: st.DataObject) -> None:
    complete = encoded(found)
    with pytest.raises(UserError, match="found something else"):
        decoded(complete[: data.draw(st.integers(0, len(complete) - 1))])
    with pytest.raises(UserError, match="found something else"):
        decoded(complete + b"x")
