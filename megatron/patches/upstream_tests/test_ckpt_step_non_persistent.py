# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace
from unittest import mock

import pytest

from megatron.training import checkpointing


@pytest.mark.parametrize(
    ("ckpt_step", "loaded"), [(3, "persistent"), (6, "non-persistent"), (None, "non-persistent")]
)
def test_a_step_that_was_asked_for_is_loaded(tmp_path, ckpt_step, loaded):
    """The newest checkpoints are a persistent one of iteration 3, and a non-persistent one of 6."""
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    args = SimpleNamespace(
        ckpt_step=ckpt_step,
        ckpt_format="torch_dist",
        load=str(tmp_path),
        save=str(tmp_path),
        finetune=False,
        non_persistent_ckpt_type="global",
        non_persistent_global_ckpt_dir=None,
    )
    with (
        mock.patch.object(checkpointing, "_get_non_persistent_iteration", return_value=6),
        mock.patch.object(checkpointing, "read_metadata", return_value=(3, False)),
        mock.patch.object(checkpointing, "_get_checkpoint_format", return_value="torch_dist"),
        mock.patch.object(
            checkpointing, "_load_non_persistent_base_checkpoint", return_value="non-persistent"
        ),
        mock.patch.object(
            checkpointing, "_load_global_dist_base_checkpoint", return_value="persistent"
        ),
    ):
        assert checkpointing._load_base_checkpoint(str(tmp_path), args) == loaded
