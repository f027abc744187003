# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

import threading

import pytest

from megatron.training import checkpointing


def _left(folder, iterations, latest, **options):
    """The iterations of the folders that a cleanup leaves."""
    for iteration in iterations:
        (folder / f"iter_{iteration:07d}").mkdir()
    if latest is not None:
        (folder / "latest_checkpointed_iteration.txt").write_text(str(latest))
    checkpointing.cleanup_old_non_persistent_checkpoint(str(folder), **options)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    return sorted(int(path.name[len("iter_") :]) for path in folder.glob("iter_*"))


@pytest.mark.parametrize(
    ("iterations", "latest", "left"),
    [
        ([10, 20], 20, [20]),
        ([10, 20], 10, [10]),  # the save at 20 was interrupted
        ([10, 20, 30], 20, [20]),
        ([10, 20], None, [20]),  # no save is complete
        ([20, 30], 10, [20, 30]),  # somebody has removed the complete one
    ],
)
def test_the_checkpoint_that_the_tracker_names_is_kept(tmp_path, iterations, latest, left):
    assert _left(tmp_path, iterations, latest) == left


def test_an_asynchronous_save_may_still_write(tmp_path):
    assert _left(tmp_path, [5, 10, 20], 10, do_async=True) == [10, 20]
