"""Load the optimizer's state of the iteration that `--ckpt-step` names, not of the latest one.

https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.2/megatron/training/checkpointing.py
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Source

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.2/megatron/training/checkpointing.py",
    ),
    symptom="`--ckpt-step` loads weights of that step and optimizer state of the latest",
    releases=(("0.17.0", newest("megatron-core")),),
    stacks="`megatron.training`: distributed optimizer, `torch`",
    silent=True,
    test="tests/unit_tests/dist_checkpointing/test_ckpt_step_optimizer.py",
)

# As `_load_base_checkpoint` does for the weights.
ASKED_FOR = """if getattr(args, "ckpt_step", None):
    iteration = args.ckpt_step"""


@fix.edit("megatron.training.checkpointing")
def read_the_file_of_that_iteration(source: Source) -> None:
    """`distrib_optim.pt` is found by a second look at the tracker, which names the latest iteration."""
    load = source.function("load_checkpoint")
    source.skip_if(ASKED_FOR, within=load)
    source.insert_after(
        source.one("iteration, release = read_metadata(tracker_filename)", within=load), ASKED_FOR
    )
