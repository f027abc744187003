"""rank_order: in which order DeepSpeed's own converter joins what many ranks have written."""

from collections.abc import Callable
from pathlib import Path

import pytest

import edits
from ckpt_patches.engine.plan import Outcome
from deepspeed_patches.rank_order import _ranks_in_name
from universal import both, ours
from upstream import DELIVERIES, numbers, releases, tree
from zero_checkpoints import convert, converted, differences, of_ranks

FIX = "rank_order"

NEWEST_OF_FILES, NEWEST = "0.14.0", "0.14.1"
AFFECTED = releases("deepspeed", newest=NEWEST)
OLD = "0.12.6"

# Above 10 the files' names are in another order than the ranks; above 100 the fragments' are, too.
COUNTS = (11, 101)


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", ["none"])
@pytest.mark.parametrize("version", AFFECTED)
@pytest.mark.parametrize("count", COUNTS)
def test_upstream_joins_the_right_elements_in_the_wrong_order(
    version: str, delivery: str, count: int, tmp_path: Path
) -> None:
    """Silently: every file has its size, and no element is lost."""
    source = of_ranks(count)
    assert convert(tmp_path, source, version=version, delivery=delivery) == {str(count): ""}
    found = converted(tmp_path / str(count))
    wrong = {name.partition(".")[0] for name in differences(found, source)}
    assert wrong == ({"scale"} if count == 11 else {"weight", "scale"})  # of 11 ranks the last one alone is misplaced
    assert differences(found, source, in_order=False) == []


def test_upstream_is_right_on_10_ranks(tmp_path: Path) -> None:
    assert convert(tmp_path, of_ranks(10), version=OLD, delivery="none") == {"10": ""}
    assert differences(converted(tmp_path / "10"), of_ranks(10)) == []


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("version", AFFECTED)
def test_joins_them_in_the_order_of_the_ranks(version: str, delivery: str, tmp_path: Path) -> None:
    """Bit for bit what was saved, and on few ranks as ever."""
    counts = (10, *COUNTS)
    outcome = convert(tmp_path, *map(of_ranks, counts), version=version, delivery=delivery)
    assert outcome == {str(count): "" for count in counts}
    for count in counts:
        assert differences(converted(tmp_path / str(count)), of_ranks(count)) == []


@pytest.mark.parametrize("version", [OLD, "0.19.8"])
def test_the_one_pass_converter_has_that_order(version: str, tmp_path: Path) -> None:
    """It does what the release's converter does, but for its mistakes."""
    for count in COUNTS:
        ours(of_ranks(count), tmp_path / str(count), version=version)
        assert differences(converted(tmp_path / str(count)), of_ranks(count)) == []


def test_the_one_pass_converter_writes_what_upstreams_writes(tmp_path: Path) -> None:
    assert both(tmp_path, *map(of_ranks, COUNTS), version=OLD) == {str(count): [] for count in COUNTS}


# The edits themselves

RESHAPE_UTILS = "deepspeed.checkpoint.reshape_utils"
CONVERTER = "deepspeed.checkpoint.ds_to_universal"
BY_NAME = 'paths = sorted(list(glob.glob(f"{prefix_path}.*")))'
FRAGMENTS = f"{BY_NAME[:-1]}, key=lambda path: int(path.rpartition('.')[2]))"
FILES = [
    "return sorted(zero_files, key=_ranks_in_name)",
]


@pytest.mark.parametrize("version", [OLD, NEWEST_OF_FILES, NEWEST])
def test_what_is_added(version: str) -> None:
    """0.14.1 has its files in order, and cannot be imported with the torch of these tests."""
    result, plan = edits.plan(tree("deepspeed", version), FIX)
    assert result.outcome is Outcome.APPLIES
    found = {module: [line for line in added if line] for module, added in edits.added_lines(plan).items()}
    function = edits.definition(tree("deepspeed", version), RESHAPE_UTILS, _ranks_in_name)
    files = {"reshape_utils": [*function, *FILES]} if numbers(version) <= numbers(NEWEST_OF_FILES) else {}
    assert found == {**files, "ds_to_universal": [FRAGMENTS]}


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("version", releases("deepspeed", oldest="0.14.2"))
def test_fixed_upstream(version: str, delivery: str, record_property: Callable[[str, object], None]) -> None:
    edits.check_fixed_upstream(version, FIX, record_property)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return edits.copy_of(tree("deepspeed", OLD), FIX, tmp_path)


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (RESHAPE_UTILS, "return zero_files", "return list(zero_files)"),
        (RESHAPE_UTILS, "def get_zero_files(", "def zero_files("),
        (CONVERTER, BY_NAME, BY_NAME.replace("list(", "set(")),
        (CONVERTER, "def _merge_zero_shards(", "def _merge_shards("),
    ],
)
def test_unknown_code_is_left_alone(copy: Path, module: str, old: str, new: str) -> None:
    reason = edits.check_left_alone(copy, FIX, module, old, new)
    assert f"{module.rpartition('.')[2]}.py: expected" in reason


@pytest.mark.parametrize("other", ["universal_tensor_paddings", "torch_load_weights_only"])
def test_before_or_after_another_fix_of_these_files(other: str, tmp_path: Path) -> None:
    edits.check_in_any_order(tree("deepspeed", OLD), (FIX, other), tmp_path)
