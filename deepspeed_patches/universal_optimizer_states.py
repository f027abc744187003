"""Convert and load universal checkpoints of any optimizer, with all of its states.

More than 150 lines: without its load of Muon's momentum, checkpoints that version 0.2 loads right would be refused.

https://github.com/deepspeedai/DeepSpeed/issues/8608
"""

import ast

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import NoMatch, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import glob
    import os
    from typing import Any

    import torch

CONVERTER = "deepspeed.checkpoint.ds_to_universal"
STAGE_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2"
STAGE3 = "deepspeed.runtime.zero.stage3"
BASE_OPTIMIZER = "deepspeed.runtime.base_optimizer"


fix = Fix(
    __name__,
    upstream=(
        "https://github.com/deepspeedai/DeepSpeed/issues/8608",
        "https://github.com/deepspeedai/DeepSpeed/pull/8609",
    ),
    symptom="`ds_to_universal` fails with `KeyError: 'exp_avg'`, or drops states",
    releases=(("0.15.0", newest("deepspeed")),),
    stacks="Lion, SGD, Muon, Adagrad, AMSGrad, and any other optimizer than Adam",
    silent=True,
    test="tests/unit/checkpoint/test_universal_optimizer_states.py",
)

FLAT_STATE = """param_group = optim_sd[BASE_OPTIMIZER_STATE]["param_groups"][param_group_id]
flat_state = _flat_states(state_groups.get(param_group_id, {}),
                          fp32_groups[param_group_id],
                          is_muon=param_group.get("use_muon", False))"""
FLAT_STATE_3 = """flat_state = _flat_states({states}.get({group}, {{}}),
                          {master})
flat_state.pop('step', None)"""
ALL_GROUPS = "param_groups_cnt = len(fp32_groups)"
FRAGMENTS = "_states_of_fragments(slice_base_path)"

# At stage 3: the names of the states that a sub-group's parameters have.
KEYS, KEYS_BEFORE_0_18 = '["fp32", "exp_avg", "exp_avg_sq"]', "key_list"
SAVED = "_saved_states(checkpoint_dir, [self.param_names[group[0]] for group in self.fp16_groups])"
SAVED_BEFORE_0_18 = "_saved_states(checkpoint_dir, param_shapes[0])"
OF_SUB_GROUP = """states = _saved_states(checkpoint_dir, [self.param_names[fp16_group[0]]])
if key not in states:
    continue"""
STEP = "state_step = optim_sd[OPTIMIZER_STATE_DICT]['state'][0]['step']"
FIRST_STEP = """saved = optim_sd[OPTIMIZER_STATE_DICT]['state']
state_step = next((state['step'] for state in saved.values() if 'step' in state), None)"""
NO_STEP = """if not _have_step(states, saved):
    self.optimizer.state[fp32_param].pop('step', None)"""
DROP_OTHERS = """for name in self.optimizer.state[fp32_param].keys() - {*states, 'step'}:
    del self.optimizer.state[fp32_param][name]"""
LOAD = "load_hp_checkpoint_state_from_checkpoint_dir"
FLAT = "map_to_flat_opt_states(...)"
DROP = "_drop_states_not_saved(self.optimizer.state[hp_param], opt_keys, steps)"
MOMENTUM = "self._load_muon_momentum(checkpoint_folder)"


def _flat_states(state: "dict[str, object]", fp32_flat: "torch.Tensor", is_muon: bool = False) -> "dict[str, object]":
    """Return the step and the states that are split like the flattened param group, fp32 first."""
    flat_state: dict[str, object] = {"fp32": fp32_flat}
    for key, value in state.items():
        if key == "step":
            flat_state[key] = value
        elif isinstance(value, torch.Tensor) and value.dim() > 0:
            # ZeRO 1 and 2 keep Muon's momentum of each matrix in full, even if only part is here.
            is_cut = value.dim() == 1 and value.is_floating_point() and value.numel() >= fp32_flat.numel()
            if not is_cut or (is_muon and key == "momentum_buffer"):
                raise ValueError(f"expected {fp32_flat.numel()} flat elements of {key}, found {tuple(value.shape)}")
            flat_state[key] = value
    return flat_state


def _states_of_fragments(slice_base_path: str) -> "list[str]":
    """Return the states that a parameter has fragments of, fp32 first; the step is separate."""
    paths = glob.glob(os.path.join(glob.escape(slice_base_path), "*", "*"))
    names = [os.path.basename(path).rpartition(".")[0] for path in paths]
    states = ["fp32", *sorted({*names} - {"fp32", "step"})]
    counts = {state: names.count(state) for state in states}
    if len(set(counts.values())) > 1:
        raise ValueError(f"{slice_base_path}: expected as many fragments of each optimizer state, found {counts}")
    return states


def _saved_states(checkpoint_dir: str, param_names: "list[str]") -> "list[str]":
    """Return the saved states of parameters, fp32 first; the step is loaded separately."""
    files = {file for name in param_names for file in os.listdir(os.path.join(checkpoint_dir, name))}
    states = {name for name, extension in map(os.path.splitext, files) if extension == ".pt"}
    return ["fp32", *sorted(states - {"fp32", "step"})]


def _have_step(states: "list[str]", saved: "dict[int, dict[str, object]]") -> bool:
    """Whether the saved optimizer has a step for a flat tensor with these states."""
    return any("step" in state for state in saved.values() if {*states} - {"fp32"} <= state.keys())


def _drop_states_not_saved(state: "dict[str, object]", opt_keys: "set[str]", steps: "list[object]") -> None:
    """Drop the run's states that are not in the checkpoint, as before the first step."""
    if steps:
        saved = opt_keys if steps[0] is None else {*opt_keys, "step"}
        for key in state.keys() - saved:
            del state[key]


class DeepSpeedZeroOptimizer:
    """The method to insert into the class, and what it uses."""

    optimizer: "Any"
    cpu_offload: bool
    params_in_partition: "Any"
    param_names: "Any"

    def _load_muon_momentum(self, checkpoint_folder: str) -> None:
        """Load the full momentum of each matrix with a part in this rank's partition."""
        for group_index, param_group in enumerate(self.optimizer.param_groups):
            if not param_group.get("use_muon", False) or self.cpu_offload:
                continue
            momenta = []
            for lp in self.params_in_partition[group_index]:
                path = f"{checkpoint_folder}/zero/{self.param_names[lp]}/momentum_buffer.pt"
                momentum = torch.load(path, map_location=lp.device, weights_only=False)["param"]
                if momentum.numel() != lp.numel():
                    raise ValueError(f"expected {lp.numel()} elements in {path}, found {momentum.numel()}")
                momenta.append(momentum.flatten())
                if lp._hp_mapping is not None:
                    lp._hp_mapping.optim_fragment.pop("momentum_buffer", None)
            state = self.optimizer.state[param_group["params"][0]]
            state.pop("momentum_buffer", None)
            if momenta:
                state["momentum_buffer"] = torch.cat(momenta)


@fix.edit(CONVERTER, upstream_alone=True)
def convert_the_states_of_the_optimizer(source: Source) -> None:
    """Upstream extracts and merges only Adam's states, by name."""
    extract, extract_3, merge, merge_3 = map(
        source.function, ("extract_zero_shards", "extract_zero_shards_stage3", "merge_tp_slices", "merge_zero3_slices")
    )
    flat_state, flat_state_3 = FLAT_STATE.splitlines()[0], FLAT_STATE_3.splitlines()[-1]
    parts = ((ALL_GROUPS, extract), (flat_state, extract), (flat_state_3, extract_3))
    source.skip_if(*parts, (FRAGMENTS, merge), (FRAGMENTS, merge_3), _flat_states, _states_of_fragments)
    step = source.branch('"step" in state_groups[param_group_id]', within=extract)
    source.replace(source.one("flat_state = dict(...)", within=extract), FLAT_STATE, last=step)
    source.replace(source.one("param_groups_cnt = len(state_groups)", within=extract), ALL_GROUPS)
    of_sub_group = source.one("flat_state = dict(...)", within=extract_3)
    values = {keyword.arg: keyword.value for keyword in of_sub_group.value.keywords}
    moment = values.get("exp_avg")
    if not (isinstance(moment, ast.Subscript) and isinstance(moment.value, ast.Subscript) and len(values) == 3):
        raise NoMatch("expected fp32, exp_avg and exp_avg_sq in flat_state")
    states, group, master = map(source.text, (moment.value.value, moment.value.slice, values["fp32"]))
    source.replace(of_sub_group, FLAT_STATE_3.format(states=states, group=group, master=master))
    for function in (merge, merge_3):
        source.replace(
            source.one('("fp32", "exp_avg", "exp_avg_sq")', within=source.loop("state", within=function)), FRAGMENTS
        )
    source.insert_function_before(extract, _flat_states)
    source.insert_function_before(merge, _states_of_fragments)


@fix.edit(BASE_OPTIMIZER)
def drop_the_states_that_were_not_saved(source: Source) -> None:
    """Upstream loads the states in the checkpoint, and keeps the run's other states."""
    load = source.function(f"ZeROOptimizer.{LOAD}")
    source.skip_if(DROP, _drop_states_not_saved, within=load)
    source.insert_before(source.one(FLAT, within=load), DROP)
    source.insert_function_before("ZeROOptimizer", _drop_states_not_saved)


@fix.edit(STAGE_1_AND_2, releases=(("0.17.6", newest("deepspeed")),))
def load_the_momentum_of_muon(source: Source) -> None:
    """Upstream's load cuts it like the partition, so the next step lacks elements."""
    if b"use_muon" not in source.data:
        raise NoMatch("expected param groups of Muon (use_muon), found none")
    load = source.function("DeepSpeedZeroOptimizer._load_universal_checkpoint")
    method = DeepSpeedZeroOptimizer._load_muon_momentum
    source.skip_if(MOMENTUM, method, within=load)
    source.insert_after(source.one(f"self.{LOAD}(..., checkpoint_folder)", within=load), MOMENTUM)
    source.insert_method_before(load, method)


@fix.edit(STAGE3)
def load_the_saved_states_at_stage_3(source: Source) -> None:
    """Upstream loads only Adam's states and a step."""
    owner = "DeepSpeedZeroOptimizer_Stage3"
    load = source.function(f"{owner}.{LOAD}_stage3")
    by_list = bool(source.all(f"{KEYS_BEFORE_0_18} = ...", within=load))
    saved = SAVED_BEFORE_0_18 if by_list else SAVED
    functions = (_saved_states,) if by_list else (_saved_states, _have_step)
    others = (FIRST_STEP.splitlines()[0], OF_SUB_GROUP.splitlines()[0], NO_STEP, DROP_OTHERS)
    source.skip_if(saved, *(() if by_list else others), *functions, within=load)
    source.replace(source.one(KEYS, within=load), saved)
    for function in functions:
        source.insert_function_before(owner, function)
    if not by_list:
        loop = source.loop("sub_group_id, fp16_group", within=source.loop("key", within=load))
        source.replace(source.one(STEP, within=load), FIRST_STEP)
        source.insert_before(loop.body[0], OF_SUB_GROUP)
        source.insert_after(source.branch("key == 'fp32'", within=loop), f"{NO_STEP}\n{DROP_OTHERS}")
