"""Write each file of a `torch` checkpoint from one rank, also if experts are sharded differently.

https://github.com/NVIDIA/Megatron-LM/pull/4678
"""

import ast
from typing import Any

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import NoMatch, Source

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
NOT_STARTED, NOT_LEGACY = (
    "not torch.distributed.is_initialized()",
    "ckpt_type != CheckpointType.LEGACY",
)
# Whether a rank writes its file: up to 0.17, in 0.18, and since 0.19.
EXPERT_RANK = "mpu.get_expert_data_parallel_rank() == 0"
CONDITIONS = (
    f"{NOT_STARTED} or {EXPERT_RANK} or {NOT_LEGACY}",
    f"{NOT_STARTED} or mpu.get_data_parallel_rank() == 0 or {EXPERT_RANK} or {NOT_LEGACY}",
    f"{NOT_STARTED} or {NOT_LEGACY} or dp_rank == 0 or expt_dp_rank == 0",
)
READ = "state_dict, checkpoint_name, release, ckpt_type = _load_base_checkpoint(...)"
RANKS = ("dp_rank = 0", "expt_dp_rank = ...")
# A rank's number in the name of its layer-wise file; parameters are distributed over context-parallel ranks, too.
OF_LAYER_WISE = "dp_rank = mpu.get_data_parallel_rank()"
OF_ALL = "dp_rank = mpu.get_data_parallel_rank(with_context_parallel=True)"


def is_first_with_checkpoint_name(
    dp_cp_group: "torch.distributed.ProcessGroup | None" = None,
    expt_dp_group: "torch.distributed.ProcessGroup | None" = None,
) -> bool:
    """Whether this rank is the first of those with the same legacy checkpoint name.

    The name contains the tensor-, pipeline- and expert-parallel rank. Ranks that share the first
    two form a data-parallel (with context-parallel) group, and those with the same experts an
    expert-data-parallel group. By default the groups are those of mpu.
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
    parameters = [argument.arg for argument in (*save.args.args, *save.args.kwonlyargs)]
    groups = [name for name in ("dp_cp_group", "expt_dp_group") if name in parameters]
    first = FIRST.format(arguments=", ".join(f"{name}={name}" for name in groups))
    ranks = [rank for rank in RANKS if source.has(rank, save)]  # since 0.19, with no other use
    both = (save, load) if "layer_wise_optimizer_" in source.text(save) else ()  # since 0.16
    source.skip_if(
        FIRST.format(arguments="..."),
        CHECK.format(args="args"),
        (CHECK.format(args=SAVED), load),
        *FUNCTIONS,
        *((OF_ALL, function) for function in both),
        *(False for _ in ranks),
        within=save,
    )
    for function in both:
        source.replace(source.one(OF_LAYER_WISE, function), OF_ALL)
    condition = source.one(source.first_there(*CONDITIONS, within=save), save)
    (writes,) = (one for one in source.all_of(ast.If, save) if condition in ast.walk(one.test))
    is_bare = condition.lineno == writes.lineno  # and not in parentheses
    terms = [NOT_STARTED, NOT_LEGACY, first]
    text = "(\n    {}\n)" if is_bare else "{}"
    source.replace(condition, text.format(("\n    or " if is_bare else "\nor ").join(terms)))
    source.remove_comment_above(writes, "For LEGACY checkpoints")
    if ranks:
        for name in ("dp_rank", "expt_dp_rank"):
            source.remove(source.one(f"{name} = 0", save))
        source.remove(source.branch_around("expt_dp_rank = ...", save))
    # Later ones in a save name what is deleted, and the first one in a load is read for rank 0.
    named = source.some("checkpoint_name = get_checkpoint_name(...)", save)[0]
    read = source.some(READ, load)[-1]
    if "rank0=False" not in source.text(read):
        raise NoMatch("expected a read of a checkpoint by each rank")
    source.insert_after(named, f"if {LEGACY}:\n    {CHECK.format(args='args')}")
    source.insert_after(read, f"if {LEGACY}:\n    {CHECK.format(args=SAVED)}")
    for inserted in FUNCTIONS:
        source.insert_function_before(save, inserted)
