# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace

import pytest
import torch

from megatron.core.parallel_state import RankGenerator
from megatron.training import checkpointing

ORDER = "tp-cp-ep-dp-pp"


class Group:
    """The ranks of a process group."""

    def __init__(self, groups, rank):
        (self.ranks,) = [ranks for ranks in groups if rank in ranks]
        self.own = self.ranks.index(rank)

    def size(self):
        return len(self.ranks)


def ranks_of_files(monkeypatch, world, tp, ep, etp, cp, pp):
    """For each name: the parts of experts of the ranks that have it, and which of them write."""
    dp, edp = world // (tp * cp * pp), world // (etp * ep * pp)
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=ORDER)
    experts = RankGenerator(tp=etp, ep=ep, dp=edp, pp=pp, cp=1, order=ORDER)
    assert dense.get_ranks("pp") == experts.get_ranks("pp")
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: group.ranks)
    files = {}
    for rank in range(world):
        dp_cp_group = Group(dense.get_ranks("dp-cp"), rank)
        expt_dp_group = Group(experts.get_ranks("dp"), rank)
        mpu = SimpleNamespace(
            get_data_parallel_group=lambda with_context_parallel, group=dp_cp_group: group,
            get_expert_data_parallel_group=lambda group=expt_dp_group: group,
        )
        monkeypatch.setattr(checkpointing, "mpu", mpu)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        tp_rank, pp_rank = [Group(dense.get_ranks(name), rank).own for name in ("tp", "pp")]
        etp_rank, ep_rank = [Group(experts.get_ranks(name), rank).own for name in ("tp", "ep")]
        parts, writers = files.setdefault((tp_rank, pp_rank, ep_rank), (set(), []))
        parts.add(etp_rank)
        if checkpointing.is_first_with_checkpoint_name():
            writers.append(rank)
    return files


def arguments(world, tp, ep, etp, pp, num_experts):
    return SimpleNamespace(
        num_experts=num_experts,
        world_size=world,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )


@pytest.mark.parametrize(
    ("world", "tp", "ep", "etp", "cp", "pp"),
    [
        (4, 1, 1, 1, 1, 1),
        (2, 2, 1, 1, 1, 1),
        (8, 4, 2, 1, 1, 1),
        (8, 4, 2, 2, 1, 1),
        (6, 2, 3, 1, 1, 1),
        (12, 4, 6, 1, 1, 1),
        (8, 2, 4, 1, 1, 1),
        (4, 1, 2, 1, 2, 1),
        (8, 2, 1, 2, 4, 1),
        (12, 2, 3, 1, 1, 2),
        (6, 3, 3, 2, 1, 1),
    ],
)
def test_each_file_is_written_by_one_rank(monkeypatch, world, tp, ep, etp, cp, pp):
    checkpointing.check_checkpoint_names_of_experts(arguments(world, tp, ep, etp, pp, 12), "name")
    files = ranks_of_files(monkeypatch, world, tp, ep, etp, cp, pp)
    assert {len(writers) for _, writers in files.values()} == {1}
    assert {len(parts) for parts, _ in files.values()} == {1}


@pytest.mark.parametrize(
    ("world", "tp", "ep", "etp", "cp", "pp"),
    [(2, 1, 1, 2, 1, 1), (4, 1, 2, 2, 1, 1), (8, 2, 1, 4, 1, 2), (6, 3, 1, 2, 1, 1)],
)
def test_files_that_are_not_of_one_part_are_refused(monkeypatch, world, tp, ep, etp, cp, pp):
    files = ranks_of_files(monkeypatch, world, tp, ep, etp, cp, pp)
    assert max(len(parts) for parts, _ in files.values()) > 1
    args = arguments(world, tp, ep, etp, pp, 12)
    with pytest.raises(RuntimeError, match="write over each other's parts"):
        checkpointing.check_checkpoint_names_of_experts(args, "name")


def test_a_rank_alone_in_a_group_writes():
    """Also with the stub groups of one rank that tools/checkpoint makes."""
    alone = SimpleNamespace(size=lambda: 1)
    assert checkpointing.is_first_with_checkpoint_name(expt_dp_group=alone)
    several = SimpleNamespace(size=lambda: 2)
    assert checkpointing.is_first_with_checkpoint_name(dp_cp_group=alone, expt_dp_group=several)
