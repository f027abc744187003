"""Keys in a ZeRO checkpoint: those that every rank's file has, and those that every load needs. Pure.

One program writes all ranks' files, so that their keys are equal, except for rank-specific ones (fragments, states).
"""

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckpt_patches.formats import settings
from ckpt_patches.formats.torch_file import Instance
from ckpt_patches.runtime.shown import shown

# Keys below these are rank-specific (states are checked separately) or the run's configuration.
OWN = ("param_slice_mappings", "state", "ds_config")
# Keys that all ranks have, with rank-specific values; settings are checked separately.
OWN_VALUES = ("group_paddings", "param_groups", "ds_zero_partition_groups")
ITEM = re.compile(r"\[\d+\]")  # an item of a list, in the path of a key
MOST_KEYS = 10_000  # per file; there are about 100
# Keys of a model-states file that `load_checkpoint` needs in every release of DeepSpeed.
OF_THE_MODEL = ("module", "lr_scheduler", "global_steps", "skipped_steps", "dp_world_size", "mp_world_size")
# Key of the optimizer's state that stages 1 and 2 need at a load.
VERSION = "['optimizer_state_dict']['ds_version']"


def keys_of(value: Any) -> dict[str, Any]:
    """The paths of all keys and list items, including tensors, with their plain values.

    The value is None if it is not plain, or is rank-specific.
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
        key = _below(path, name)
        plain = isinstance(item, (int, float, str)) and not own
        yield key, item if plain else None
        if name not in OWN:
            yield from _keys(item, key, own=own or name in OWN_VALUES)


@functools.lru_cache(MOST_KEYS, typed=True)  # of all ranks' files, of which there can be thousands
def _below(path: str, name: Any) -> str:
    return f"{path}[{shown(name)}]"


def contradictions(own: Mapping[str, Any], usual: Mapping[str, Any]) -> Iterator[str]:
    """Yield messages for keys that a rank's file lacks and others have, and for different values.

    A missing key is reported without the keys below it, which follow it because `usual` is sorted.
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
    """All keys that any rank's file has, sorted, with the value in the first file that has the key."""
    found: dict[str, Any] = {}
    for own in files:
        if not own.keys() <= found.keys():
            found = {**own, **found}
    return dict(sorted(found.items()))
