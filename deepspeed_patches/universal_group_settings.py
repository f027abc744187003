"""Keep param group settings (learning rate, betas, weight decay) in universal checkpoints, and load them.

https://github.com/deepspeedai/DeepSpeed/pull/5263
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import AlreadyThere, Function, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    import torch

CONVERTER = "deepspeed.checkpoint.ds_to_universal"
STAGE_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2"
BF16_OPTIMIZER = "deepspeed.runtime.bf16_optimizer"

fix = Fix(
    __name__,
    upstream=("https://github.com/deepspeedai/DeepSpeed/pull/5263",),
    symptom="the saved learning rates, betas and weight decays are ignored",
    releases=(("0.12.0", "0.14.0"),),
    stacks="universal load, ZeRO 1 and 2",
    silent=True,
    concerns=CONVERTER,
    depends_on=("torch_load_weights_only",),
    test="tests/unit/checkpoint/test_universal_group_settings.py",
)

KEEP = 'output_sd["param_groups"] = optim_sd[BASE_OPTIMIZER_STATE]["param_groups"]'
LOAD = "self._load_group_settings(optim_sd)"
# Uses the engine's reader, with its handling of unsafe classes. The load needs the file only for the settings, and
# continues without it.
READ = """from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

optim_state_path = os.path.join(checkpoint_dir, "optimizer_state.pt")
optim_sd = {}
if os.path.isfile(optim_state_path):
    optim_sd = TorchCheckpointEngine().load(optim_state_path, map_location="cpu")"""


class ZeROOptimizer:
    """The method to insert into DeepSpeedZeroOptimizer and BF16_Optimizer, and what it uses."""

    optimizer: "torch.optim.Optimizer"

    def _load_group_settings(self, optim_sd: "dict[str, Any]") -> None:
        """Load the saved settings of the param groups, or warn that the run's own stay."""
        import logging

        from deepspeed.utils import log_dist

        param_groups, saved_groups = self.optimizer.param_groups, optim_sd.get("param_groups", [])
        if len(saved_groups) != len(param_groups):
            log_dist(
                f"This universal checkpoint has settings of {len(saved_groups)} param groups, and this run has "
                f"{len(param_groups)}: learning rates, betas and weight decays stay those that the run was started "
                "with, and not those that were saved.",
                ranks=[0],
                level=logging.WARNING,
            )
            return
        for i, param_group in enumerate(param_groups):
            param_group.update({key: value for key, value in saved_groups[i].items() if key != "params"})


@fix.edit(CONVERTER, independent=True)
def keep_settings(source: Source) -> None:
    """Upstream omits the inner optimizer's entire state dict."""
    save = source.function("_save_optimizer_state")
    if source.has("output_sd[PARAM_GROUPS] = ...", within=save) or source.has(KEEP, within=save):
        raise AlreadyThere
    kept = source.one("output_sd = {k: v for k, v in optim_sd.items() if k not in sharded_states}", within=save)
    source.insert_after(kept, KEEP)


@fix.edit(STAGE_1_AND_2, independent=True)
def load_settings_at_stages_1_and_2(source: Source) -> None:
    load = _load_without_settings(source, "DeepSpeedZeroOptimizer")
    source.insert_after(source.one("self._load_global_state(optim_sd)", within=load), LOAD)


@fix.edit(BF16_OPTIMIZER, independent=True)
def load_settings_in_bf16_optimizer(source: Source) -> None:
    """Upstream does not read the file here."""
    load = _load_without_settings(source, "BF16_Optimizer")
    folder = source.one('checkpoint_dir = os.path.join(checkpoint_dir, "zero")', within=load)
    source.insert_after(folder, f"{READ}\n{LOAD}")


def _load_without_settings(source: Source, owner: str) -> Function:
    """Insert the method into an optimizer's class, and return the class's load method.

    Since 0.14.1 all classes load in one place, with settings. The check uses only the text, because parsing these
    modules takes long.
    """
    if b"self.load_hp_checkpoint_state_from_checkpoint_dir(" in source.data:
        raise AlreadyThere
    load = source.function(f"{owner}._load_hp_checkpoint_state")
    method = ZeROOptimizer._load_group_settings
    source.check_parts({**source.functions_there(f"{owner}.", method), LOAD: source.has(LOAD, within=load)})
    source.insert_method_before(source.function(f"{owner}._load_universal_checkpoint"), method)
    return load
