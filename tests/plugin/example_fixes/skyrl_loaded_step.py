"""Keep the loaded step of Adam in a load of dp_reshardable optimizer state."""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import AlreadyThere, NotConcerned, Source

DISTRIB_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
LOAD = "DistributedOptimizer.load_parameter_state_from_dp_reshardable"
fix = Fix(
    __name__,
    upstream=("https://github.com/NovaSky-AI/SkyRL/issues/1401",),
    symptom="Adam goes on with the step from before the load",
    silent=True,
)


@fix.edit(DISTRIB_OPTIMIZER)
def put_the_step_back(source: Source) -> None:
    if not source.has_function(LOAD):
        raise NotConcerned
    load = source.function(LOAD)
    if source.all("loaded_steps.items()", within=load):
        raise AlreadyThere
    source.insert_after(
        load.body[-1],
        """for param, step in loaded_steps.items():
    self.optimizer.state[param]["step"] = step""",
    )
    source.insert_at_start(
        load,
        """loaded_steps = {
    param: state["step"].clone()
    for param, state in self.optimizer.state.items()
    if isinstance(state.get("step"), torch.Tensor)
}""",
    )
