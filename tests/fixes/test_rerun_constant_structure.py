"""rerun_constant_structure: the step to run again is in the checkpoint of a run with a constant structure."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from trainers.lazy import mt
from upstream import proof

test_the_step_to_run_again_is_lost, test_the_step_to_run_again_is_known_after_a_load = proof(
    __file__, "Missing key in checkpoint state_dict: rerun_state_machine_state"
)


# What the ranks run

NAMES = ("ordinary", "suspicious")


def resume(rank: int, folder: Path) -> str:
    """Save at an ordinary step and at a suspicious one, and load the second checkpoint."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from megatron.core.rerun_state_machine import RerunMode, RerunState, RerunStateMachine

    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)
    machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    for name in NAMES:
        mt.make_folder(folder / name)
        if name == "suspicious":
            machine.state, machine.current_iteration = RerunState.WILL_RERUN_FROM_CHECKPOINT, 5
        dist_checkpointing.save(state(machine), str(folder / name), strategy)
    ordinary, saved = (dist_checkpointing.load_common_state_dict(str(folder / name)) for name in NAMES)
    resumed = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    if resumed.validate_state_dict(ordinary.get("rerun_state_machine")):
        return "the ordinary step is taken for one to run again"
    if RerunStateMachine(mode=RerunMode.DISABLED).state_dict(None, "torch_dist"):
        return "a machine that is disabled has a state"
    if not resumed.validate_state_dict(saved.get("rerun_state_machine")):
        return "the step to run again is not in the checkpoint"
    try:
        loaded = dist_checkpointing.load(state(resumed, force=True), str(folder / "suspicious"))
    except CheckpointException as error:  # not a subclass of Exception
        raise error.failures[rank][0] from error
    resumed.load_state_dict(loaded["rerun_state_machine"])
    return "" if resumed.current_iteration == 5 else f"iteration {resumed.current_iteration}, not 5"


def state(machine: Any, force: bool = False) -> dict[str, Any]:
    """The state dict as in Megatron-LM, with one weight."""
    of_machine = machine.state_dict(None, "torch_dist", force=force)
    return {
        **mt.one_weight(torch.ones(4)),
        **({"rerun_state_machine": of_machine} if of_machine else {}),
    }


def bug(folder: Path) -> str:
    return str(mt.results(resume, 1, folder / "checkpoint")[0])
