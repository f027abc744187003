"""hybrid_offload_reload as reported: Megatron-Bridge loads a checkpoint for fine-tuning, then takes one step."""

from pathlib import Path
from typing import Any

import pytest

from upstream import DELIVERIES, releases, run_json, tree

BRIDGES = releases("megatron-bridge")
CORE = "0.16.1"

# All parameters except norms and biases, which are ones and zeros in the checkpoint as well.
MATRICES = [
    "decoder.layers.0.mlp.linear_fc1.weight",
    "decoder.layers.0.mlp.linear_fc2.weight",
    "decoder.layers.0.self_attention.linear_proj.weight",
    "decoder.layers.0.self_attention.linear_qkv.weight",
    "embedding.position_embeddings.weight",
    "embedding.word_embeddings.weight",
]


def finetune(version: str, delivery: str, out: Path, *options: str) -> list[dict[str, Any]]:
    """The resulting weights, for each way to load and each offload fraction."""
    bridge = tree("megatron-bridge", version)
    cases = run_json(
        "bridge_finetune", out, *options, tree=tree("megatron-core", CORE), path=[bridge], delivery=delivery
    )
    assert len(cases) == 9
    assert all(case["loaded"] for case in cases)
    assert isinstance(cases, list)
    return cases


@pytest.mark.parametrize("version", BRIDGES)
def test_upstream_goes_back_to_random_initialisation(version: str, tmp_path: Path) -> None:
    for case in finetune(version, "none", tmp_path):
        assert (case["lost"], case["initial"]) == (MATRICES, MATRICES), case


@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("version", BRIDGES)
def test_keeps_the_loaded_weights(version: str, delivery: str, tmp_path: Path) -> None:
    for case in finetune(version, delivery, tmp_path):
        assert case["lost"] == [], case


@pytest.mark.slow
@pytest.mark.parametrize("version", BRIDGES)
def test_the_work_around_alone_keeps_them(version: str, tmp_path: Path) -> None:
    """The program's workaround is effective: it changes copies."""
    for case in finetune(version, "none", tmp_path, "--work-around"):
        clones = ["CPU clone"] if case["fraction"] else []
        assert (case["lost"], case["work_around_changes"]) == ([], [*clones, "fp32 shard"]), case


@pytest.mark.slow
@pytest.mark.parametrize("version", BRIDGES)
def test_the_work_around_after_the_fix_changes_nothing(version: str, tmp_path: Path) -> None:
    for case in finetune(version, "hook", tmp_path, "--work-around"):
        assert (case["lost"], case["work_around_changes"]) == ([], []), case
