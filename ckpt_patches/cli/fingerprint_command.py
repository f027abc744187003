"""The command `ckpt-patches fingerprint`. Modules that need NumPy are imported when it runs."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TextIO

from ckpt_patches.errors import UserError
from ckpt_patches.runtime.commands import needed_by
from ckpt_patches.runtime.options import add_trust, described
from ckpt_patches.runtime.shown import printable

if TYPE_CHECKING:
    from ckpt_patches.fingerprint.dcp_values import Values
    from ckpt_patches.fingerprint.offline import Checked
    from ckpt_patches.fingerprint.states import Fingerprint

MOST_LINES = 1000  # of one kind
SCHEMA = 1  # of the JSON; increased when a key is renamed, removed or changes its meaning
AFTER = """If the run recorded fingerprints at the save (CKPT_PATCHES_FINGERPRINT=1), the files are compared with them.

exit status: 0 equal to those compared with, 1 some differ or none could be compared, 2 a checkpoint cannot be read"""


class _Read(NamedTuple):
    """What is in a checkpoint's files."""

    fingerprints: "list[Fingerprint]"
    checked: "Checked | None"  # the comparison with what the run recorded; None if it did not
    values: "Callable[[], Values] | None" = None  # reads settings and other tensors, in formats that can


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the command line."""
    command = commands.add_parser(
        "fingerprint",
        help="print a layout-independent checksum of every tensor",
        **described(
            "Print a 64-bit checksum of the main parameter and of each moment of every parameter in a DeepSpeed "
            "checkpoint (ZeRO or universal), or of every tensor in a checkpoint of Megatron (torch_dist or zarr) or of "
            "torch.distributed.checkpoint. Equal values have equal checksums in every layout.",
            "ckpt-patches fingerprint out/global_step1000",
            "ckpt-patches fingerprint ckpt/iter_0001000 --against migrated/iter_0001000",
            after=AFTER,
        ),
    )
    command.add_argument("path", type=Path, metavar="PATH", help="the checkpoint's folder, such as global_step1000")
    command.add_argument("--against", type=Path, metavar="OTHER", help="compare with another checkpoint")
    command.add_argument("--json", action="store_true", help="print JSON (ckpt-patches explain json)")
    add_trust(command)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    with needed_by("a fingerprint"):
        import ckpt_patches.fingerprint.states  # noqa: F401
    found, checked, _ = one = _read(options.path, options.trust_checkpoint)
    if options.against is None:
        _print(found, checked, as_json=options.json)
        if checked is None:
            print(f"{options.path}: no recorded fingerprints, nothing was compared", file=sys.stderr)
        return 1 if checked is not None and (checked.differences or checked.missed) else 0
    return _compare(options, one, _read(options.against, options.trust_checkpoint))


def _read(path: Path, trust: bool) -> _Read:
    from ckpt_patches.convert import zero_fingerprints
    from ckpt_patches.fingerprint import megatron_files, universal_states
    from ckpt_patches.formats import megatron_torch
    from ckpt_patches.formats.dcp import is_dcp
    from ckpt_patches.formats.universal import is_universal

    if not path.is_dir():
        raise UserError(f"{path} is no folder, expected that of a checkpoint")
    if is_universal(path):
        return _of_deepspeed(path, list(universal_states.fingerprints(path, trust=trust)))
    if is_dcp(path):
        return _of_torch(path)
    if megatron_files.is_megatron(path):
        return _of_megatron(path)
    if megatron_torch.folders(path):
        return _of_megatron_torch(path)
    return _of_deepspeed(path, list(zero_fingerprints.fingerprints(path, trust=trust)))


def _of_deepspeed(path: Path, found: "list[Fingerprint]") -> _Read:
    from ckpt_patches.fingerprint import offline, record_files

    plain = record_files.of_deepspeed(path)
    return _Read(found, None if plain is None else offline.check(plain, found))


def _of_torch(path: Path) -> _Read:
    from ckpt_patches.fingerprint import dcp_files, dcp_values

    index = dcp_files.read(path)
    _print_left_out(path, dcp_files.left_out(index))
    hashes = dcp_files.hashes(path, index)
    found, checked = dcp_files.fingerprints(index, hashes), dcp_files.check(path, index, hashes)
    return _Read(found, checked, partial(dcp_values.of_files, path, index))


def _of_megatron(path: Path) -> _Read:
    from ckpt_patches.fingerprint import buckets, megatron_files, offline, record_files
    from ckpt_patches.formats.megatron_names import is_bucket

    megatron_files.check_complete(path)
    stored, plain = megatron_files.read(path), record_files.of_megatron(path)
    found = list(megatron_files.fingerprints(path, stored))
    in_buckets = list(offline.of_buckets(plain, partial(buckets.in_distributed, path, stored)))
    left_out = megatron_files.left_out(stored)
    _print_left_out(path, {name: why for name, why in left_out.items() if not (in_buckets and is_bucket(name))})
    found += in_buckets
    return _Read(found, None if plain is None else offline.check(plain, found))


def _of_megatron_torch(path: Path) -> _Read:
    """The optimizer's states only; the name of a parameter begins with its rank's folder."""
    from ckpt_patches.fingerprint import offline

    ranks = list(offline.of_torch(path))
    if all(one.plain is None for one in ranks):
        raise UserError(
            f"{path}: expected a record of the run in the `torch` format (CKPT_PATCHES_FINGERPRINT=1), found none, and "
            "the files themselves do not state where parameters begin in the buffers"
        )
    found = [own._replace(parameter=f"{one.label}{own.parameter}") for one in ranks for own in one.found]
    return _Read(found, offline.together([one.checked() for one in ranks]))


def _print_left_out(path: Path, left_out: dict[str, str]) -> None:
    for why, count in Counter(left_out.values()).items():
        example = next(name for name, its in left_out.items() if its == why)
        tensors = f"{count} tensors have" if count > 1 else "1 tensor has"
        print(printable(f"{path}: {tensors} no fingerprint, as {example}: {why}"), file=sys.stderr)


def _print(found: "list[Fingerprint]", checked: "Checked | None", *, as_json: bool) -> None:
    if as_json:
        rows = [{**one._asdict(), "value": one.hexadecimal} for one in found]
        recorded = None if checked is None else _as_json(checked)
        print(json.dumps({"schema": SCHEMA, "fingerprints": rows, "recorded": recorded}, indent=1))
        return
    names = [printable(one.parameter) for one in found]
    width = max(map(len, names), default=0)
    for one, name in zip(found, names, strict=True):
        print(f"{one.hexadecimal}  {name:{width}}  {printable(one.state):10}  {one.numel:>14,} elements")
    if checked is None:
        return
    _print_first(f"{each.parameter}  {each.state}  not as recorded: {each.what}" for each in checked.differences)
    _print_first(f"{what}  not compared: {why}" for what, why in checked.unchecked.items())
    print(printable(checked.sentence()))


def _print_first(lines: Iterable[str], file: "TextIO | None" = None) -> None:
    """Print lines from an untrusted checkpoint, as many as a person can read."""
    every = list(lines)
    for line in every[:MOST_LINES]:
        print(printable(line), file=file)
    if len(every) > MOST_LINES:
        print(f"and {len(every) - MOST_LINES:,} more (--json)", file=file)


def _as_json(checked: "Checked") -> dict[str, object]:
    return {**checked._asdict(), "differences": [each._asdict() for each in checked.differences]}


def _compare(options: argparse.Namespace, one: _Read, other: _Read) -> int:
    from ckpt_patches.fingerprint import dcp_values
    from ckpt_patches.fingerprint.states import differences

    states = len(one.fingerprints)
    found = differences(one.fingerprints, other.fingerprints)
    values = dcp_values.compared(one.values(), other.values()) if one.values and other.values else None
    if values is not None:
        found += values.differences
        _print_first((f"{what}  not compared: {why}" for what, why in values.unchecked.items()), file=sys.stderr)
    if options.json:
        rows = [each._asdict() for each in found]
        besides = {"values": values and values.values, "unchecked": values and values.unchecked}
        print(json.dumps({"schema": SCHEMA, "compared": states, "differences": rows, **besides}, indent=1))
    elif found:
        _print_first(f"{each.parameter}  {each.state}  {each.what}" for each in found)
        of_all = f"{len(found)} of {states} states" if values is None else f"{len(found)} states or settings"
        print(f"{of_all} differ: {options.path} and {options.against}")
    else:
        parameters = len({each.parameter for each in one.fingerprints})
        settings = "" if values is None else f" and {values.values} settings"
        print(f"equal: {states} states{settings} of {parameters} parameters in {options.path} and {options.against}")
    return 1 if found else 0
