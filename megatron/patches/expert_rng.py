"""Save and load each rank's RNG state if expert parallelism makes data-parallel ranks' states differ.

More than 150 lines: states that upstream saved for one rank of several load where they are right, as without the fix.

https://github.com/NVIDIA/Megatron-LM/pull/6858
"""

import ast
from typing import Any

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Function, NoMatch, Part, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import torch

    dist_checkpointing: Any = None
    ShardedObject: Any = None
    get_args: Any = None
    mpu: Any = None
    print_rank_0: Any = None

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/NVIDIA/Megatron-LM/pull/6858",
        "https://github.com/NVIDIA/Megatron-LM/pull/2658",
    ),
    symptom="all expert-parallel ranks resume with the random numbers of one of them",
    releases=(("0.17.0", newest("megatron-core")),),
    stacks="`megatron.training`: expert parallelism, `torch_dist`, `fsdp_dtensor`",
    silent=True,
    test="tests/unit_tests/dist_checkpointing/test_expert_rng.py",
)

OWN = "return rng_state_of_rank({groups})"
SAVE_LOCAL = """if ckpt_type == CheckpointType.LOCAL:  # each rank has its own file
    rng_state = rng_state_of_all_ranks(rng_state)"""
LOAD = """if ckpt_type == CheckpointType.LOCAL:
    gen_sd_rng_state = rng_state_of_all_ranks(gen_sd_rng_state)
else:
    gen_sd_rng_state = rng_state_to_load(gen_sd_rng_state, ckpt_args, checkpoint_name)
    ignore_rng_state = gen_sd_rng_state is None"""
GROUPS = """if tp_group is None and pp_group is None:
    tp_group = mpu.get_tensor_model_parallel_group()
    pp_group = mpu.get_pipeline_model_parallel_group()"""
COMMON = """common = {'args': None}
if 'args' in state_dict_metadata:
    torch.distributed.checkpoint.load_state_dict(common, reader, no_dist=True)"""
LOAD_FSDP = """gen_sd_rng_state = rng_state_to_load(
    gen_sd_rng_state, common['args'], reader.path, state_dict_metadata
)"""
SHARED_KEY = "state_dict['rng_state'] = rng_state_by_shared_key(state_dict['rng_state'])"
IGNORED = "ignore_rng_state = gen_sd_rng_state is None"


def rng_state_of_rank(
    rng_state: "Any",
    dp_cp_group: "torch.distributed.ProcessGroup | None" = None,
    dp_group: "torch.distributed.ProcessGroup | None" = None,
) -> "Any":
    """Give this data-parallel rank its own shard or key if experts use different RNG streams."""
    if isinstance(rng_state, list) or not mpu.model_parallel_is_initialized():
        return rng_state
    etp_size = mpu.get_expert_tensor_parallel_world_size()
    if (mpu.get_expert_model_parallel_world_size(), etp_size) == (
        1,
        mpu.get_tensor_model_parallel_world_size(),
    ):
        return rng_state
    group = dp_cp_group or mpu.get_data_parallel_group(with_context_parallel=True)
    is_sharded = isinstance(rng_state, ShardedObject)
    states = rng_state.data if is_sharded else next(iter(rng_state.values()))
    own = states
    if len(states) > 1:  # those of all data-parallel ranks (data_parallel_random_init)
        own = [states[dp_group.rank() if dp_group is not None else mpu.get_data_parallel_rank()]]
    if not is_sharded:
        return {f"{next(iter(rng_state))}, DP rank {group.rank()} of {group.size()}": own}
    return ShardedObject(
        rng_state.key,
        own * len(states),  # so that a load can take any entry
        (*rng_state.global_shape, group.size()),
        (*rng_state.global_offset, group.rank()),
    )


def rng_state_of_all_ranks(rng_state: "Any") -> "Any":
    """Return the RNG state as one object for all data-parallel ranks, as upstream saves it."""
    import copy

    if isinstance(rng_state, dict):
        ((key, states),) = rng_state.items()
        key, is_own, _ = key.partition(", DP rank")
        if is_own:  # a load fills tensors in place
            has_all = get_args().data_parallel_random_init
            count = mpu.get_data_parallel_world_size() if has_all else 1
            states = [copy.deepcopy(states[0]) for _ in range(count)]
        return {key: states}
    if not isinstance(rng_state, ShardedObject) or len(rng_state.global_shape) < 3:
        return rng_state
    *offset, rank = rng_state.global_offset
    return ShardedObject(
        rng_state.key, rng_state.data, rng_state.global_shape[:-1], tuple(offset), rank
    )


def rng_state_by_shared_key(rng_state: "dict[str, Any]") -> "dict[str, Any]":
    """Return loaded RNG states under the shared key, repeated so that a load can take any."""
    ((key, states),) = rng_state.items()
    shared_key, is_own, _ = key.partition(", DP rank")
    return {shared_key: states * mpu.get_data_parallel_world_size() if is_own else states}


def rng_state_to_load(
    rng_state: "Any", ckpt_args: "Any", checkpoint_name: str, index: "Any" = None
) -> "Any":
    """Return the RNG state to load, or None with a warning if the checkpoint has another layout's.

    Args:
        rng_state: the RNG state that this run saves.
        ckpt_args: arguments of the run that saved the checkpoint.
        checkpoint_name: the checkpoint's directory.
        index: the checkpoint's keys, by default read from there.
    """
    if isinstance(rng_state, list):
        return rng_state
    kinds = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    args = get_args()
    run, saved = (
        [getattr(one, f"{kind}_parallel_size", 1) for kind in kinds] for one in (args, ckpt_args)
    )
    has_all = args.data_parallel_random_init
    if not has_all:  # no seed depends on the context-parallel rank
        run[2] = saved[2] = 1
    if isinstance(rng_state, dict):
        is_own, prefix = ", DP rank" in next(iter(rng_state)), "rng_state."
    else:
        is_own, prefix = len(rng_state.global_shape) > 2, f"{rng_state.key}/shard_"
    if not is_own and run == saved:
        return rng_state
    if index is None:
        reader = dist_checkpointing.strategies.torch._get_filesystem_reader(checkpoint_name)
        index = reader.read_metadata().state_dict_metadata
    candidates, (tp_size, _, cp_size, ep_size, etp_size) = [rng_state], run
    # Upstream's state is right if it has all ranks', or if all ranks that share it share experts.
    if is_own and ((has_all and cp_size == 1) or tp_size % (ep_size * (etp_size or tp_size)) == 0):
        candidates.append(rng_state_of_all_ranks(rng_state))
    found = [name for name in index if name.startswith(prefix)]
    # Beside the states of ranks, that under the shared key is a placeholder.
    found = [name for name in found if ", DP rank" in name] or found
    own = [prefix + next(iter(s)) if isinstance(s, dict) else s.unique_key for s in candidates]
    is_same = run == saved if is_own else ckpt_args is None or run[:2] == saved[:2]
    for state, key in zip(candidates, own, strict=True) if is_same else ():
        if any(f"{name}.".startswith(f"{key}.") for name in found):
            return state
    if not found:
        return rng_state
    print_rank_0(
        f"WARNING: RNG state will be ignored: expected {own[0]} in {checkpoint_name}, with (TP, PP,"
        f" CP, EP, ETP) {run}, found {found[0]}, saved with {saved}. All ranks keep the states that"
        " they were seeded with."
    )
    return None


FOR_SAVE = (rng_state_of_rank, rng_state_of_all_ranks)
FOR_LOAD = (rng_state_by_shared_key, rng_state_to_load)


@fix.edit("megatron.training.checkpointing")
def save_each_rank(source: Source) -> None:
    """Upstream saves one data-parallel rank's RNG state and loads it on all ranks."""
    get, save, load = map(source.function, ("get_rng_state", "save_checkpoint", "load_checkpoint"))
    of_fsdp = source.branch("ckpt_format == 'fsdp_dtensor'", get)
    asked = source.branch("not args.no_load_rng", load)
    # Since 0.19 the groups can be None there, which get_pg_rank takes for rank 0.
    needs_groups = source.has("tp_rank = get_pg_rank(tp_group)", of_fsdp)
    parts: list[Part] = [(OWN.format(groups="..."), get), (SAVE_LOCAL, save)]
    parts += [(text, load) for text in (LOAD, LOAD_FSDP, SHARED_KEY)]
    source.skip_if(*parts, *FOR_SAVE, *FOR_LOAD, *([(GROUPS, asked)] if needs_groups else []))
    source.skip_if("(pp_size, tp_size, dp_size)", within=get)  # as in 0.16
    source.one("(pp_size, tp_size)", source.one("rng_state_list = ShardedObject(...)", get))
    source.one("rng_state_list = {f'({pp_rank}, {tp_rank})': rng_state_list}", of_fsdp)
    source.one("ignore_rng_state = False", load)
    parameters = [argument.arg for argument in get.args.args]
    groups = [name for name in ("dp_cp_group", "dp_group") if name in parameters]
    own = OWN.format(groups=", ".join(["rng_state_list", *groups]))
    source.replace(source.one("return rng_state_list", get), own)
    source.insert_after(source.one("rng_state = get_rng_state(...)", save), SAVE_LOCAL)
    to_load, of_asked = states_to_load(source, load, asked)
    source.insert_after(to_load, LOAD)
    if needs_groups:
        source.insert_before(of_asked, GROUPS)
    source.insert_after(of_asked, f"{COMMON}\n{LOAD_FSDP}\n{IGNORED}")
    taken = source.branch("f'({pp_rank}, {tp_rank})' in state_dict['rng_state']", load)
    source.insert_before(taken, SHARED_KEY)
    for for_save in FOR_SAVE:
        source.insert_function_before(save, for_save)
    for for_load in FOR_LOAD:
        source.insert_function_before(load, for_load)


def states_to_load(source: Source, load: Function, asked: ast.If) -> list[ast.stmt]:
    """The statements that build the RNG states to load, of torch_dist and fsdp_dtensor. Raises NoMatch."""
    built: list[ast.stmt] = source.all("gen_sd_rng_state = get_rng_state(...)", load)
    around = [own for state in built for own in source.all_of(ast.If, load) if state in own.body]
    is_known = len(around) == 2 and source.has("ckpt_tp_pp == run_tp_pp", around[0].test)
    if not is_known or around[1] is not asked:
        raise NoMatch(f"expected RNG states of torch_dist and fsdp_dtensor in {load.name}")
    return built
