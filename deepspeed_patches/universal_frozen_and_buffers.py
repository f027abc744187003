"""Load frozen parameters and buffers from a universal checkpoint.

https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/engine.py#L4660
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    import re
    from typing import Any

    import torch

    dist: Any = None
    FROZEN_PARAM_FRAGMENTS = "frozen_param_fragments"

ENGINE = "deepspeed.runtime.engine"

fix = Fix(
    __name__,
    upstream=("https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/engine.py#L4660",),
    symptom="frozen parameters and buffers keep the values of the new run",
    releases=(("0.15.0", newest("deepspeed")),),
    stacks="universal load, frozen parameters (LoRA) or buffers",
    silent=True,
    test="tests/unit/checkpoint/test_universal_frozen_and_buffers.py",
)

LOADS_ALL = "not self.load_universal_checkpoint()"
LOAD_REST = "self._load_what_is_not_optimized(checkpoint, load_dir, tag, load_module_strict)"
OF_UNIVERSAL = f"""if self.load_universal_checkpoint():
    {LOAD_REST}"""


class DeepSpeedEngine:
    """The methods to insert into the class, and what they use."""

    module: "torch.nn.Module"
    checkpoint_engine: "Any"
    _get_ckpt_name: "Any"

    def _load_what_is_not_optimized(self, checkpoint: "dict[str, Any]", load_dir: str, tag: str, strict: bool) -> None:
        """Load frozen parameters, buffers and extra states, which the optimizer does not load.

        Raises:
            RuntimeError: some are missing from the checkpoint, and `strict` is true.
        """
        params = self.module.named_parameters(remove_duplicate=False)
        elsewhere = {name for name, p in params if p.requires_grad or hasattr(p, "ds_id")}
        # A tied parameter is saved under its first name.
        frozen = {name: p for name, p in self.module.named_parameters() if not p.requires_grad}
        partitioned = {name: p for name, p in frozen.items() if hasattr(p, "ds_id")}
        # With pipeline parallelism, weights are in layer files, which a conversion omits.
        dicts = [("", checkpoint["module"] or {})]
        names = torch.nn.Module.state_dict(self.module).keys()
        saved = {}
        for prefix, state in dicts:
            for key, value in state.items():
                name = f"{prefix}{key}"
                if isinstance(value, dict) and name not in names:  # a model can nest its state dict
                    dicts.append((f"{name}.", value))
                else:
                    saved[name] = value
        is_nested = len(dicts) > 1
        rest = {name: value for name, value in saved.items() if name not in elsewhere}
        found = self.module.load_state_dict(rest, strict=False) if rest and not is_nested else None
        if found is None:  # a model's own method need not return anything
            found = torch.nn.Module.load_state_dict(self.module, rest, strict=False)
        missing = [name for name in found.missing_keys if name not in elsewhere]
        if is_nested:  # such a model selects the buffers to save
            missing = [name for name in missing if name in frozen]
        missing += self._load_frozen_partitions(partitioned, load_dir, tag)
        if missing and strict:
            expected = f"all frozen parameters and buffers of this model in {os.path.join(load_dir, str(tag))}"
            remedy = "with load_module_strict=False they keep the values that they have"
            raise RuntimeError(f"expected {expected}, found no {', '.join(missing)}; {remedy}")

    def _load_frozen_partitions(self, params: "dict[str, Any]", load_dir: str, tag: str) -> "list[str]":
        """Load this rank's partitions of frozen parameters at ZeRO-3 from the saved partitions.

        Returns the names of the parameters that are not in the files.
        """
        import glob

        if not params:
            return []
        folder, own_file = os.path.split(self._get_ckpt_name(load_dir, tag))
        of_all_ranks = re.sub(r"^zero_pp_rank_\d+", "zero_pp_rank_*", own_file)
        paths = glob.glob(os.path.join(glob.escape(folder), of_all_ranks))
        paths.sort(key=lambda path: [int(number) for number in re.findall(r"_rank_(\d+)", os.path.basename(path))])
        fragments: dict[int, dict[str, torch.Tensor]] = {}  # by saving rank, read when needed
        missing = []
        for name, param in params.items():
            own, numel = param.ds_tensor.numel(), param.ds_numel
            size = -(-numel // len(paths))  # of a saving rank's partition
            begin = dist.get_rank(group=param.ds_process_group) * own
            first, last = begin // size, (min(begin + own, numel) - 1) // size
            for rank in {0, *range(first, last + 1)} - fragments.keys():
                state = self.checkpoint_engine.load(paths[rank], map_location="cpu")
                fragments[rank] = state.get(FROZEN_PARAM_FRAGMENTS) or {}
            if name not in fragments[0]:
                missing.append(name)
                continue
            found = fragments[0][name].numel()
            if found != size:
                expected = f"{size} of {numel} elements in {paths[0]}, one of {len(paths)} files"
                cause = "a file is missing, or the parameter has another shape"
                raise RuntimeError(f"{name}: expected {expected}, found {found}; {cause}")
            if begin < numel:
                saved = torch.cat([fragments[rank][name].flatten() for rank in range(first, last + 1)])
                skipped = begin - first * size
                part = saved[skipped:][:own]
                param.ds_tensor.data.view(-1).narrow(0, 0, part.numel()).copy_(part)
        return missing


@fix.edit(ENGINE)
def load_what_the_optimizer_does_not_hold(source: Source) -> None:
    """Upstream skips the module, because the optimizer's load sets the parameters; but only those it updates."""
    load = source.function("DeepSpeedEngine._load_checkpoint")
    methods = (DeepSpeedEngine._load_what_is_not_optimized, DeepSpeedEngine._load_frozen_partitions)
    source.skip_if(LOAD_REST, *methods, within=load)
    source.insert_after(source.branch(LOADS_ALL, within=load), OF_UNIVERSAL)
    for method in methods:
        source.insert_method_before(load, method)
