"""No undamaged checkpoint of the real DeepSpeed and megatron-core, with generated options, is called DAMAGED."""

import json
from collections import Counter
from pathlib import Path

import pytest

from ckpt_patches.audit.audit import UNKNOWN, WHOLE, audit
from ckpt_patches.convert.convert import Options, planned
from ckpt_patches.engine import fix as fix_files
from ckpt_patches.errors import UserError
from ckpt_patches.formats.zero import look
from upstream import newest, once, run_json, tree
from zero_checkpoints import convert

pytestmark = pytest.mark.slow

# Reasons for UNKNOWN.
REASONS = {"unusual", "not_read", "no_optimizer_state"}
COUNT = 108
LEAST_WHOLE = 0.97
RACE = fix_files.load("zarr_create_synchronizer")
# Megatron releases and numbers of runs. Each release writes formats that the other does not.
MEGATRON = ((newest("megatron-core"), 60), ("0.14.0", 44))


# By optimizer, its states that a universal checkpoint cannot store.
FURTHER = {"NAdam": "mu_product"}


def written(ranks: int, count: int) -> Path:
    def write(out: Path) -> None:
        options = ("--seed", str(ranks), "--ranks", str(ranks), "--count", str(count))
        run_json("zero_healthy", out, *options, tree=tree("deepspeed", newest("deepspeed")))

    return once(f"healthy-{ranks}-{count}", write)


def written_by_megatron(version: str, count: int) -> Path:
    def write(out: Path) -> None:
        # Without the fix, upstream's own race loses slices of a zarr checkpoint now and then on a busy machine.
        whole = {"delivery": "hook", "fixes": [RACE.name]} if RACE.affects(version) else {}
        done = run_json("megatron_healthy", out, "--count", str(count), tree=tree("megatron-core", version), **whole)
        assert done["refused"] == []

    return once(f"healthy-megatron-{version}-{count}", write)


def verdicts(runs: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    for options in sorted(runs.glob("*/options.json")):
        (folder,) = (path for path in options.parent.iterdir() if path.is_dir())
        report = audit(folder)
        why = {finding.kind.name for finding in report.findings if finding.kind.severity != "note"}
        assert report.verdict in (WHOLE, UNKNOWN), f"{folder} is {report.verdict}: {why}\n{options.read_text()}"
        assert why <= REASONS, (folder, why)
        found[report.verdict] += 1
    return found


def test_a_few() -> None:
    assert sum(verdicts(written(2, 12)).values()) >= 10


def test_a_few_of_megatron() -> None:
    assert verdicts(written_by_megatron(newest("megatron-core"), 8)).total() == 8


@pytest.mark.exhaustive
def test_two_hundred() -> None:
    found = verdicts(written(2, COUNT)) + verdicts(written(3, COUNT))
    assert found.total() > 200
    assert found[WHOLE] >= LEAST_WHOLE * found.total(), found


@pytest.mark.exhaustive
def test_a_hundred_of_megatron() -> None:
    found = sum((verdicts(written_by_megatron(*runs)) for runs in MEGATRON), Counter[str]())
    assert found.total() == sum(count for _, count in MEGATRON)
    assert found[WHOLE] >= LEAST_WHOLE * found.total(), found


def test_what_upstreams_converter_takes_ours_takes(tmp_path: Path) -> None:
    folders = [next(options.parent.glob("global_step*")) for options in written(2, 12).glob("*/options.json")]
    of_zero = [folder for folder in folders if look(folder).optimizer]
    outcome = convert(tmp_path, *of_zero, version=newest("deepspeed"), delivery="hook", by_upstream=True)
    taken = [folder for folder in of_zero if not outcome[folder.parent.name]]
    assert len(taken) >= 4, outcome
    refused = set()
    for folder in taken:
        optimizer = json.loads((folder.parent / "options.json").read_text())["optimizer"]
        drop: tuple[str, ...] = ()
        if reason := refusal(folder):  # not before a step
            drop = (FURTHER[optimizer],)
            refused.add(optimizer)
            assert f"the optimizer's state '{FURTHER[optimizer]}' of " in reason
        found = planned(folder, Options(drop_state=drop))
        assert found.outputs
        assert not found.warnings
    assert refused == {*FURTHER}


def refusal(folder: Path) -> str:
    """Why the converter refuses a checkpoint; empty if it does not."""
    try:
        planned(folder, Options())
    except UserError as error:
        return str(error)
    return ""
