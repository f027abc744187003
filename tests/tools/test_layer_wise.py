"""The layer-wise distributed optimizer, as Muon uses it: upstream's saves and loads, audit and fingerprint."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpt_patches.audit.audit import WHOLE, audit
from ckpt_patches.cli import command_line
from torch_dist_indexes import changed_index
from upstream import newest, once, run, run_json, tree

pytestmark = pytest.mark.slow

NEWEST = newest("megatron-core")
OLDEST = "0.16.1"
VERSIONS = [NEWEST, pytest.param(OLDEST, marks=pytest.mark.slow)]
EXPERTS = ("--dp", "4", "--ep", "2", "--experts")
LAYER_WISE = ("--optimizer", "layer_wise")
RECORDED = {"CKPT_PATCHES_FINGERPRINT": "1"}


def saved(version: str, *options: str, delivery: str = "none") -> Path:
    def save(out: Path) -> None:
        on: dict[str, Any] = {"tree": tree("megatron-core", version), "delivery": delivery, "env": RECORDED}
        run("gpt_resume", "save", out, *LAYER_WISE, *options, **on)

    return once(f"layer-wise-{version}-{delivery}-{''.join(options)}", save)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("options", "others"),
    [
        ((), ("--dp", "4")),
        (EXPERTS, ("--dp", "2", "--ep", "2", "--experts")),
        (("--tp", "2"), ("--tp", "2", "--dp", "1")),
    ],
)
@pytest.mark.parametrize("delivery", ["none", "hook"])
def test_each_rank_loads_what_was_saved_whichever_has_it_now(
    version: str, options: tuple[str, ...], others: tuple[str, ...], delivery: str
) -> None:
    folder = saved(version, *options, delivery=delivery)
    resume: tuple[str | Path, ...] = ("resume", folder, "--checkpoint", folder / "checkpoint", *LAYER_WISE, *others)
    found = run_json("gpt_resume", *resume, tree=tree("megatron-core", version), delivery=delivery)
    assert found["loaded"] == "bit-equal"  # ranks of another number sum the norm of gradients in another order
    report = audit(folder / "checkpoint")
    assert report.verdict == WHOLE, report.findings


@pytest.mark.parametrize("version", VERSIONS)
def test_a_fingerprint_has_the_parameters_of_all_ranks(version: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(version, delivery="hook")
    options = ("resume", folder, "--checkpoint", folder / "checkpoint", *LAYER_WISE, "--dp", "4")
    release = tree("megatron-core", version)
    done = run("gpt_resume", *options, tree=release, delivery="hook", env=RECORDED)
    assert "resume verified: 29 states" in done.stderr
    assert "not verified" not in done.stderr
    assert command_line.main(["fingerprint", str(folder / "checkpoint")]) == 0
    assert "against the record of the run: verified: 29 states" in capsys.readouterr().out


def test_a_parameter_without_its_momentum_is_not_whole(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(saved(NEWEST) / "checkpoint", tmp_path / "copy"))
    with changed_index(copy) as index:
        (momentum, *_) = [name for name in index.state_dict_metadata if "momentum_buffer" in name]
        del index.state_dict_metadata[momentum]
        for key in [key for key in index.storage_data if key.fqn == momentum]:
            del index.storage_data[key]
    report = audit(copy)
    assert report.verdict != WHOLE
    named = [finding.array for finding in report.findings if finding.kind.name == "missing_moments"]
    assert [momentum.endswith(name) for name in named] == [True]
