"""The commands `ckpt-patches fingerprint` and `compare`. Modules that need NumPy are imported when they run."""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_patches.runtime.commands import note
from ckpt_patches.runtime.options import MANY, add_distributed, add_trust, add_workers, described
from ckpt_patches.runtime.shown import printable

if TYPE_CHECKING:
    from ckpt_patches.fingerprint.comparison import Verdict
    from ckpt_patches.fingerprint.contents import Contents
    from ckpt_patches.runtime.distributed import Ranks

MOST_LINES = 1000  # of one kind
SCHEMA = 2  # of the JSON; increased when a key is renamed, removed or changes its meaning
STATUS = "exit status: 0 verified, 1 a state differs or none could be compared, 2 a checkpoint cannot be read"
RECORD = "If the run recorded fingerprints at the save (CKPT_PATCHES_FINGERPRINT=1), the files are compared with them."


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands to the command line."""
    one = commands.add_parser(
        "fingerprint",
        help="print a layout-independent checksum of every tensor",
        **described(
            "Print a 64-bit checksum of the main parameter and of each moment of every parameter in a DeepSpeed "
            "checkpoint (ZeRO or universal), or of every tensor in a checkpoint of Megatron (torch_dist or zarr), of "
            "torch.distributed.checkpoint or safetensors. Equal values have equal checksums in every layout.",
            "ckpt-patches fingerprint out/global_step1000",
            after=f"{RECORD}\n\n{STATUS}; 0 as well if the run recorded nothing",
        ),
    )
    two = commands.add_parser(
        "compare",
        help="tell whether two checkpoints are the same training state",
        **described(
            "Tell whether two checkpoints are the same training state, whatever their formats and their ranks: the "
            "input and the output of a conversion, a migration, a copy.",
            "ckpt-patches compare out/global_step1000 universal",
            "ckpt-patches compare ckpt/iter_0001000 migrated/iter_0001000",
            after=STATUS,
        ),
    )
    about = "a checkpoint's folder, such as global_step1000"
    one.add_argument("one", type=Path, metavar="PATH", help=about)
    one.add_argument("--against", dest="other", type=Path, metavar="OTHER", help="the same as `compare PATH OTHER`")
    two.add_argument("one", type=Path, metavar="ONE", help=about)
    two.add_argument("other", type=Path, metavar="OTHER", help=about)
    for command in (one, two):
        command.add_argument("--json", action="store_true", help="print JSON (ckpt-patches explain json)")
        add_workers(command, many=MANY)
        add_trust(command)
        add_distributed(command)
        command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run one of the commands and return its exit status."""
    import ckpt_patches.fingerprint.contents  # noqa: F401 - what is not installed is an error before ranks join
    from ckpt_patches.runtime.distributed import joined

    with joined(options.distributed) as ranks:
        workers = options.workers or ranks.workers
        paths = [path for path in (options.one, options.other) if path is not None]
        found = [read(path, workers, ranks, trust=options.trust_checkpoint) for path in paths]
        report = _report if options.other is None else _compare
        return ranks.first("the report", lambda: report(options, *found))


def read(path: Path, workers: int, ranks: "Ranks", *, trust: bool) -> "Contents":
    """The fingerprints in a checkpoint of any format; each of the ranks calls this.

    Raises:
        UserError: the checkpoint is damaged, or of an unsupported kind.
    """
    from ckpt_patches.convert import zero_fingerprints
    from ckpt_patches.fingerprint import contents, files
    from ckpt_patches.formats import zero_reader

    if path.is_dir() and zero_reader.is_zero(path):
        found_in_zero = zero_fingerprints.read(path, trust=trust, workers=workers, label=path.name, ranks=ranks)
        return contents.of_zero(path, *found_in_zero)
    found = files.opened(path)
    files.check_complete(found)
    return contents.of(found, workers, ranks)


def _report(options: argparse.Namespace, own: "Contents") -> int:
    """Print what was found, and the comparison with the record. Returns the exit status."""
    for why, count in Counter(own.unread.values()).items():
        example = next(name for name, its in own.unread.items() if its == why)
        tensors = f"{count} tensors have" if count > 1 else "1 tensor has"
        print(printable(f"{options.one}: {tensors} no fingerprint, as {example}: {why}"), file=sys.stderr)
    if options.json:
        rows = [{**one._asdict(), "value": one.hexadecimal} for one in own.fingerprints]
        recorded = None if own.checked is None else _keys(own.checked)
        print(json.dumps({"schema": SCHEMA, "fingerprints": rows, "recorded": recorded}, indent=1))
    else:
        names = [printable(one.parameter) for one in own.fingerprints]
        width = max(map(len, names), default=0)
        for one, name in zip(own.fingerprints, names, strict=True):
            print(f"{one.hexadecimal}  {name:{width}}  {printable(one.state):10}  {one.numel:>14,} elements")
        if own.checked is not None:
            _print_result(own.checked, "against the record of the run")
    if own.checked is None:
        note("ckpt-patches", f"{options.one}: no recorded fingerprints, nothing was compared")
    return 0 if own.checked is None or own.checked.is_equal else 1


def _compare(options: argparse.Namespace, one: "Contents", other: "Contents") -> int:
    found = compared(one, other)
    if options.json:
        print(json.dumps(as_json(found), indent=1))
    else:
        _print_result(found, f"{options.one} and {options.other}")
    return 0 if found.is_equal else 1


def _print_result(found: "Verdict", where: str) -> None:
    """Print the lines of an untrusted checkpoint, as many as a person can read."""
    differences = [f"{one.parameter}  {one.state}  differs: {one.what}" for one in found.differences]
    not_verified = [f"{what}  not verified: {why}" for what, why in found.not_verified.items()]
    for lines in (differences, not_verified):
        for line in lines[:MOST_LINES]:
            print(printable(line))
        if len(lines) > MOST_LINES:
            print(f"and {len(lines) - MOST_LINES:,} more (--json)")
    print(printable(f"{where}: {found.sentence()}"))


def compared(one: "Contents", other: "Contents") -> "Verdict":
    """Compare two checkpoints."""
    from ckpt_patches.fingerprint import comparison

    return comparison.of_two(one.fingerprints, other.fingerprints, one.unread, other.unread)


def as_json(found: "Verdict") -> dict[str, Any]:
    """The keys of `compare --json`: docs/reference/json.md."""
    return {"schema": SCHEMA, **_keys(found)}


def _keys(found: "Verdict") -> dict[str, Any]:
    return {
        "verified": len(found.verified),
        "differences": [one._asdict() for one in found.differences],
        "not_verified": dict(found.not_verified),
        "missed": found.missed,
    }
