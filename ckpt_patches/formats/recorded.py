"""Where a checkpoint has the record of fingerprints that its run made, and how torch.distributed.checkpoint has it."""

import json
import re
from typing import Any

KEY = "ckpt_patches_fingerprint"  # in the common state


def is_record(name: str) -> bool:
    """Whether an entry is a record. Names in two indexes begin with their folder."""
    return re.split("[./]", name)[-1] == KEY


def from_text(text: Any) -> Any:
    """The plain record from one string; any other value is returned unchanged."""
    if not isinstance(text, str):
        return text
    try:
        plain = json.loads(text)
        for of_one in plain["states"].values():
            for row in of_one.values():
                row[3] = {int(place): bits for place, bits in row[3].items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return text
    return plain
