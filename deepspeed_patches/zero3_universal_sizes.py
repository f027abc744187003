"""Refuse a universal checkpoint whose parameter sizes differ from the run's, at ZeRO-3.

https://github.com/deepspeedai/DeepSpeed/pull/7585
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Source

fix = Fix(
    __name__,
    upstream=("https://github.com/deepspeedai/DeepSpeed/pull/7585",),
    symptom="the loss of a random model: a larger parameter shifts all behind it",
    releases=(("0.18.0", newest("deepspeed")),),
    stacks="universal load, ZeRO 3, another vocabulary or hidden size",
    silent=True,
    test="tests/unit/checkpoint/test_zero3_universal_sizes.py",
)

CLASS = "DeepSpeedZeroOptimizer_Stage3"
# By method, the variable with a rank's part of a loaded state.
LOADS = {
    "load_hp_checkpoint_state_from_checkpoint_dir_stage3": "key_layer_state_partition",
    "load_module_checkpoint_state_from_checkpoint_dir_stage3": "param_partition",
}
LOAD_OF_RELEASES = {
    "key_layer_state_partition": ("0.15.0", newest("deepspeed")),
    "param_partition": ("0.19.3", newest("deepspeed")),
}
CHECK = """
found, expected = {part}.numel(), param.partition_numel()
if found != expected:
    raise ValueError(f"{{param_name}} has another size: {{found}} elements per rank, not {{expected}}")
"""


@fix.edit("deepspeed.runtime.zero.stage3")
def compare_sizes(source: Source) -> None:
    """Upstream copies as many elements as it finds, and shifts the next parameter accordingly."""
    # Up to 0.17.6 all parts are concatenated, and must fill the buffer.
    first = next(iter(LOADS))
    source.some(f"{LOADS[first]}.numel()", within=source.function(f"{CLASS}.{first}"))
    methods = {f"{CLASS}.{method}": part for method, part in LOADS.items()}
    found = {part: source.function_of(method, LOAD_OF_RELEASES[part]) for method, part in methods.items()}
    loads = {part: load for part, load in found.items() if load is not None}
    source.skip_if(*(("found != expected", load) for load in loads.values()))
    for part, load in loads.items():
        loaded = source.one(f"{part} = self.load_hp_checkpoint_state(...)", within=load)
        source.insert_after(loaded, CHECK.format(part=part))
