"""The options of trainings that are given as plain data, with the values of a plain training."""

from typing import Any

DEEPSPEED: dict[str, Any] = {
    "stage": 1, "dtype": "bf16", "optimizer": "AdamW", "groups": 1, "steps": 2, "accumulation": 1, "bucket": 1000,
    "sub_group_size": 0, "persistent": 0, "writer": None, "contiguous_gradients": True, "experts": 0,
    "pipeline": 0, "tp": 1,
    **dict.fromkeys(
        (
            "single", "empty_group", "zero_rate", "reversed", "warm_up", "frozen", "unused", "tied", "zero_initialized",
            "buffers", "lora", "overflow", "round_robin_gradients", "overlap_comm", "hpz", "offload", "fp32_gradients",
            "clipping", "sequences", "momentum_in_memory", "ends_at_save", "parameter_alignment",
            "stage_decay",
        ),
        False,
    ),
}  # fmt: skip
MEGATRON: dict[str, Any] = {
    "tp": 1, "pp": 1, "ep": 0, "cp": 1, "instances": 1, "dtype": "bf16", "optimizer": "distributed", "inner": "fused",
    "algorithm": "adam", "offload": None, "format": "fully_reshardable", "steps": 2, "bucket": 0,
    "backend": "torch_dist",
    **dict.fromkeys(
        (
            "overlap", "precision_aware", "decoupled_rate", "mup", "fp32_norms", "gated", "untied", "biases", "frozen",
            "zero_initialized", "scheduler", "overflow", "asynchronous", "persistent", "clipping", "learned_positions",
            "trainer", "parallel_load", "fsdp2", "non_persistent",
        ),
        False,
    ),
}  # fmt: skip
