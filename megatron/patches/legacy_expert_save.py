"""Write each file of a `torch` checkpoint from one rank, also if experts are sharded differently.

More than 150 lines: three forms of upstream's condition since 0.17, and files that the optimizer writes for each layer.

https://github.com/NVIDIA/Megatron-LM/pull/4678
"""

import ast
from typing import Any

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Function, NoMatch, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import torch

    mpu: Any = None

fix = Fix(
    __name__,
    upstream=("https://github.com/NVIDIA/Megatron-LM/pull/4678",),
    symptom="`torch` checkpoints lack files of experts, or several ranks write the same one",
    releases=(("0.17.0", newest("megatron-core")),),
    stacks="`megatron.training`: experts or context parallelism, `torch`",
    silent=True,
    test="tests/unit_tests/dist_checkpointing/test_legacy_expert_save.py",
)

FIRST = "is_first_with_checkpoint_name({arguments})"
LEGACY = "ckpt_type == CheckpointType.LEGACY"
CHECK = "check_checkpoint_names_of_experts({args}, checkpoint_name)"
SAVED = 'state_dict.get("args")'
NOT_STARTED = "not torch.distributed.is_initialized()"
EXPERT_RANK = "mpu.get_expert_data_parallel_rank() == 0"
NOT_LEGACY = "ckpt_type != CheckpointType.LEGACY"
RANKS = ("dp_rank = 0", "expt_dp_rank = ...")
LAYER_WISE = "layer_wise_optimizer_"
# A rank's number in its layer-wise file's name: parameters are distributed over context-parallel ranks, too.
OF_LAYER_WISE, OF_ALL = (
    "mpu.get_data_parallel_rank()",
    "mpu.get_data_parallel_rank(with_context_parallel=True)",
)
CONDITIONS = (  # for a rank to write its file
    (NOT_STARTED, EXPERT_RANK, NOT_LEGACY),  # up to 0.17
    (NOT_STARTED, "mpu.get_data_parallel_rank() == 0", EXPERT_RANK, NOT_LEGACY),  # 0.18
    (NOT_STARTED, NOT_LEGACY, "dp_rank == 0", "expt_dp_rank == 0"),  # since 0.19
)


def is_first_with_checkpoint_name(
    dp_cp_group: "torch.distributed.ProcessGroup | None" = None,
    expt_dp_group: "torch.distributed.ProcessGroup | None" = None,
) -> bool:
    """Whether this rank is the first of those with the same legacy checkpoint name.

    The name contains the tensor-, pipeline- and expert-parallel rank. Ranks that share the first
    two form a data-parallel (with context-parallel) group. Those with the same experts are also
    in the same expert-data-parallel group.

    Args:
        dp_cp_group: the data-parallel (with context-parallel) group, by default that of mpu.
        expt_dp_group: the group of ranks with the same experts, by default that of mpu.
    """
    if expt_dp_group is None:
        expt_dp_group = mpu.get_expert_data_parallel_group()
    if expt_dp_group.size() == 1:
        return True
    if dp_cp_group is None:
        dp_cp_group = mpu.get_data_parallel_group(with_context_parallel=True)
    if dp_cp_group.size() == 1:
        return True
    sharing_ranks = set(torch.distributed.get_process_group_ranks(dp_cp_group))
    sharing_ranks &= set(torch.distributed.get_process_group_ranks(expt_dp_group))
    return bool(torch.distributed.get_rank() == min(sharing_ranks))


def check_checkpoint_names_of_experts(args: "Any", checkpoint_name: str) -> None:
    """Raise if ranks with different expert shards have the same legacy checkpoint name.

    Args:
        args: arguments of the run that saves or saved it; None if the checkpoint has none.
        checkpoint_name: this rank's file.

    Raises:
        RuntimeError: ranks would overwrite each other's expert shards.
    """
    if not getattr(args, "num_experts", None):
        return
    tp_size = args.tensor_model_parallel_size
    ep_size = getattr(args, "expert_model_parallel_size", 1)
    etp_size = getattr(args, "expert_tensor_parallel_size", None) or tp_size
    if tp_size % etp_size == 0:
        return
    ranks = range(args.world_size // args.pipeline_model_parallel_size)
    names = {(rank % tp_size, rank // etp_size % ep_size) for rank in ranks}
    parts = {(rank % tp_size, rank // etp_size % ep_size, rank % etp_size) for rank in ranks}
    if len(names) < len(parts):
        raise RuntimeError(
            f"{checkpoint_name}: expected a file for each part of the experts, found {len(names)}"
            f" files for {len(parts)} parts in a pipeline stage. The torch format names files by"
            " tensor- and expert-parallel ranks: with several expert-tensor-parallel ranks in one"
            f" (TP {tp_size}, EP {ep_size}, ETP {etp_size}) ranks write over each other's parts,"
            " and what a checkpoint lacks cannot be recovered. Save with --ckpt-format torch_dist."
        )


FUNCTIONS = (is_first_with_checkpoint_name, check_checkpoint_names_of_experts)


@fix.edit("megatron.training.checkpointing")
def write_each_file_once(source: Source) -> None:
    """Upstream selects first ranks of data-parallel groups: some files have no writer, others several."""
    save, load = map(source.function, ("save_checkpoint", "load_checkpoint"))
    ranks = [rank for rank in RANKS if source.has(rank, save)]  # since 0.19, with no other use
    layer_wise = [
        function for function in (save, load) if LAYER_WISE in source.text(function)
    ]  # since 0.16
    source.skip_if(
        FIRST.format(arguments="..."),
        CHECK.format(args="args"),
        (CHECK.format(args=SAVED), load),
        *FUNCTIONS,
        *((f"dp_rank = {OF_ALL}", function) for function in layer_wise),
        *(False for _ in ranks),
        within=save,
    )
    for own in layer_wise:
        rank = source.one(f"dp_rank = {OF_LAYER_WISE}", within=own)
        source.replace(source.one(OF_LAYER_WISE, within=rank), OF_ALL)
    groups = [name for name in ("dp_cp_group", "expt_dp_group") if has_parameter(save, name)]
    first = FIRST.format(arguments=", ".join(f"{name}={name}" for name in groups))
    writes, condition = writing(source, save)
    terms = (NOT_STARTED, NOT_LEGACY, first)
    if condition.lineno == writes.lineno:
        source.replace(condition, "(\n    " + "\n    or ".join(terms) + "\n)")
    else:  # in parentheses
        source.replace(condition, "\nor ".join(terms))
    source.remove_comment_above(writes, "For LEGACY checkpoints")
    if ranks:
        for name in ("dp_rank", "expt_dp_rank"):
            source.remove(source.one(f"{name} = 0", within=save))
        source.remove(source.branch_around("expt_dp_rank = ...", within=save))
    source.insert_after(naming(source, save), f"if {LEGACY}:\n    {CHECK.format(args='args')}")
    source.insert_after(reading(source, load), f"if {LEGACY}:\n    {CHECK.format(args=SAVED)}")
    for function in FUNCTIONS:
        source.insert_function_before(save, function)


def writing(source: Source, save: Function) -> tuple[ast.If, ast.BoolOp]:
    """The `if` around a rank's write, and the condition (later only part of the test). Raises NoMatch."""
    found = [
        (branch, condition)
        for branch in source.all_of(ast.If, save)
        for condition in source.all_of(ast.BoolOp, branch.test)
        if isinstance(condition.op, ast.Or)
        and tuple(map(ast.unparse, condition.values)) in CONDITIONS
    ]
    if len(found) != 1:
        raise NoMatch(f"expected one known condition for a rank to save, found {len(found)}")
    return found[0]


def naming(source: Source, save: Function) -> ast.stmt:
    """The statement that names a rank's file; others name older files to delete. Raises NoMatch."""
    named = source.all("checkpoint_name = get_checkpoint_name(...)", save)
    found: list[ast.stmt] = [statement for statement in named if statement in save.body]
    if len(found) != 1:
        raise NoMatch(f"expected one name of a checkpoint to save, found {len(found)}")
    return found[0]


def reading(source: Source, load: Function) -> ast.stmt:
    """The statement that reads a rank's file. Raises NoMatch."""
    read = "state_dict, checkpoint_name, release, ckpt_type = _load_base_checkpoint(...)"
    found: ast.stmt = source.some(read, load)[-1]  # the first one reads rank 0's
    if "rank0=False" not in source.text(found):
        raise NoMatch("expected a read of a checkpoint by each rank")
    return found


def has_parameter(function: Function, name: str) -> bool:
    return name in [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
