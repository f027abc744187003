"""Every fix and the upstream modules it edits, in the order in which fixes are applied.

Plain data: no import, no file access. Read when the first module of megatron or deepspeed is imported. A fix itself
lives in the file of its name and repeats its modules; a test holds the two together.
"""

CORE = "megatron.core"
DEEPSPEED = "deepspeed"

# Folder of the fixes of an upstream package, beside this package: as it is installed, or as it is in a checkout.
FOLDERS = {CORE: ("megatron_patches", "megatron/patches"), DEEPSPEED: ("deepspeed_patches",)}

# Fix: the modules it edits, all of one upstream package.
FIXES = {
    "zarr_create_synchronizer": ("megatron.core.dist_checkpointing.strategies.zarr",),
    "zarr_range_write": ("megatron.core.dist_checkpointing.strategies.zarr",),
    "dp_zero_empty_state": ("megatron.core.optimizer.distrib_optimizer",),
    "torch_adam_step": ("megatron.core.optimizer.distrib_optimizer",),
    "reshardable_padding_flag": ("megatron.core.optimizer.distrib_optimizer",),
    "reshardable_padding_save": ("megatron.core.optimizer.distrib_optimizer",),
    "fully_reshardable_shift": ("megatron.core.optimizer.distrib_optimizer",),
    "async_save_staging": ("megatron.core.dist_checkpointing.strategies.async_utils",),
    "sharding_type_default": (
        "megatron.core.optimizer.distrib_optimizer",
        "megatron.core.dist_checkpointing.mapping",
    ),
    "resume_param_groups": ("megatron.core.optimizer.optimizer", "megatron.core.optimizer.distrib_optimizer"),
    "override_learning_rate": ("megatron.core.optimizer_param_scheduler",),
    "hybrid_offload_reload": (
        "megatron.core.optimizer.cpu_offloading.hybrid_optimizer",
        "megatron.core.optimizer.distrib_optimizer",
    ),
    "hybrid_offload_resume": (
        "megatron.core.optimizer.cpu_offloading.hybrid_optimizer",
        "megatron.core.optimizer.distrib_optimizer",
    ),
    "dp_zero_lean_gather": ("megatron.core.optimizer.distrib_optimizer",),
    "numpy2_product": (
        "megatron.core.dist_checkpointing.exchange_utils",
        "megatron.core.dist_checkpointing.mapping",
        "megatron.core.dist_checkpointing.serialization",
        "megatron.core.dist_checkpointing.strategies.fully_parallel",
        "megatron.core.dist_checkpointing.validation",
    ),
    "universal_tensor_paddings": (
        "deepspeed.checkpoint.zero_checkpoint",
        "deepspeed.checkpoint.deepspeed_checkpoint",
        "deepspeed.checkpoint.ds_to_universal",
    ),
    "zero3_fragment_bounds": ("deepspeed.checkpoint.ds_to_universal",),
    "zero3_universal_rank": ("deepspeed.runtime.zero.stage3",),
    "zero3_universal_groups": ("deepspeed.runtime.zero.stage3",),
    "zero3_universal_save": ("deepspeed.runtime.engine",),
    "torch_load_weights_only": (
        "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine",
        "deepspeed.utils.zero_to_fp32",
        "deepspeed.checkpoint.deepspeed_checkpoint",
        "deepspeed.checkpoint.zero_checkpoint",
        "deepspeed.checkpoint.ds_to_universal",
        "deepspeed.checkpoint.universal_checkpoint",
        "deepspeed.runtime.base_optimizer",
        "deepspeed.runtime.zero.stage_1_and_2",
        "deepspeed.runtime.zero.stage3",
        "deepspeed.runtime.checkpoint_engine.nebula_checkpoint_engine",
    ),
    "universal_fragment_rebind": ("deepspeed.utils.tensor_fragment",),
    "optimizer_state_links": ("deepspeed.runtime.zero.stage_1_and_2", "deepspeed.runtime.bf16_optimizer"),
    "universal_empty_group": ("deepspeed.runtime.base_optimizer",),
    "universal_experts": ("deepspeed.runtime.base_optimizer", "deepspeed.runtime.zero.stage_1_and_2"),
    "universal_all_moments": (
        "deepspeed.runtime.zero.stage_1_and_2",
        "deepspeed.runtime.bf16_optimizer",
        "deepspeed.runtime.engine",
    ),
    "universal_step": ("deepspeed.runtime.engine", "deepspeed.checkpoint.universal_checkpoint"),
    "universal_group_settings": (
        "deepspeed.checkpoint.ds_to_universal",
        "deepspeed.runtime.zero.stage_1_and_2",
        "deepspeed.runtime.bf16_optimizer",
    ),
    "rank_order": ("deepspeed.checkpoint.reshape_utils", "deepspeed.checkpoint.ds_to_universal"),
    "bf16_stage0_state": ("deepspeed.runtime.engine",),
    "latest_after_all_ranks": ("deepspeed.runtime.engine",),
    "bf16_wrapper_name": (
        "deepspeed.runtime.constants",
        "deepspeed.runtime.bf16_optimizer",
        "deepspeed.runtime.base_optimizer",
    ),
}

# What is no fix, and laid over upstream in the same way by the hook, where CKPT_PATCHES_<NAME> asks for it. The last
# one is the outermost where several decorate a function. Each has a page in docs/.
OVERLAYS: dict[str, dict[str, tuple[str, ...]]] = {
    "fingerprint": {
        "fingerprint_megatron": (
            "megatron.core.optimizer.optimizer",
            "megatron.core.optimizer.distrib_optimizer",
            "megatron.core.dist_checkpointing.serialization",
        ),
        "fingerprint_deepspeed": ("deepspeed.runtime.engine",),
    },
}
EVERYTHING = {**FIXES, **{name: modules for parts in OVERLAYS.values() for name, modules in parts.items()}}

# Upstream module: its package. What the import hook looks every name up in.
TARGETS = {
    module: (CORE if module.startswith("megatron.") else DEEPSPEED)
    for modules in EVERYTHING.values()
    for module in modules
}
