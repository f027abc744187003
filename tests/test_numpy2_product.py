"""numpy2_product: the real megatron-core under a real NumPy 2."""

from upstream import affected, run_json, tree, with_fix, without_fix

FIX = "numpy2_product"
AFFECTED = affected(FIX)
NUMPY2 = "2.2.6"
CALLERS = {"mapping.global_coordinates", "_shard_size", "_validate_sharding_for_key_flattened"}


def call_under_numpy2(version: str, delivery: str) -> dict[str, str]:
    """What failed, by function."""
    path = [tree("numpy", NUMPY2)]
    found = run_json("numpy2_product", tree=tree("megatron-core", version), delivery=delivery, path=path)
    assert found["numpy"] == NUMPY2
    failed: dict[str, str] = found["failed"]
    return failed


@without_fix(FIX, AFFECTED)
def test_upstream_calls_a_name_that_numpy_2_does_not_have(version: str, delivery: str) -> None:
    failed = call_under_numpy2(version, delivery)
    assert failed.keys() == CALLERS
    assert all("has no attribute 'product'" in message for message in failed.values())


@with_fix(FIX, AFFECTED)
def test_it_runs_under_numpy_2(version: str, delivery: str) -> None:
    assert call_under_numpy2(version, delivery) == {}
