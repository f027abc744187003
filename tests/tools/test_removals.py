"""Deleting any file, key, array or chunk of a checkpoint, or taking a file from the next save, is never called WHOLE.

The exceptions are in `UNTOLD`, by kind; a load of each by upstream changes no state, or fails.
"""

import contextlib
import fnmatch
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import test_audit_trainer
from ckpt_patches.audit.audit import WHOLE
from ckpt_patches.formats import torch_file
from crafted_files import copied, delete, found_in, keys, with_other_value, without
from healthy_and_damaged import checkpoint_in
from healthy_kinds import NEW, Job, kinds
from torch_dist_indexes import INDEX, changed_index
from upstream import once

pytestmark = pytest.mark.slow

Key = tuple[Any, ...]
# Handled as one value: the run's configuration, and how a conversion splits parameters, which no load reads.
AS_ONE = ("ds_config", "universal_checkpoint_info")


class Removal(NamedTuple):
    """What is deleted or replaced, and how."""

    what: str
    make: Callable[[Path], object]  # in a copy of the checkpoint


def removals(folder: Path, later: Path) -> Iterator[Removal]:
    """All removals of a checkpoint; `later` is the run's next save."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        name = path.relative_to(folder)
        yield Removal(f"{name} deleted", without(str(name)))
        for source, how in ((later / name, "from the next step"), (_like(path, files), "from its neighbor")):
            if source and source.exists() and source.read_bytes() != path.read_bytes() and _has_many(name):
                yield Removal(f"{name} {how}", partial(_take, name=name, source=source))
        if path.suffix in (".pt", ".bin", ".pth"):
            for key in keys(torch_file.read(path, trust=True).value, AS_ONE):
                yield Removal(f"{name}{_shown(key)} deleted", partial(_delete_key, name=name, key=key))
    for path in sorted({*(zarray.parent for zarray in folder.rglob(".zarray")), *folder.glob("mp_rank_*/")}):
        yield Removal(f"{path.name} deleted", without(path.name))
    if (folder / INDEX).exists():
        yield from _in_index(folder)


def _has_many(name: Path) -> bool:
    """Whether a file has more than one array: another value of one array is plausible."""
    return name.parts[0] != "zero" and name.suffix in (".pt", ".bin", ".distcp", ".metadata", ".json")


def _like(path: Path, files: list[Path]) -> Path | None:
    """A file whose name differs only in digits."""
    own = [
        other for other in files if re.sub(r"\d", "0", str(other)) == re.sub(r"\d", "0", str(path)) and other != path
    ]
    return own[0] if own else None


def _take(copy: Path, name: Path, source: Path) -> None:
    shutil.copy(source, copy / name)


def _shown(key: Key) -> str:
    return "".join(f"[{part!r}]" for part in key)


def _delete_key(copy: Path, name: Path, key: Key) -> None:
    with_other_value(copy / name, lambda value: delete(value, key))


def _in_index(folder: Path) -> Iterator[Removal]:
    """Each tensor and chunk in the index of torch.distributed.checkpoint, and each key of an object."""
    with changed_index(folder) as index:
        names, places = list(index.state_dict_metadata), list(index.storage_data)
    for name in names:
        yield Removal(f"{name} deleted", partial(_delete_entry, name=name))
    for number, key in enumerate(places):
        if key.offset is not None:
            yield Removal(f"chunk {number} of {key.fqn} deleted", partial(_delete_chunk, number=number))
            continue
        with _taken_out(folder, key.fqn) as file, contextlib.suppress(torch_file.BadFileError):
            for inner in keys(torch_file.read(file, trust=True).value, AS_ONE):
                yield Removal(f"{key.fqn}{_shown(inner)} deleted", partial(_delete_in_object, name=key.fqn, key=inner))


def _delete_entry(copy: Path, name: str) -> None:
    with changed_index(copy) as index:
        del index.state_dict_metadata[name]
        for key in [key for key in index.storage_data if key.fqn == name]:
            del index.storage_data[key]


def _delete_chunk(copy: Path, number: int) -> None:
    with changed_index(copy) as index:
        del index.storage_data[list(index.storage_data)[number]]


@contextlib.contextmanager
def _taken_out(folder: Path, name: str) -> Iterator[Path]:
    """A file with an object's bytes."""
    with changed_index(folder) as index, tempfile.TemporaryDirectory() as scratch:
        (place,) = [place for key, place in index.storage_data.items() if key.fqn == name]
        file = Path(scratch, "object.pt")
        data = (folder / place.relative_path).read_bytes()
        file.write_bytes(data[place.offset : place.offset + place.length])
        yield file


def _delete_in_object(copy: Path, name: str, key: Key) -> None:
    with _taken_out(copy, name) as file, changed_index(copy) as index:
        with_other_value(file, lambda value: delete(value, key))
        (place,) = [place for own, place in index.storage_data.items() if own.fqn == name]
        with open(copy / place.relative_path, "ab") as into:
            place.offset, place.length = into.tell(), into.write(file.read_bytes())


# The checkpoints


def drawn(kind: str) -> tuple[Path, Path]:
    """A save of a kind of healthy_kinds.py, and the next one of its run."""

    def write(out: Path) -> None:
        own = kinds()[kind]
        assert own.write([(Job(kind, 3, out), own.options)]) == []

    folder = once(f"removals-{kind.replace(', ', '-').replace(': ', '-').replace(' ', '-')}", write)
    return checkpoint_in(folder / "earlier"), checkpoint_in(folder / "judged")


def of_trainer() -> tuple[Path, Path]:
    folder = once("removals-trainer", lambda out: test_audit_trainer.run(out, ranks=2))
    return folder / "checkpoint-2", folder / "checkpoint-4"


# What is not detected, by a pattern of kinds. A load needs none of it, fails without it, or goes on with its own.
SETTINGS = "amsgrad|capturable|decoupled_weight_decay|differentiable|eps|foreach|fused|initial_lr|maximize|weight_decay"
NOT_LOADED = (
    "buffer_names|frozen_param_shapes|shared_params|frozen_param_fragments|data_sampler|random_ltd|global_samples"
    "|checkpoint_parallel_dimensions|ds_config|ds_version|universal_checkpoint_info"
)
ARGUMENTS = (
    "iteration|world_size|consumed_train_samples|data_parallel_size|tensor_model_parallel_size"
    "|pipeline_model_parallel_size|padded_vocab_size|bf16"
)
UNTOLD: tuple[tuple[str, str], ...] = (
    ("*", rf"(\['|\.)({SETTINGS})('\])? deleted"),
    ("deepspeed*", rf"model_states\.pt\['({NOT_LOADED})'\]"),
    ("deepspeed: zero [123]*", r"model_states\.pt\['optimizer'\] deleted"),  # its own files have it
    ("deepspeed: zero 3*", "model_states.pt from its neighbor"),  # they are equal but for the rank's random states
    ("deepspeed: zero 0*", r"\['state'\]\[\d+\] deleted"),  # a frozen parameter has none
    ("deepspeed: zero 0*", r"\['param_shapes'\] deleted"),
    ("universal*", rf"model_states\.pt\['({NOT_LOADED}|optimizer|param_shapes)'\]|\['cat_dim'\]"),
    ("universal*", r"zero/optimizer_state\.pt\['(?!param_groups|optimizer_state_dict|base_optimizer_state)"),
    ("universal*", r"\['params'\]\[0\] deleted|optimizer_state\.pt\['param_groups'\] deleted"),
    ("universal: zero 3*", r"model_states\.pt (deleted|from)"),  # the optimizer's files have all
    ("megatron*", rf"\['args'\]\['({ARGUMENTS})'\]"),  # they differ between releases
    ("megatron*", r"param_groups'\]\[\d\] deleted"),  # one of several groups: their number is stored nowhere
    ("megatron*", r"\['buckets_coalesced'\] deleted|\.sync"),
    ("megatron*", r"__\d_\d\.distcp from the next step"),  # from one rank: no file states its step
    ("megatron*torch", r"distrib_optim\.pt from the next step"),  # all buckets at once; they state no step
    ("dcp*", r"__0_0\.distcp from the next step"),
    ("ranks*", r"fsdp_config\.json deleted|model_world_size_4_rank_\d\.pt from the next step"),
    ("trainer", r"\['state'\]\[\d+\] deleted|(rng_state_\d|scheduler)\.pth?\[|training_args\.bin"),
)
CHOSEN = [
    *("deepspeed: zero 2", "dcp: AdamW", "trainer", f"megatron: {NEW}, fully_reshardable"),
    *(
        pytest.param(kind, marks=pytest.mark.exhaustive)
        for kind in (
            *("deepspeed: zero 0", "deepspeed: zero 3", "universal: zero 2", "universal: zero 3"),
            *("ranks: files of ranks", f"megatron: {NEW}, torch", f"megatron: {NEW}, dp_reshardable"),
            *(f"megatron: {NEW}, dp_zero_gather_scatter", f"megatron: {NEW}, tensor parallel"),
            *("megatron: 0.14.0, zarr", "megatron: 0.14.0, torch_dist"),
        )
    ),
]


@pytest.mark.parametrize("kind", CHOSEN)
def test_nothing_is_missed_but_what_a_load_does_not_need(kind: str, tmp_path: Path) -> None:
    folder, later = of_trainer() if kind == "trainer" else drawn(kind)
    assert found_in(folder) == found_in(later) == (WHOLE, set())
    patterns = [pattern for kinds, pattern in UNTOLD if fnmatch.fnmatch(kind, kinds)]
    missed, every = [], list(removals(folder, later))
    assert len(every) > 60
    for removal in every:
        copy = copied(folder, tmp_path)
        removal.make(copy)
        if found_in(copy)[0] == WHOLE and not any(re.search(pattern, removal.what) for pattern in patterns):
            missed.append(removal.what)
        shutil.rmtree(copy)
    assert missed == []
