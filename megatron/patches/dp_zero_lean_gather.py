"""Gather the optimizer state directly into its final place, and scatter it from there without a second copy.

https://github.com/NVIDIA/Megatron-LM/pull/5255
"""

import ast

from ckpt_patches.engine.agreement import insert_agreement
from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Function, NoMatch, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import torch

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/NVIDIA/Megatron-LM/pull/5255",
        "https://github.com/volcengine/verl/issues/1928",
        "https://github.com/volcengine/verl/issues/1992",
    ),
    symptom="a save runs out of host memory on data-parallel rank 0",
    releases=(("0.12.0", newest("megatron-core")),),
    stacks="torch and fully_reshardable formats, distributed optimizer",
    silent=False,
    off_because="it has not run over NCCL on several GPUs",
    test="tests/unit_tests/dist_checkpointing/test_dp_zero_lean_gather.py",
)

DISTRIB_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
CLASS = "DistributedOptimizer"
SAVE = f"{CLASS}.get_parameter_state_dp_zero"
LOAD = f"{CLASS}.load_parameter_state_from_dp_zero"

# For one state of one bucket: receive buffers, gather, concatenation, and the copy into the world tensor.
GATHER = """
for key, send_tensor in local_shards.items():
    if ...:
        recv_tensors = ...
    else:
        recv_tensors = None
    torch.distributed.gather(send_tensor, recv_tensors, data_parallel_global_ranks[0], data_parallel_group_gloo)
    if ...:
        recv_tensors_concatenated = torch.cat(recv_tensors)
        start = ...
        end = ...
        world_tensors[key][start:end].copy_(...)
"""
# The same since 0.15, which can also gather with NCCL and on all ranks.
GATHER_OR_ALL_GATHER = """
for key, send_tensor in local_shards.items():
    if ...:
        device = ...
        recv_tensors = ...
    else:
        recv_tensors = None
    if not use_gloo_comm:
        send_tensor = send_tensor.cuda()
    if return_on_all_ranks:
        torch.distributed.all_gather(recv_tensors, send_tensor, data_parallel_group)
    else:
        torch.distributed.gather(send_tensor, recv_tensors, data_parallel_global_ranks[0], data_parallel_group)
    send_tensor = None
    if ...:
        if not use_gloo_comm:
            recv_tensors = ...
        recv_tensors_concatenated = torch.cat(recv_tensors)
        start = ...
        end = ...
        world_tensors[key][start:end].copy_(...)
"""
# Sent shards are freed before the next bucket's shards are built.
GATHER_IN_PLACE = """
self._gather_shards(
    world_tensors, local_shards, shard_ranges, data_parallel_group_gloo
)
del local_shards
"""
GATHER_IN_PLACE_OR_IN_PIECES = """
if use_gloo_comm and not return_on_all_ranks:
    self._gather_shards(
        world_tensors, local_shards, shard_ranges, data_parallel_group
    )
else:
    self._gather_shards_in_pieces(
        world_tensors,
        local_shards,
        shard_ranges,
        data_parallel_group,
        use_gloo_comm,
        return_on_all_ranks,
    )
del local_shards
"""
ADVANCE = "offset_in_world_tensors += gbuf_world_numel_unpadded"
# Since 0.11 a load sets all states of a parameter at once.
SET_STATES = """
for model_param, tensors in recv_tensors.items():
    self._set_main_param_and_optimizer_states(model_param, tensors)
"""
SET_STATES_OF_BUCKET = """
for model_param in list(recv_tensors):
    self._set_main_param_and_optimizer_states(
        model_param, recv_tensors.pop(model_param)
    )
"""


class DistributedOptimizer:
    """The methods to insert into upstream's class."""

    @staticmethod
    def _shard_ranges(start: int, numel: int, shard_numel: int, ranks: int) -> "list[range]":
        """Return each rank's range of a bucket in a world tensor, which has no padding.

        Args:
            start (int): offset of the bucket in the world tensor.
            numel (int): number of elements in the bucket, without padding.
            shard_numel (int): number of elements in a shard, with padding.
            ranks (int): number of data-parallel ranks.
        """
        bucket = range(start, start + numel)
        return [bucket[rank * shard_numel : (rank + 1) * shard_numel] for rank in range(ranks)]

    @staticmethod
    def _local_shard(world_tensor: "torch.Tensor | None", shard_range: range) -> "torch.Tensor":
        """Return zeros for this rank's shard, as a view of the world tensor if there is one."""
        if world_tensor is None:
            return torch.zeros((len(shard_range),), dtype=torch.float32, device="cpu")
        return world_tensor[shard_range.start : shard_range.stop].zero_()

    @staticmethod
    def _gather_shards(
        world_tensors: "dict[str, torch.Tensor]",
        local_shards: "dict[str, torch.Tensor]",
        shard_ranges: "list[range]",
        group: "torch.distributed.ProcessGroup",
    ) -> None:
        """Gather the shards of all states of a bucket into the world tensors of DP rank 0 (Gloo).

        Ranks send one message per shard, because Gloo's gather needs an extra buffer of the
        bucket's size and a copy from there. Rank 0 has built its own shard in place.
        """
        ranks = torch.distributed.get_process_group_ranks(group)
        requests = []
        for tag, (key, shard) in enumerate(local_shards.items()):
            if not world_tensors:
                if shard.numel() > 0:  # not only padding
                    requests.append(torch.distributed.isend(shard, ranks[0], group, tag))
                continue
            for source, shard_range in zip(ranks[1:], shard_ranges[1:], strict=True):
                if len(shard_range) > 0:
                    place = world_tensors[key][shard_range.start : shard_range.stop]
                    requests.append(torch.distributed.irecv(place, source, group, tag))
        for request in requests:
            request.wait()

    @staticmethod
    def _gather_shards_in_pieces(
        world_tensors: "dict[str, torch.Tensor]",
        local_shards: "dict[str, torch.Tensor]",
        shard_ranges: "list[range]",
        group: "torch.distributed.ProcessGroup",
        use_gloo_comm: bool,
        return_on_all_ranks: bool,
    ) -> None:
        """Gather the shards of all states of a bucket on the ranks that have world tensors.

        Each collective transfers one piece of every rank's shard through a buffer that holds all
        of these pieces: 256 MiB, or 64 KiB per rank if that is more.
        """
        device = "cpu" if use_gloo_comm else torch.cuda.current_device()
        piece_numel = max(2**26 // len(shard_ranges), 2**14)
        shard_numel = max(len(shard_range) for shard_range in shard_ranges)
        for key, shard in local_shards.items():
            for start in range(0, shard_numel, piece_numel):
                numel = min(piece_numel, shard_numel - start)
                piece = shard[start : start + numel]  # shorter or empty if it reaches the padding
                piece = torch.nn.functional.pad(piece, (0, numel - piece.numel())).to(device)
                pieces = (len(shard_ranges) if world_tensors else 0, numel)
                received = torch.empty(pieces, dtype=torch.float32, device=device)
                if return_on_all_ranks:
                    torch.distributed.all_gather_into_tensor(received.view(-1), piece, group)
                else:
                    destination = torch.distributed.get_global_rank(group, 0)
                    torch.distributed.gather(piece, list(received), destination, group)
                for rank in range(len(received)):
                    part = shard_ranges[rank][start : start + numel]
                    place = world_tensors[key][part.start : part.stop]
                    place.copy_(received[rank, : len(part)])
                del piece, received  # before the next ones are allocated

    @staticmethod
    def _padded_shards(
        world_tensor: "torch.Tensor", padded_numel: int, shard_numel: int
    ) -> "list[torch.Tensor]":
        """Split a bucket into shards of equal size: views, except shards that need padding."""
        shards = []
        for start in range(0, padded_numel, shard_numel):
            shard = world_tensor[start : start + shard_numel]
            missing = shard_numel - shard.numel()
            shards.append(torch.nn.functional.pad(shard, (0, missing)) if missing > 0 else shard)
        return shards


# The last one is for releases that can also gather with NCCL and on all ranks.
GATHERERS = (
    DistributedOptimizer._shard_ranges,
    DistributedOptimizer._local_shard,
    DistributedOptimizer._gather_shards,
    DistributedOptimizer._gather_shards_in_pieces,
)


@fix.edit(DISTRIB_OPTIMIZER)
def gather_in_place(source: Source) -> None:
    """A rank builds its own shard in its final place, and receives the others' shards in theirs."""
    save = source.function(SAVE)
    with_nccl = "use_gloo_comm" in [argument.arg for argument in save.args.args]
    methods = GATHERERS if with_nccl else GATHERERS[:3]
    source.check_parts(
        {
            **source.functions_there(f"{CLASS}.", *methods),
            **{
                f"{m.__name__} is called": source.has(f"self.{m.__name__}(...)", save)
                for m in methods
            },
            "no copy on the CPU in between": not source.has("tensors[key].detach().cpu()", save),
            "no data_parallel_global_ranks": not source.has("data_parallel_global_ranks", save),
        }
    )
    build_in_place(source, save)
    if with_nccl:
        source.replace(source.one(GATHER_OR_ALL_GATHER, within=save), GATHER_IN_PLACE_OR_IN_PIECES)
    else:
        source.replace(source.one(GATHER, within=save), GATHER_IN_PLACE)
    source.remove(source.one("data_parallel_global_ranks = ...", within=save))
    for method in methods:
        source.insert_method_before(save, method)


def build_in_place(source: Source, save: Function) -> None:
    """Build the shards in the world tensors, without an intermediate copy on the CPU."""
    if len(source.all("local_shards", within=save)) != 4:
        raise NoMatch(
            f"expected {save.name} to make local_shards, loop over them, fill them, gather them; no more"
        )
    pattern = 'local_shards = {key: ...((gbuf_local_numel,), dtype=torch.float32, device="cpu") for key in ...}'
    shards = source.one(pattern, within=save)
    fill = (
        "local_shards[key][gbuf_local_start:gbuf_local_end].data.copy_(tensors[key].detach().cpu())"
    )
    source.replace(source.one(fill, within=save).args[0], "tensors[key].detach()")
    source.insert_before(
        shards,
        """shard_ranges = self._shard_ranges(
    offset_in_world_tensors,
    gbuf_world_numel_unpadded,
    gbuf_local_numel,
    data_parallel_world_size,
)""",
    )
    source.replace(
        shards.value.value,
        """self._local_shard(
    world_tensors.get(key), shard_ranges[data_parallel_rank]
)""",
    )


# Statements that make a padded copy of each bucket and cut it into shards.
PADDING = (
    "world_tensor = torch.nn.functional.pad(world_tensor, ...)",
    "assert world_tensor.numel() == gbuf_world_numel",
    "gbuf_start_idxs = ...",
)


@fix.edit(DISTRIB_OPTIMIZER)
def scatter_in_place(source: Source) -> None:
    """Shards are sent from their place in the world tensor, except those that need padding."""
    load = source.function(LOAD)
    padded = DistributedOptimizer._padded_shards
    by_bucket = source.has("recv_tensors", within=load)
    source.check_parts(
        {
            **source.functions_there(f"{CLASS}.", padded),
            "_padded_shards is called": source.has("self._padded_shards(...)", within=load),
            **{f"no {pattern}": not source.has(pattern, within=load) for pattern in PADDING},
            **(
                {"a load bucket by bucket": loads_bucket_by_bucket(source, load)}
                if by_bucket
                else {}
            ),
        }
    )
    for statement in PADDING:
        source.remove(source.one(statement, within=load))
    pattern = "send_tensors = [world_tensor[i : (i + gbuf_local_numel)] for i in gbuf_start_idxs]"
    source.replace(
        source.one(pattern, within=load).value,
        """self._padded_shards(
    world_tensor, gbuf_world_numel, gbuf_local_numel
)""",
    )
    source.insert_method_before(load, padded)
    if by_bucket:
        load_bucket_by_bucket(source, load)


def loads_bucket_by_bucket(source: Source, load: Function) -> bool:
    """Whether the loop over states is inside the loop over buckets, with the statements that it needs."""
    buffer = source.loop("dtype, gbuf_range_map_for_all_buckets", load)
    outer = [node for node in buffer.body if isinstance(node, ast.For)]
    if not outer or source.text(outer[0].target) != "bucket_idx, gbuf_range_map":
        return False
    texts = [source.text(node) for node in (*buffer.body, *outer[0].body)]
    inner = [node for node in outer[0].body if isinstance(node, ast.For)]
    return (
        "enumerate" in source.text(outer[0].iter)
        and bool(inner)
        and source.text(inner[0].target) == "key"
        and "enumerate" not in source.text(inner[0].iter)
        and "offset_in_world_tensors = 0" in texts
        and texts.count(ADVANCE) == 1
        and source.text(inner[0]).count(ADVANCE) == 0
        and any(source.text(node) == "recv_tensors = {}" for node in outer[0].body)
        and source.has("recv_tensors.pop(model_param)", within=outer[0])
        and not source.has("recv_tensors.items()", within=load)
    )


def load_bucket_by_bucket(source: Source, load: Function) -> None:
    """Receive and set all states of a bucket before the next bucket: swap the loops over states and buckets."""
    buffer = source.loop("dtype, gbuf_range_map_for_all_buckets", load)
    states = source.loop("key", buffer)
    buckets = source.loop("bucket_idx, gbuf_range_map", states)
    received, set_states = (
        source.one("recv_tensors = {}", within=load),
        source.one(SET_STATES, within=load),
    )
    start = source.one("offset_in_world_tensors = 0", within=load)
    if buffer.body[-3:] != [received, states, set_states] or states.body != [start, buckets]:
        raise NoMatch(
            f"expected nothing but the buckets in the loop over the states in {load.name}"
        )
    for one, other in (
        (received, start),
        (states.target, buckets.target),
        (states.iter, buckets.iter),
    ):
        source.replace(one, source.text(other))
        source.replace(other, source.text(one))
    source.remove(source.one(ADVANCE, within=buckets))
    source.remove(set_states)
    source.insert_after(buckets, ADVANCE + SET_STATES_OF_BUCKET)


@fix.edit(DISTRIB_OPTIMIZER, independent=True, ours_alone=True)
def agree_first(source: Source) -> None:
    """Upstream's messages and these do not match: gathers differ, and loads order buckets and states differently."""
    save, load = source.function(SAVE), source.function(LOAD)
    insert_agreement(
        source,
        f"{fix.name}.2",  # version 1 sent different messages
        by_upstream=source.has("self._gather_shards(...)", save),
        announce=source.one("self.data_parallel_group = data_parallel_group"),
        check=(save, load),
        ranks="torch.distributed.get_process_group_ranks(self.data_parallel_group)",
        patience=30,
        before=source.class_named("Range"),
    )
