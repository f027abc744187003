"""A load is compared with the record of the save, and each difference is named with its likely cause."""

import copy
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_patches.fingerprint import FingerprintError, comparison
from ckpt_patches.fingerprint.comparison import Difference
from ckpt_patches.fingerprint.element_hash import Box, all_of
from ckpt_patches.fingerprint.live_state import Live, Part
from ckpt_patches.fingerprint.proof import prove, recorded, verdict_of
from ckpt_patches.fingerprint.record import BUFFER, STEP, from_plain, of_step
from ckpt_patches.fingerprint.states import FROZEN
from trainers.ranks import free_port, results

Tensors = dict[tuple[str, str], torch.Tensor]
SHAPES = {"first.weight": (40, 30), "second.weight": (7, 60), "second.bias": (60,)}
STATES = ("master", "exp_avg", "exp_avg_sq")
GROUP = {"weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "step": 3, "lr": 1e-3}


def some(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        (name, state): torch.randn(shape, generator=generator) for name, shape in SHAPES.items() for state in STATES
    }


def live(tensors: Tensors, **changed: Any) -> Live:
    """A live state, all on one rank."""

    def parts() -> Iterator[Part]:
        for (name, state), tensor in tensors.items():
            yield Part(name, state, all_of(tuple(tensor.shape)), 0, tensor.reshape(-1))

    return Live(parts, {name: {**GROUP, **changed} for name, _ in tensors})


def test_a_state_that_is_what_was_saved_is_verified(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "ckpt_patches"):
        found = prove(live(some()), recorded(live(some())))
    assert len(found.verified) == 9
    assert caplog.messages == ["resume verified: 9 states, settings"]


def changed(key: tuple[str, str], tensor: torch.Tensor) -> Tensors:
    return {**some(), key: tensor}


def without(*keys: tuple[str, str]) -> Tensors:
    return {key: tensor for key, tensor in some().items() if key not in keys}


FIRST = ("first.weight", "exp_avg")
OTHER = {(*FIRST, comparison.OTHER, "other values")}
ALL_OF_FIRST = [("first.weight", state) for state in STATES]


@pytest.mark.parametrize(
    ("saved", "found", "expected"),
    [
        (some(), changed(FIRST, torch.zeros(40, 30)), {(*FIRST, comparison.ZEROS, "all zeros")}),
        (some(), changed(FIRST, some()[FIRST].bfloat16().float()), OTHER),
        (some(), changed(FIRST, some()[FIRST].roll(1)), OTHER),
        (some(), changed(FIRST, torch.cat([some(1)[FIRST][:30], torch.zeros(10, 30)])), OTHER),
        (
            some(),
            changed(FIRST, some()["first.weight", "master"]),
            {(*FIRST, comparison.ANOTHERS, "those of first.weight master")},
        ),
        (some(), without(FIRST), {(*FIRST, comparison.MISSING, "the run has no such state")}),
        (
            some(),
            without(*ALL_OF_FIRST),
            {(*key, comparison.MISSING, "the run has no such parameter") for key in ALL_OF_FIRST},
        ),
        (without(FIRST), some(), {(*FIRST, comparison.NOT_SAVED, "the checkpoint's fingerprint does not have it")}),
    ],
)
def test_what_differs_is_named_with_what_it_looks_like(
    saved: Tensors, found: Tensors, expected: set[Difference]
) -> None:
    assert {*verdict_of(live(found), recorded(live(saved))).differences} == expected


def test_frozen_parameters_are_no_difference_from_a_record_without_any() -> None:
    """Version 0.2.0 recorded none."""
    frozen = {("frozen.weight", FROZEN): torch.ones(3)}
    found = verdict_of(live({**some(), **frozen}), recorded(live(some())))
    assert (found.is_wrong, [*found.not_verified]) == (False, ["frozen.weight frozen"])
    others = {("other.weight", FROZEN): torch.ones(3)}
    assert verdict_of(live({**some(), **frozen, **others}), recorded(live({**some(), **frozen}))).is_wrong


def test_experts_of_other_ranks_are_no_difference_from_a_record_of_0_2() -> None:
    """Without ZeRO version 0.2 recorded those of the first rank alone."""
    experts = {(f"deepspeed_experts.global_{n}.weight", "master"): torch.full((3,), float(n)) for n in range(2)}
    first = {key: experts[key] for key in [*experts][:1]}
    record = recorded(live({**some(), **first}))
    assert verdict_of(live({**some(), **experts}), record).is_wrong
    found = verdict_of(live({**some(), **experts}), {key: its for key, its in record.items() if key != "sizes"})
    assert (found.is_wrong, [*found.not_verified]) == (False, ["deepspeed_experts.global_1.weight master"])


@pytest.mark.parametrize(
    ("what", "lacks"),
    [("first.weight", ALL_OF_FIRST), ("first.weight exp_avg", [FIRST]), ("an optimizer", ALL_OF_FIRST)],
)
def test_a_state_that_one_side_cannot_read_is_no_difference(what: str, lacks: list[tuple[str, str]]) -> None:
    """What may be in an optimizer that is not known is listed; a state of a parameter with others is not in that."""
    unread = replace(live(without(*lacks)), left_out={what: "of a type that cannot be read"})
    for saved, found in ((live(some()), unread), (unread, live(some()))):
        verdict = verdict_of(found, recorded(saved))
        listed = {" ".join(key): "it may be in an optimizer" for key in ALL_OF_FIRST if what == "an optimizer"}
        assert (verdict.is_wrong, len(verdict.verified)) == (False, 9 - len(lacks))
        assert verdict.not_verified == {what: "of a type that cannot be read", **listed}
    for other in ("second.bias exp_avg", "an optimizer"):
        unread = replace(live(without(FIRST)), left_out={other: "of a type that cannot be read"})
        for saved, found in ((live(some()), unread), (unread, live(some()))):
            assert verdict_of(found, recorded(saved)).is_wrong


# Layers that are stacked into one parameter, some of them frozen

LAYERS = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(7))


def stacked(*trained: int, layers: torch.Tensor = LAYERS) -> Live:
    """The state of some layers of a stack."""

    def parts() -> Iterator[Part]:
        for number in trained:
            box = Box((number, 0, 0), (1, 4, 5), tuple(layers.shape))
            yield Part("layers.weight", "exp_avg", box, 0, layers[number].reshape(-1), main=True)

    return Live(parts, {"layers.weight": GROUP})


def test_layers_beside_frozen_ones_are_compared() -> None:
    record = recorded(stacked(1, 2))
    assert [(own.numel, own.whole) for own in from_plain(record).states.values()] == [(40, 60)]
    assert verdict_of(stacked(1, 2), record).verified == [("layers.weight", "exp_avg")]
    for other in (stacked(1, 2, layers=LAYERS * 0), stacked(0, 1), stacked(1), stacked(0, 1, 2)):
        assert verdict_of(other, record).is_wrong


def test_more_layers_or_another_padding_are_not_compared_with_frozen_ones() -> None:
    more = torch.cat([LAYERS, LAYERS])
    assert not verdict_of(stacked(*range(6), layers=more), recorded(stacked(0, 1, 2))).is_wrong
    assert not recorded(stacked(0, 1, 2)).get("sizes")


def test_a_setting_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any setting that differs is an error, except for the rate, which a schedule sets."""
    monkeypatch.delenv("CKPT_PATCHES_FINGERPRINT", raising=False)
    assert not verdict_of(live(some(), lr=1.0, betas=(0.9, 0.95)), recorded(live(some()))).is_wrong
    with pytest.raises(FingerprintError, match=r"^resume differs: 3 settings; 9 states verified"):
        prove(live(some(), step=4), recorded(live(some())))
    # One of two optimizers in a run has no such setting, and another layout gives a parameter to the other one.
    assert not verdict_of(live(some(), amsgrad=False), recorded(live(some()))).is_wrong
    assert not verdict_of(live(some()), recorded(live(some(), momentum=0, nesterov=False))).is_wrong
    assert verdict_of(live(some(), amsgrad=True), recorded(live(some()))).is_wrong
    assert verdict_of(live(some()), recorded(live(some(), momentum=0.9))).is_wrong


NOTHING = "resume not verified: nothing could be compared; 1 not verified\n  not verified: the checkpoint: "
AGAIN = of_step({**recorded(live(some())), STEP: 3}, 4)  # a run without fingerprints saved it again
RECORDS = [
    (None, False, "it has no fingerprint: it was saved without CKPT_PATCHES_FINGERPRINT"),
    (AGAIN, False, "the record is of step 3, and the checkpoint of step 4"),
    ({"format": 2}, True, "expected format 1, found 2: it is of another release of ours"),
    ({"format": 1, "states": 3}, True, "expected a record of fingerprints, found dict"),
]


@pytest.mark.parametrize(("plain", "is_error", "why"), RECORDS)
@pytest.mark.parametrize("switch", ["1", "warn"])
def test_without_a_record_nothing_is_verified_and_one_that_cannot_be_read_is_an_error(
    switch: str,
    plain: Any,
    is_error: bool,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CKPT_PATCHES_FINGERPRINT", switch)
    if is_error and switch == "1":
        with pytest.raises(FingerprintError, match=f"^{re.escape(NOTHING + why)}") as raised:
            prove(live(some()), plain)
        assert str(raised.value).endswith("\n  To continue anyway: CKPT_PATCHES_FINGERPRINT=warn")
    else:
        assert not prove(live(some()), plain).is_wrong
        (said,) = caplog.messages
        assert said.startswith(NOTHING + why)


def test_a_load_of_which_nothing_can_be_compared_is_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing verified is an error, as with an optimizer that cannot be read; so are other names of all parameters."""
    monkeypatch.setenv("CKPT_PATCHES_FINGERPRINT", "1")
    unread = Live(list, left_out={"an optimizer": "that is not known"})
    with pytest.raises(FingerprintError, match=r"resume not verified: .*\n.*: an optimizer: that is not known"):
        prove(unread, recorded(live(some())))
    renamed = {(f"module.{name}", state): tensor for (name, state), tensor in some().items()}
    with pytest.raises(FingerprintError, match=r"differs: 9 missing, 9 not saved; 0 states verified"):
        prove(live(renamed), recorded(live(some())))


def test_another_padding_of_the_vocabulary_and_another_dtype_prove_nothing() -> None:
    tensors = changed(FIRST, torch.cat([some()[FIRST], torch.zeros(8, 30)]))
    tensors["second.bias", "master"] = tensors["second.bias", "master"].bfloat16()
    found = verdict_of(live(tensors), recorded(live(some())))
    assert not found.is_wrong
    assert len(found.verified) == 7
    assert found.not_verified == {
        "first.weight exp_avg": "1,440 elements here, 1,200 in the checkpoint: another padding of the vocabulary?",
        "second.bias master": "kept in bfloat16 here, in float32 when it was saved",
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "uint8"])
def test_moments_that_the_optimizer_keeps_in_fewer_bits_than_before_are_listed(dtype: str) -> None:
    """A precision-aware optimizer returns them in fp32, whatever it keeps them in."""

    def kept(dtype: str) -> Live:
        own = live(some())
        parts = [part._replace(kept_in=dtype if part.state == "exp_avg" else "") for part in own.parts()]
        return replace(own, parts=lambda: parts)

    rounded = changed(FIRST, some()[FIRST].bfloat16().float())
    found = verdict_of(replace(live(rounded), parts=kept(dtype).parts), recorded(live(some())))
    assert not found.is_wrong
    assert found.not_verified == {
        f"{name} exp_avg": f"kept in {dtype} here, in float32 when it was saved" for name in SHAPES
    }
    assert not verdict_of(live(some()), recorded(kept(dtype))).not_verified


def test_a_note_in_a_state_dict_that_others_write_is_nothing() -> None:
    """The note is pickled as None; Megatron's local checkpoints pickle the full state dict."""
    note = live(some())
    assert pickle.loads(pickle.dumps({"note": note})) == copy.deepcopy({"note": note}) == {"note": None}


def prove_as_a_stage(rank: int, port: int) -> tuple[list[str], dict[str, str]]:
    """Prove a rank with a buffer that no other rank has, like pipeline stages; later the second rank lacks one."""
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    buffers = {f"{BUFFER}{rank}": {"value": "a"}, f"{BUFFER}{rank} lost": {"value": "b"}}
    record = recorded(Live(list, others=buffers))
    buffers.pop(f"{BUFFER}1 lost", None)
    found = verdict_of(Live(list, others=buffers), record)
    return list(found.besides), dict(found.not_verified)


def test_what_each_stage_of_a_pipeline_has_is_verified_together() -> None:
    expected = [["3 buffers"], {"buffer 1 lost": "this run has nothing of it"}]
    assert results(prove_as_a_stage, 2, free_port()) == [expected, expected]


def prove_with_one_record(rank: int, port: int) -> str:
    """The errors if the second rank has lost the record, or has one that cannot be read."""
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    found = []
    for first, second in (({"format": 2}, None), ({"format": 2}, {"format": 3})):
        try:
            prove(Live(list), second if rank else first)
        except FingerprintError as error:
            found.append(str(error).splitlines()[1])
    return "; ".join(found)


def test_records_that_differ_are_an_error_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_PATCHES_FINGERPRINT", "1")
    one_lacks, none_reads = results(prove_with_one_record, 2, free_port())
    assert one_lacks.startswith("  not verified: the checkpoint: its fingerprint is not the same on all ranks; ")
    assert [text.count("the checkpoint: ") for text in (one_lacks, none_reads)] == [2, 2]


def test_a_standard_error_that_is_full_ends_no_training() -> None:
    program = "from test_fingerprint_proof import *; prove(live(some()), recorded(live(some()))); print('goes on')"
    with open("/dev/full", "w") as full:
        command, here = [sys.executable, "-c", program], Path(__file__).parent
        environment = {**os.environ, "PYTHONPATH": str(here.parent)}
        done = subprocess.run(command, cwd=here, env=environment, stdout=subprocess.PIPE, stderr=full, text=True)
    assert (done.returncode, done.stdout) == (0, "goes on\n")
