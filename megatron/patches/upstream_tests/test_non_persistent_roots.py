# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace
from unittest import mock

import pytest

from megatron.training import checkpointing


def _loaded_from(tmp_path, below_load, below_save, **more):
    """The folder of the non-persistent checkpoint to load, and its iteration; None if there is none."""
    args = SimpleNamespace(
        ckpt_step=None,
        load=str(tmp_path / "load"),
        save=str(tmp_path / "save"),
        finetune=False,
        exit_on_missing_checkpoint=False,
        non_persistent_ckpt_type="global",
        non_persistent_global_ckpt_dir=None,
    )
    vars(args).update(more)
    for name, iteration in (("load", below_load), ("save", below_save)):
        folder = tmp_path / name / "non_persistent"
        folder.mkdir(parents=True)
        if iteration is not None:
            (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    with (
        mock.patch("torch.distributed.is_initialized", return_value=False),
        mock.patch.object(checkpointing, "_load_non_persistent_base_checkpoint") as load,
    ):
        checkpointing._load_base_checkpoint(args.load, args)
    if load.call_args is None:
        return None
    folder, iteration = load.call_args.args[0], load.call_args.args[4]
    return str(folder).removeprefix(f"{tmp_path}/"), iteration


@pytest.mark.parametrize(
    ("below_load", "below_save", "loaded"),
    [
        (None, 6, ("save/non_persistent", 6)),
        (3, 6, ("save/non_persistent", 6)),
        (9, 6, ("load/non_persistent", 9)),
        (3, None, ("load/non_persistent", 3)),
        (None, None, None),
    ],
)
def test_the_newest_one_below_load_and_save_is_loaded(tmp_path, below_load, below_save, loaded):
    assert _loaded_from(tmp_path, below_load, below_save) == loaded


def test_a_folder_of_their_own_is_the_only_one(tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    (own / "latest_checkpointed_iteration.txt").write_text("2")
    found = _loaded_from(tmp_path, None, 6, non_persistent_global_ckpt_dir=str(own))
    assert found == ("own", 2)
