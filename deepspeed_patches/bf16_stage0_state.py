"""Save and load the optimizer's state in bf16 without ZeRO.

https://github.com/deepspeedai/DeepSpeed/pull/7786
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Source

ENGINE = "deepspeed.runtime.engine"

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/deepspeedai/DeepSpeed/pull/7786",
        "https://github.com/deepspeedai/DeepSpeed/pull/7586",
        "https://github.com/deepspeedai/DeepSpeed/issues/7571",
    ),
    symptom="no optimizer state is saved, and a resume loses the loaded weights",
    releases=(("0.17.6", newest("deepspeed")),),
    stacks="bf16 without ZeRO; from 0.18.6 only with pipeline parallelism",
    silent=True,
    depends_on=("bf16_stage0_gradients",),
    test="tests/unit/checkpoint/test_bf16_stage0_state.py",
)

ZERO = "self.zero_optimization()"
# BF16_Optimizer saves a file per rank, as ZeRO does, even at stage 0. Up to 0.17.5 it was the only bf16 optimizer.
BY_OPTIMIZER = f"{ZERO} or isinstance(self.optimizer, BF16_Optimizer)"
# Without a real optimizer, as for inference, it has no state to load.
BY_REAL_OPTIMIZER = f"""({ZERO} or
{" " * 50}(isinstance(self.optimizer, BF16_Optimizer)
{" " * 51}and self.optimizer.using_real_optimizer))"""
# Method, start of the statement that decides, and the new condition.
DECIDED = (
    ("_save_checkpoint", "zero_optimizer_state = ", BY_OPTIMIZER),
    ("_load_checkpoint", "has_zero_optimizer_state = ", BY_OPTIMIZER),
    ("load_checkpoint", "load_zero_checkpoint = load_path is not None and ", BY_REAL_OPTIMIZER),
)
OLD = (ZERO, f"({ZERO} or self.bfloat16_enabled())")

STATE = "load_optimizer_states and self.optimizer is not None and not has_zero_optimizer_state"
CHECK = "self._check_has_optimizer_state(checkpoint, load_path)"


class DeepSpeedEngine:
    """The method to insert into the class, and what it uses."""

    has_moe_layers: bool

    def _check_has_optimizer_state(self, checkpoint: "dict[str, object]", load_path: str) -> None:
        """Refuse checkpoints that DeepSpeed 0.17.6 to 0.18.4 saved in bf16 without ZeRO.

        Raises:
            RuntimeError: the checkpoint has no optimizer state. With experts it is in another file.
        """
        if not self.has_moe_layers and checkpoint.get("optimizer") is None:
            found = f"expected the optimizer's state in {load_path}, found none"
            why = "as DeepSpeed 0.17.6 to 0.18.4 saved it in bf16 without ZeRO"
            remedy = "load_optimizer_states=False loads all else, and goes on with new moments"
            raise RuntimeError(f"{found}, {why}; {remedy}")


@fix.edit(ENGINE, independent=True)
def ask_the_optimizer_where_its_state_is(source: Source) -> None:
    """Upstream checks for bf16 or a ZeRO stage, but whether each rank has a file depends on the optimizer."""
    source.some("DDP_BFLOAT16")  # up to 0.17.5 BF16_Optimizer has the state
    methods = {name: source.function(f"DeepSpeedEngine.{name}") for name, _, _ in DECIDED}
    source.skip_if(*((start + wanted, methods[name]) for name, start, wanted in DECIDED))
    for name, start, wanted in DECIDED:
        found = [statement for value in OLD for statement in source.all(start + value, within=methods[name])]
        statement = found[0] if len(found) == 1 else source.one(start + ZERO, within=methods[name])
        source.replace(statement, start + wanted)


@fix.edit(ENGINE, independent=True)
def refuse_a_checkpoint_without_the_state(source: Source) -> None:
    """Such a load fails, or keeps the new run's main parameters, which the next step writes to the weights."""
    source.some("DDP_BFLOAT16")
    load = source.function("DeepSpeedEngine._load_checkpoint")
    method = DeepSpeedEngine._check_has_optimizer_state
    source.skip_if(CHECK, method, within=load)
    source.insert_before(source.branch(STATE, within=load).body[0], CHECK)
    source.insert_method_before(load, method)
