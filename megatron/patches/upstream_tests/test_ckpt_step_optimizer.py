# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace
from unittest import mock

import pytest

from megatron.training import checkpointing


def _optimizer_file_loaded(folder, ckpt_step):
    """The file of the optimizer's state that load_checkpoint reads; the tracker names iteration 6."""
    (folder / "latest_checkpointed_iteration.txt").write_text("6")
    args = mock.MagicMock(
        load=str(folder),
        ckpt_step=ckpt_step,
        ckpt_format="torch",
        pretrained_checkpoint=None,
        auto_detect_ckpt_format=False,
        use_distributed_optimizer=True,
        use_layer_wise_distributed_optimizer=False,
        use_megatron_fsdp=False,
        finetune=False,
        no_load_optim=False,
        no_load_rng=True,
        retro_add_retriever=False,
    )
    state_dict = {
        "args": SimpleNamespace(),
        "iteration": ckpt_step or 6,
        "checkpoint_version": 3.0,
        "model": {},
        "optimizer": {},
        "num_floating_point_operations_so_far": 0,
    }
    loaded = state_dict, "name", False, checkpointing.CheckpointType.LEGACY
    optimizer = mock.MagicMock(is_stub_optimizer=False)
    with (
        mock.patch.object(checkpointing, "get_args", return_value=args),
        mock.patch.object(checkpointing, "_load_base_checkpoint", return_value=loaded),
        mock.patch.object(checkpointing, "check_checkpoint_args"),
        mock.patch.object(checkpointing, "update_num_microbatches"),
        mock.patch.object(checkpointing, "unwrap_model", side_effect=lambda model: model),
        mock.patch.object(checkpointing, "mpu"),
        mock.patch.object(checkpointing, "get_checkpoint_name", side_effect=lambda *names: names),
        mock.patch.object(
            checkpointing,
            "get_distributed_optimizer_checkpoint_name",
            side_effect=lambda name: name,
        ),
        mock.patch.object(checkpointing, "read_metadata", return_value=(6, False)),
        mock.patch.object(checkpointing, "is_last_rank", return_value=False),
        mock.patch("torch.distributed.is_initialized", return_value=False),
    ):
        checkpointing.load_checkpoint([mock.MagicMock()], optimizer, None)
    return optimizer.load_parameter_state.call_args.args[0]


@pytest.mark.parametrize(("ckpt_step", "iteration"), [(3, 3), (None, 6)])
def test_the_optimizer_state_is_of_the_iteration_of_the_weights(tmp_path, ckpt_step, iteration):
    assert _optimizer_file_loaded(tmp_path, ckpt_step)[1] == iteration
