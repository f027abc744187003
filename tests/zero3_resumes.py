"""Resume ZeRO-3 runs from universal checkpoints, for tests of the bugs there."""

import functools
import json
from pathlib import Path
from typing import Any

from upstream import once, run, tree
from zero_checkpoints import PERMISSIVE, convert


def saved(version: str, kind: str, ranks: int) -> Path:
    """The folder of a training run: its checkpoint, its state then and at the end, and the converted `universal`."""
    return _saved(version, kind, ranks) / kind


@functools.cache
def _saved(version: str, kind: str, ranks: int) -> Path:
    """Trained by the unpatched release; converted with the fixes, as the converter's bugs are other fixes' subject."""

    def train(out: Path) -> None:
        run("zero_training", "write", out, kind, "--ranks", str(ranks), tree=tree("deepspeed", version))
        converted = convert(out / "converted", out / kind / "global_step2", version=version, delivery="hook")
        assert converted == {kind: ""}
        (out / "converted" / kind).rename(out / kind / "universal")

    return once(f"zero3-of-{version}-{kind}-{ranks}", train)


def kept(folder: Path) -> dict[str, Any]:
    """What a resume from a training run's folder must return."""
    return {"different": [], "losses": json.loads((folder / "losses.json").read_text()), "different_end": []}


@functools.cache
def continued(version: str, kind: str, ranks: int, delivery: str) -> Path:
    """The folder, like that of `saved`, of a run that loads the universal checkpoint, continues, and saves."""
    begin = saved(version, kind, ranks) / "universal"
    options: tuple[str | Path, ...] = ("--ranks", str(ranks), "--universal", begin)

    def train(out: Path) -> None:
        env = PERMISSIVE if delivery == "none" else {}
        run("zero_training", "write", out, kind, *options, tree=tree("deepspeed", version), delivery=delivery, env=env)
        (out / kind / "global_step2").rename(out / kind / "global_step4")  # the run's actual step

    return once(f"zero3-on-of-{version}-{kind}-{ranks}-{delivery}", train) / kind
