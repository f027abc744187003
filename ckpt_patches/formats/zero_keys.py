"""The keys in a ZeRO checkpoint: those that every rank's file has, and those that no load does without. Pure.

One program writes all ranks' files: their keys are the same, but for what is a rank's own (fragments, states).
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckpt_patches.formats import settings
from ckpt_patches.formats.torch_file import Instance
from ckpt_patches.runtime.shown import shown

# Below these the keys are a rank's own (states have checks of their own), or of the run's configuration.
OWN = ("param_slice_mappings", "state", "ds_config")
# Keys that all ranks have, with values of their own; of settings there is a check of its own.
OWN_VALUES = ("group_paddings", "param_groups", "ds_zero_partition_groups")
ITEM = re.compile(r"\[\d+\]")  # of a list, in a path
MOST_KEYS = 10_000  # of a file; there are about 100
# What `load_checkpoint` of every release of DeepSpeed takes of a model-states file, and fails without.
OF_THE_MODEL = ("module", "lr_scheduler", "global_steps", "skipped_steps", "dp_world_size", "mp_world_size")
# Of the optimizer's state, which stages 1 and 2 want at a load.
VERSION = "['optimizer_state_dict']['ds_version']"


def keys_of(value: Any) -> dict[str, Any]:
    """The paths of all keys and of all items of lists, those of tensors too, and the plain value that is there.

    None stands for what is no plain value, and for what is a rank's own.
    """
    return dict(item for item, _ in zip(_keys(value, "", own=False), range(MOST_KEYS), strict=False))


def _keys(value: Any, path: str, *, own: bool) -> Iterator[tuple[str, Any]]:
    held = value.fields if isinstance(value, Instance) else value
    if isinstance(held, Mapping):
        entries: Any = held.items()
    elif isinstance(held, list):
        entries = enumerate(held)
    else:
        return
    for name, item in entries:
        key = sys.intern(f"{path}[{shown(name)}]")  # the same for every rank
        plain = isinstance(item, (int, float, str)) and not own
        yield key, item if plain else None
        if name not in OWN:
            yield from _keys(item, key, own=own or name in OWN_VALUES)


def contradictions(own: Mapping[str, Any], usual: Mapping[str, Any]) -> Iterator[str]:
    """What a rank's file lacks that others have, and what it states otherwise, in words.

    Of a key and those below it the first alone: `usual` is in the order of the keys.
    """
    last = ""
    for key, value in usual.items():
        if key not in own:
            if not (last and key.startswith(f"{last}[")):
                last = key
                yield f"no {key}, which other ranks' files have"
        elif settings.differ(own[key], value):
            yield f"{key} is {shown(own[key])}, and {shown(value)} on other ranks"


def usual(files: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """All keys that any rank's file has, in their order, with the value that the first one has there."""
    found: dict[str, Any] = {}
    for own in files:
        if not own.keys() <= found.keys():
            found = {**own, **found}
    return dict(sorted(found.items()))
