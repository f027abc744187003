"""Save the rerun machine's state in every checkpoint, so that all checkpoints have the same structure.

https://github.com/NVIDIA/Megatron-LM/pull/4448
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import Source

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/NVIDIA/Megatron-LM/pull/4448",
        "https://github.com/NVIDIA/Megatron-LM/issues/4378",
    ),
    symptom="`Missing key … rerun_state_machine_state` when a suspicious step is resumed",
    releases=(("0.14.0", "0.17.1"),),
    stacks="`--rerun-mode`, `--ckpt-assume-constant-structure`",
)

IDLE = "self.state == RerunState.NOT_RUNNING_YET"
SANITIZED = "data_iterators: list[RerunDataIterator] = self._sanitize_data_iterators(data_iterator)"
WITHOUT_DATA = f"if not force and {IDLE}:\n    data_iterator = None"


@fix.edit("megatron.core.rerun_state_machine")
def save_state_of_idle_machine(source: Source) -> None:
    """A disabled machine saves no state, as before; an idle one does, but without data iterators."""
    state = source.function("RerunStateMachine.state_dict")
    is_disabled = "self.mode == RerunMode.DISABLED"
    has_data = source.has("data_iterator_checkpoints = None", within=state)
    source.skip_if(is_disabled, has_data or source.has(WITHOUT_DATA, within=state), within=state)
    source.some("force", within=state)  # up to 0.13 it is always saved
    source.replace(source.branch(IDLE, within=state).test, is_disabled)
    source.insert_before(source.one(SANITIZED, within=state), WITHOUT_DATA)
