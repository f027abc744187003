"""Save and load each rank's RNG state if expert parallelism makes data-parallel ranks' states differ.

https://github.com/NVIDIA/Megatron-LM/pull/6858
"""

import ast
from collections.abc import Sequence
from typing import Any

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Function, NoMatch, Part, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import torch

    class CheckpointType:
        LOCAL: Any

    class FileSystemReader:
        path: Any

    class ShardedObject:
        key: str
        data: Any
        global_shape: tuple[int, ...]
        global_offset: tuple[int, ...]
        replica_id: Any

        def __init__(self, *arguments: Any) -> None:
            """Upstream's method."""

        @classmethod
        def empty_from_unique_key(cls, unique_key: str) -> "ShardedObject":
            """Upstream's method."""

    dist_checkpointing: Any = None
    get_args: Any = None
    mpu: Any = None
    print_rank_0: Any = None
    tensor_parallel: Any = None

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

BY_RANK = "rng_state_list = shard_rng_state_by_dp_rank({arguments})"
BY_KEY = "rng_state_list = key_rng_state_by_dp_rank({arguments})"
KEYED = "rng_state_list = {f'({pp_rank}, {tp_rank})': rng_state_list}"
OF_FORMAT = "ckpt_format == 'fsdp_dtensor'"  # since 0.14
FOR_LOCAL = """if ckpt_type == CheckpointType.LOCAL:  # each rank has its own file
    rng_state = rng_state_of_all_dp_ranks(rng_state)"""
LOCAL = "rng_state = rng_state_of_all_dp_ranks(rng_state)"
TO_LOAD = """gen_sd_rng_state, keep_expert_rng = rng_state_to_load(
    {arguments}
)"""
KEYED_TO_LOAD = TO_LOAD.replace("rng_state_to_load", "keyed_rng_state_to_load")
GROUPS = """if tp_group is None and pp_group is None:
    tp_group = mpu.get_tensor_model_parallel_group()
    pp_group = mpu.get_pipeline_model_parallel_group()"""
BY_SHARED_KEY = "state_dict['rng_state'] = rng_state_by_shared_key(state_dict['rng_state'])"
LOADED = "gen_sd_rng_state, keep_expert_rng = rng_state_to_load(...)"
IGNORED = "ignore_rng_state = gen_sd_rng_state is None"
UPSTREAMS = "(pp_size, tp_size, dp_size)"  # the shards of 0.16
NOT_IGNORED = "ignore_rng_state = False"
KEEP_NONE = "keep_expert_rng = False"
KEPT = "rng_state = with_expert_rng_of_this_run(rng_state)"
KEEP = f"""if keep_expert_rng:
    {KEPT}"""


def rng_states_of_dp_rank(
    states: "list[Any]",
    dp_cp_group: "torch.distributed.ProcessGroup | None" = None,
    dp_group: "torch.distributed.ProcessGroup | None" = None,
) -> "tuple[list[Any], int]":
    """Return this rank's own RNG states if experts use different RNG streams.

    Args:
        states: RNG states of this data-parallel rank, or of all in rank order.
        dp_cp_group: the data-parallel (with context-parallel) group, by default that of mpu.
        dp_group: the data-parallel group, by default that of mpu.

    Returns:
        The states, and the number of data-parallel ranks with own states: 0 if all share one.
    """
    if not mpu.model_parallel_is_initialized():
        return states, 0
    same_streams = (1, mpu.get_tensor_model_parallel_world_size())
    expert_sizes = (
        mpu.get_expert_model_parallel_world_size(),
        mpu.get_expert_tensor_parallel_world_size(),
    )
    if expert_sizes == same_streams:
        return states, 0
    dp_size = mpu.get_data_parallel_world_size(with_context_parallel=True)
    if dp_cp_group is not None:
        dp_size = dp_cp_group.size()
    if len(states) > 1:  # those of all data-parallel ranks (data_parallel_random_init)
        dp_rank = dp_group.rank() if dp_group is not None else mpu.get_data_parallel_rank()
        states = states[dp_rank : dp_rank + 1]
    return states, dp_size


def shard_rng_state_by_dp_rank(
    rng_state: "ShardedObject",
    dp_cp_group: "torch.distributed.ProcessGroup | None" = None,
    dp_group: "torch.distributed.ProcessGroup | None" = None,
) -> "ShardedObject":
    """Split an RNG state for all data-parallel ranks into one shard per rank if they differ."""
    states, dp_size = rng_states_of_dp_rank(rng_state.data, dp_cp_group, dp_group)
    if dp_size == 0:
        return rng_state
    return ShardedObject(
        rng_state.key,
        states * len(rng_state.data),  # so that a load can take any entry
        (*rng_state.global_shape, dp_size),
        (*rng_state.global_offset, rng_state.replica_id),
    )


def key_rng_state_by_dp_rank(
    rng_state: "dict[str, Any]",
    dp_cp_group: "torch.distributed.ProcessGroup | None" = None,
    dp_group: "torch.distributed.ProcessGroup | None" = None,
) -> "dict[str, Any]":
    """Add an RNG state key for each data-parallel rank if the ranks' states differ.

    Loads are partial, so the shared key stays, with a value that raises an error if it is used.
    """
    ((shared_key, shared_states),) = rng_state.items()
    states, dp_size = rng_states_of_dp_rank(shared_states, dp_cp_group, dp_group)
    if dp_size == 0:
        return rng_state
    dp_rank = mpu.get_data_parallel_rank(with_context_parallel=True)
    if dp_cp_group is not None:
        dp_rank = dp_cp_group.rank()
    refused = ("each data-parallel rank has its own; there is --no-load-rng",)  # by random.setstate
    return {
        shared_key: [{"random_rng_state": refused}] * len(shared_states),
        f"{shared_key}, DP rank {dp_rank} of {dp_size}": states,
    }


def rng_state_of_all_dp_ranks(rng_state: "Any") -> "Any":
    """Return the RNG state as one object for all data-parallel ranks, saved by one of them."""
    if not isinstance(rng_state, ShardedObject) or len(rng_state.global_shape) < 3:
        return rng_state
    *offset, dp_rank = rng_state.global_offset
    return ShardedObject(
        rng_state.key, rng_state.data, rng_state.global_shape[:-1], tuple(offset), dp_rank
    )


def rng_state_to_load(
    rng_state: "Any",
    state_dict: "dict[str, Any]",
    checkpoint_name: str,
    ckpt_type: "CheckpointType",
    dp_cp_group: "torch.distributed.ProcessGroup | None" = None,
) -> "tuple[Any, bool]":
    """Return the RNG state to load, and whether to keep this rank's expert-parallel state.

    Args:
        rng_state: the RNG state that this run saves.
        state_dict: the checkpoint's common state dict.
        checkpoint_name: the checkpoint's directory.
        ckpt_type: the checkpoint's type.
        dp_cp_group: the data-parallel (with context-parallel) group, by default that of mpu.

    Returns:
        The RNG state, or None if it belongs to other ranks and must be ignored; and whether this
        rank keeps its current expert-parallel RNG state.
    """
    if not isinstance(rng_state, ShardedObject):
        return rng_state, False
    if ckpt_type == CheckpointType.LOCAL:
        return rng_state_of_all_dp_ranks(rng_state), False
    run, saved = rng_layout(get_args()), rng_layout(state_dict.get("args"))
    is_by_dp_rank = len(rng_state.global_shape) == 3
    if not is_by_dp_rank and saved[:2] == (1, run[2]):
        return rng_state, False
    reader = dist_checkpointing.strategies.torch._get_filesystem_reader(checkpoint_name)
    shapes = {
        ShardedObject.empty_from_unique_key(key).global_shape
        for key in reader.read_metadata().state_dict_metadata
        if key.startswith(f"{rng_state.key}/shard_")
    }
    if not shapes or (rng_state.global_shape in shapes and (saved == run or not is_by_dp_rank)):
        return rng_state, False
    if not is_by_dp_rank or rng_state.global_shape[:-1] not in shapes:
        print_rank_0(
            f"WARNING: RNG state will be ignored: {checkpoint_name} has that of each data-parallel"
            f" rank with (EP, ETP) {saved[:2]} and (PP, TP, DP) {sorted(shapes)[-1]}, this run has"
            f" {run[:2]} and {rng_state.global_shape}. All ranks keep the states that they were"
            " seeded with."
        )
        return None, False
    return (
        rng_state_of_all_dp_ranks(rng_state),
        keeps_expert_rng(run, saved, checkpoint_name, dp_cp_group),
    )


def keyed_rng_state_to_load(
    rng_state: "dict[str, Any]",
    reader: "FileSystemReader",
    state_dict_metadata: "Any",
    dp_cp_group: "torch.distributed.ProcessGroup | None" = None,
) -> "tuple[dict[str, Any] | None, bool]":
    """Like rng_state_to_load, for a checkpoint with one key per rank instead of shards.

    Args:
        rng_state: the RNG state that this run saves.
        reader: reader of the checkpoint.
        state_dict_metadata: the checkpoint's keys.
        dp_cp_group: the data-parallel (with context-parallel) group, by default that of mpu.
    """
    import copy

    *shared_key, key = rng_state
    saved_keys = {name.split(".")[1] for name in state_dict_metadata if name[:10] == "rng_state."}
    by_dp_rank = sorted(saved_key for saved_key in saved_keys if "DP rank" in saved_key)
    own = {key: rng_state[key]}
    if not saved_keys or not (shared_key or by_dp_rank):
        return own, False
    common: dict[str, Any] = {"args": None}
    torch.distributed.checkpoint.load_state_dict(common, reader, no_dist=True)
    run, saved = rng_layout(get_args()), rng_layout(common["args"])
    if key in saved_keys and saved == run:
        return own, False
    if by_dp_rank:
        print_rank_0(
            f"WARNING: RNG state will be ignored: {reader.path} has that of each data-parallel rank"
            f" with (EP, ETP, TP, PP) {saved[:4]}, the last of them {by_dp_rank[-1]}, this run has"
            f" {run[:4]} and {key}. All ranks keep the states that they were seeded with."
        )
        return None, False
    # A load fills tensors in place: use copies of the tracker's tensors, one for each entry.
    states = [copy.deepcopy(rng_state[key][0]) for _ in rng_state[shared_key[0]]]
    return (
        {shared_key[0]: states},
        keeps_expert_rng(run, saved, reader.path, dp_cp_group, of_first=False),
    )


def rng_state_by_shared_key(rng_state: "dict[str, Any]") -> "dict[str, Any]":
    """Return loaded RNG states under the shared key, repeated so that a load can take any."""
    ((key, states),) = rng_state.items()
    shared_key, is_own, _ = key.partition(", DP rank")
    return {shared_key: states * mpu.get_data_parallel_world_size() if is_own else states}


def rng_layout(args: "Any") -> "tuple[int, ...]":
    """Return a run's (EP, ETP, TP, PP, CP). CP is 0 without data_parallel_random_init."""
    tp_size = getattr(args, "tensor_model_parallel_size", 1)
    return (
        getattr(args, "expert_model_parallel_size", 1),
        getattr(args, "expert_tensor_parallel_size", None) or tp_size,
        tp_size,
        getattr(args, "pipeline_model_parallel_size", 1),
        getattr(args, "context_parallel_size", 1) if get_args().data_parallel_random_init else 0,
    )


def keeps_expert_rng(
    run: "tuple[int, ...]",
    saved: "tuple[int, ...]",
    checkpoint_name: "Any",
    dp_cp_group: "torch.distributed.ProcessGroup | None" = None,
    of_first: bool = True,
) -> bool:
    """Whether to keep this rank's expert-parallel RNG state, which the checkpoint lacks.

    Args:
        run: layout of this run.
        saved: layout of the saved run.
        checkpoint_name: the checkpoint's directory.
        dp_cp_group: the data-parallel (with context-parallel) group, by default that of mpu.
        of_first: whether the group's first rank saved it; otherwise the saving rank is unknown.
    """
    if dp_cp_group is None:
        dp_cp_group = mpu.get_data_parallel_group(with_context_parallel=True)
    # The ranks that load the same state. With data_parallel_random_init, the saved list has an
    # entry for each data-parallel rank.
    is_random = get_args().data_parallel_random_init
    sharing = mpu.get_context_parallel_group() if is_random else dp_cp_group
    sharing_ranks = torch.distributed.get_process_group_ranks(sharing)
    same_experts = torch.distributed.get_process_group_ranks(mpu.get_expert_data_parallel_group())
    if saved == run and set(sharing_ranks) <= set(same_experts):
        return False
    lost = f"all ranks (saved with EP {saved[0]}, ETP {saved[1]}; now EP {run[0]}, ETP {run[1]})"
    if saved == run and not of_first:
        lost = "all data-parallel ranks but one, and which one is not known,"
    elif saved == run:
        lost = "ranks with other experts than the first data-parallel rank"
        if run[1] == run[2]:
            lost = f"expert-parallel rank{'s 1 to' if run[0] > 2 else ''} {run[0] - 1}"
    print_rank_0(
        f"WARNING: {checkpoint_name} has the RNG state of one data-parallel rank for all. The"
        f" expert-parallel RNG states of {lost} are not in it and cannot be recovered:"
        f" {'these' if of_first else 'all'} ranks keep the states that they were seeded with."
        " All others are loaded."
    )
    return saved != run or not of_first or sharing_ranks[0] not in same_experts


def with_expert_rng_of_this_run(rng_state: "dict[str, Any]") -> "dict[str, Any]":
    """Return a loaded RNG state with this rank's current expert-parallel state."""
    name = tensor_parallel.random.get_expert_parallel_rng_tracker_name()
    states = rng_state["rng_tracker_states"]
    own = tensor_parallel.get_cuda_rng_tracker().get_states()
    if name in states and name in own:
        states = {**states, name: own[name]}
    return {**rng_state, "rng_tracker_states": states}


FOR_SAVE = (rng_states_of_dp_rank, shard_rng_state_by_dp_rank, rng_state_of_all_dp_ranks)
FOR_LOAD = (rng_state_to_load, rng_layout, keeps_expert_rng, with_expert_rng_of_this_run)
OF_FSDP = (key_rng_state_by_dp_rank, keyed_rng_state_to_load, rng_state_by_shared_key)


@fix.edit("megatron.training.checkpointing")
def save_each_rank(source: Source) -> None:
    """Upstream saves one data-parallel rank's RNG state and loads it on all ranks."""
    get, save, load = map(source.function, ("get_rng_state", "save_checkpoint", "load_checkpoint"))
    has_ignored = source.has("ignore_rng_state", within=load)  # since 0.14
    has_fsdp = source.has(OF_FORMAT, get)
    needs_groups = has_fsdp and source.has(  # since 0.19, where they are None
        "tp_rank = get_pg_rank(tp_group)", source.branch(OF_FORMAT, get)
    )
    parts: list[Part] = [
        (BY_RANK.format(arguments="..."), get),
        (LOCAL, save),
        *FOR_SAVE,
        *FOR_LOAD,
    ]
    parts += [(part, load) for part in (LOADED, IGNORED, KEEP_NONE, KEPT)]
    if has_fsdp:
        parts += [(BY_KEY.format(arguments="..."), get), (BY_SHARED_KEY, load), *OF_FSDP]
        parts.append((KEYED_TO_LOAD.format(arguments="..."), load))
    if needs_groups:
        parts.append((GROUPS, if_loaded(source, load)))
    source.skip_if(*parts)
    source.skip_if(UPSTREAMS, within=get)
    groups = [name for name in ("dp_cp_group", "dp_group") if has_parameter(get, name)]
    listed = ", ".join(["rng_state_list", *groups])
    made = source.one("rng_state_list = ShardedObject(...)", within=get)
    source.one("(pp_size, tp_size)", within=made)
    source.insert_after(made, BY_RANK.format(arguments=listed))
    for save_function in FOR_SAVE:
        source.insert_function_before(save, save_function)
    source.insert_after(source.one("rng_state = get_rng_state(...)", within=save), FOR_LOCAL)
    for load_function in FOR_LOAD:
        source.insert_function_before(load, load_function)
    if has_ignored:
        source.insert_after(source.one(NOT_IGNORED, within=load), KEEP_NONE)
    else:
        source.insert_after(
            source.one("load_kwargs = {}", within=load), f"{NOT_IGNORED}\n{KEEP_NONE}"
        )
        source.insert_at(restores(source, load).test, " and not ignore_rng_state", end=True)
    group = ["dp_cp_group"] if has_parameter(load, "dp_cp_group") else []
    arguments = ["gen_sd_rng_state", "state_dict", "checkpoint_name", "ckpt_type", *group]
    of_layout = [
        branch
        for branch in source.all_of(ast.If, load)
        if source.has("ckpt_tp_pp == run_tp_pp", branch.test)
    ]
    source.insert_after(
        template(source, load, of_layout),
        TO_LOAD.format(arguments=", ".join(arguments)) + "\n" + IGNORED,
    )
    source.insert_before(
        source.one("random.setstate(rng_state['random_rng_state'])", within=load), KEEP
    )
    if has_fsdp:
        source.insert_after(source.one(KEYED, get), BY_KEY.format(arguments=listed))
        source.insert_function_before(save, key_rng_state_by_dp_rank)
        source.insert_function_before(load, keyed_rng_state_to_load)
        source.insert_function_before(load, rng_state_by_shared_key)
        asked = template(source, load, [if_loaded(source, load)])
        if needs_groups:
            source.insert_before(asked, GROUPS)
        arguments = ["gen_sd_rng_state", "reader", "state_dict_metadata", *group]
        source.insert_after(
            asked, KEYED_TO_LOAD.format(arguments=", ".join(arguments)) + "\n" + IGNORED
        )
        restored = source.branch("args.ckpt_format == 'fsdp_dtensor'", restores(source, load))
        source.insert_before(restored.body[0], BY_SHARED_KEY)


def has_parameter(function: Function, name: str) -> bool:
    return name in [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]


def restores(source: Source, load: Function) -> ast.If:
    """The `if` that restores the RNG states. Raises NoMatch."""
    setting = "random.setstate(rng_state['random_rng_state'])"
    found = [
        branch
        for branch in source.all_of(ast.If, load)
        if source.has("args.no_load_rng", branch.test) and source.has(setting, branch)
    ]
    if len(found) != 1:
        raise NoMatch(
            f"expected one `if` that restores RNG states in {load.name}, found {len(found)}"
        )
    return found[0]


def if_loaded(source: Source, load: Function) -> ast.If:
    """The `if` that requests the RNG state of an fsdp_dtensor checkpoint. Raises NoMatch."""
    return source.branch("not args.no_load_rng", load)


def template(source: Source, load: Function, branches: Sequence[ast.If]) -> ast.stmt:
    """The statement that builds the RNG state to load from a checkpoint. Raises NoMatch."""
    made = [
        statement
        for branch in branches
        for statement in branch.body
        if source.all("gen_sd_rng_state = get_rng_state(...)", statement) == [statement]
    ]
    if len(made) != 1:
        raise NoMatch(f"expected one RNG state to load in {load.name}, found {len(made)}")
    return made[0]
