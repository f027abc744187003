"""numpy2_product: the real megatron-core under a real NumPy 2."""

from collections.abc import Callable
from pathlib import Path

import pytest

import edits
from ckpt_patches.engine.plan import Outcome, module_path
from upstream import DELIVERIES, releases, run_json, tree

FIX = "numpy2_product"
MAPPING = "megatron.core.dist_checkpointing.mapping"
AFFECTED = releases("megatron-core", newest="0.15.3")
NUMPY2 = "2.2.6"
CALLERS = {"mapping.global_coordinates", "_shard_size", "_validate_sharding_for_key_flattened"}


def call_under_numpy2(version: str, delivery: str) -> dict[str, str]:
    """What failed, by function."""
    path = [tree("numpy", NUMPY2)]
    found = run_json("numpy2_product", tree=tree("megatron-core", version), delivery=delivery, path=path)
    assert found["numpy"] == NUMPY2
    failed: dict[str, str] = found["failed"]
    return failed


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", ["none"])
@pytest.mark.parametrize("version", AFFECTED)
def test_upstream_calls_a_name_that_numpy_2_does_not_have(version: str, delivery: str) -> None:
    failed = call_under_numpy2(version, delivery)
    assert failed.keys() == CALLERS
    assert all("has no attribute 'product'" in message for message in failed.values())


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("version", AFFECTED)
def test_it_runs_under_numpy_2(version: str, delivery: str) -> None:
    assert call_under_numpy2(version, delivery) == {}


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("version", releases("megatron-core", oldest="0.16.0"))
def test_later_releases_do_not_need_it(
    version: str, delivery: str, record_property: Callable[[str, object], None]
) -> None:
    edits.check_fixed_upstream(version, FIX, record_property)


def test_a_comment_or_a_string_is_not_a_call(tmp_path: Path) -> None:
    copy = edits.copy_of(tree("megatron-core", "0.16.1"), FIX, tmp_path)
    path = Path(module_path(str(copy), MAPPING))
    path.write_text(path.read_text() + "\n# np.product(shape)\nTEXT = 'np.product(shape)'\n")
    result, made = edits.plan(copy, FIX)
    assert (result.outcome, made.files) == (Outcome.ALREADY_THERE, {})


def test_one_line_a_call_changes() -> None:
    _, made = edits.plan(tree("megatron-core", "0.14.0"), FIX)
    added = edits.added_lines(made)
    assert {name: len(lines) for name, lines in added.items()} == {"exchange_utils": 1, "mapping": 1, "validation": 1}
    assert all("np.prod(" in line for lines in added.values() for line in lines)
