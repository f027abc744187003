"""What Transformers' Trainer saves beside the weights, and whether these files belong together.

`checkpoint-4` has the weights, `training_args.bin`, `optimizer.pt`, `scheduler.pt`, `rng_state.pth` (of several ranks:
`rng_state_0.pth`, …), and `trainer_state.json`, which is written last. With DeepSpeed or FSDP, folders below hold the
weights and the optimizer. https://huggingface.co/docs/transformers/main_classes/trainer
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from ckpt_patches.errors import UserError
from ckpt_patches.formats import damages, settings, torch_file
from ckpt_patches.formats.checkpoint import last_step
from ckpt_patches.formats.damages import Finding
from ckpt_patches.formats.paths import path_within
from ckpt_patches.formats.tensor_streams import groups_of, read_json, states_of
from ckpt_patches.formats.zero import OPTIMIZER as OF_A_ZERO_RANK
from ckpt_patches.runtime.shown import shown

STATE, SCHEDULER, ARGUMENTS = "trainer_state.json", "scheduler.pt", "training_args.bin"
OF_ACCELERATE = "scheduler.bin"
RANDOM_STATE = re.compile(r"rng_state(_\d{1,7})?\.pth")
FOLDER = re.compile(r"checkpoint-(\d{1,15})")
OF_DEEPSPEED = re.compile(r"global_step(\d{1,15})")
# Files that a trainer writes for each rank, or each of several optimizers. The first one of the latter has no number.
NUMBERED = re.compile(
    r"(?P<stem>random_states|rng_state|optimizer|scheduler|sampler|custom_checkpoint)(?:_(?P<number>\d{1,7}))?"
    r"\.(?P<suffix>pkl|pth|bin|pt)"
)
# Folders with a model, an optimizer, or both, of DeepSpeed and FSDP.
BELOW = re.compile(r"global_step\d+.*|pytorch_model\w*|optimizer(_\d+)?")
# Files of an optimizer, also of XLA and SageMaker, and folders of DeepSpeed and FSDP with one.
WITH_OPTIMIZER = re.compile(
    r"(rank\d+-of-\d+-)?optimizer(_\d+)?(\.(pt|bin)(_\d+)?)?|global_step\d+.*|pytorch_model(_\d+)?"
)
RANK_BELOW = re.compile(r"__(\d{1,7})_\d+\.distcp")
OF_RANKS = ("random_states", "rng_state")
OF_EVALUATIONS = ("num_bad_epochs", "best")  # keys of schedulers that count evaluations


def findings(
    path: Path, names: Collection[str], steps: Iterable[Any], groups: list[dict[str, Any]]
) -> Iterator[Finding]:
    """The findings for a folder that a Trainer saved; none for other folders.

    Args:
        path: the folder.
        names: of all that is in it.
        steps: that the optimizer's states have; empty if they have none, or are not known.
        groups: the optimizer's param groups; empty if not known.
    """
    yield from _missing(path, names)
    if OF_ACCELERATE in names and last_step(steps) == 0:
        yield from without_states(counted(_value(path, OF_ACCELERATE)))
    has_random_state, named = any(map(RANDOM_STATE.fullmatch, names)), FOLDER.fullmatch(path.name)
    has_training = has_random_state or SCHEDULER in names or "optimizer.pt" in names
    is_trainers = STATE in names or named or ARGUMENTS in names or (has_random_state and SCHEDULER in names)
    if not is_trainers or not (has_training or STATE in names or (named and ARGUMENTS in names)):
        return
    if has_training:
        yield from _absent(names)
    if STATE not in names:  # scripts without a Trainer have some of its names, and no random state
        kind = damages.INCOMPLETE_SAVE if has_random_state else damages.UNUSUAL
        yield Finding(kind, STATE, "Trainer writes it last, and it is missing: the save has not finished")
    content = read_json(path, STATE) if STATE in names else {"global_step": None}
    if isinstance(content, Finding):
        yield content
        return
    state = content.get("global_step")
    if STATE in names and not (type(state) is int and settings.is_step(state)):
        yield Finding(damages.BAD_METADATA, STATE, f"expected the number of steps, found {shown(state)}")
        return
    inner = [int(own[1]) for own in map(OF_DEEPSPEED.fullmatch, names) if own]
    if state is not None and named and int(named[1]) != state:
        yield Finding(damages.MIXED_STEPS, STATE, f"step {state}, and the folder is named {path.name}")
    if state is not None and inner and state not in inner:  # some releases count a last, smaller batch differently
        yield Finding(damages.UNUSUAL, STATE, f"step {state}, and DeepSpeed's folder is global_step{max(inner)}")
    if not inner:
        yield from _of_steps(path, state, steps, groups)


def is_unstepped(optimizers: Collection[Mapping[str, Any]]) -> bool:
    """Whether no optimizer has a state, and one has settings of Adam or momentum, which have some after a step."""
    groups = [group for own in optimizers for group in groups_of(own)]
    return not any(state for own in optimizers for state in states_of(own).values()) and any(
        group.get("params") and ("betas" in group or group.get("momentum")) for group in groups
    )


def counted(scheduler: Any) -> int | None:
    """The steps that a scheduler has counted; None if unknown."""
    return last_step([_of_steps_alone(scheduler).get("last_epoch")])


def _of_steps_alone(scheduler: Any) -> dict[str, Any]:
    """A scheduler's state; empty if it counts evaluations."""
    return scheduler if isinstance(scheduler, dict) and not {*OF_EVALUATIONS} & {*scheduler} else {}


def without_states(steps: int | None) -> Iterator[Finding]:
    """The finding on an optimizer that has taken no step, if its scheduler has counted some."""
    if steps:
        detail = f"no step and no state, and the scheduler has counted {steps} steps: were the states saved?"
        yield Finding(damages.UNUSUAL, "optimizer", detail)


def _missing(path: Path, names: Collection[str]) -> Iterator[Finding]:
    """Files that are missing between others of their kind; a scheduler of Accelerate without an optimizer."""
    there: dict[tuple[str, str], set[int]] = {}
    for own in filter(None, map(NUMBERED.fullmatch, names)):
        there.setdefault((own["stem"], own["suffix"]), set()).add(int(own["number"] or 0))
    ranks = _ranks_below(path, names)
    for (stem, suffix), numbers in there.items():
        is_of_ranks = stem in OF_RANKS
        least = max(max(numbers) + 1, ranks if is_of_ranks else 0)
        for before, after in pairwise((-1, *sorted(numbers), least)):
            if after - before > 1:
                kind = damages.MISSING_RANK if is_of_ranks else damages.MISSING_STATE
                kind = damages.UNUSUAL if is_of_ranks and before < 0 else kind  # of a node with a disk of its own
                last = f" to {after - 1}" if after - before > 2 else ""
                detail = f"missing, and {stem}_{max(numbers)}.{suffix} is there"
                yield Finding(kind, f"{stem}_{before + 1}.{suffix}{last}", detail)
    if there.get(("rng_state", "pth")) == {0} and "rng_state.pth" not in names and ranks < 2:
        yield Finding(damages.UNUSUAL, "rng_state_1.pth", "missing: one rank alone has rng_state.pth")
    if ("scheduler", "bin") in there and not any(map(WITH_OPTIMIZER.fullmatch, names)):
        yield Finding(damages.MISSING_STATE, "optimizer", "scheduler.bin is there, and no file of an optimizer")
    if {("scheduler", "bin"), ("optimizer", "bin")} & {*there} and ("random_states", "pkl") not in there:
        detail = "no random state of any rank is there, which Accelerate writes after these: has the save finished?"
        yield Finding(damages.UNUSUAL, "random_states_0.pkl", detail)


def _ranks_below(path: Path, names: Iterable[str]) -> int:
    """The fewest ranks that can have saved the folders of DeepSpeed and FSDP below; 0 if there are none."""
    found = 0
    for folder in (path / name for name in names if BELOW.fullmatch(name)):
        inner = [own.name for own in folder.iterdir()] if folder.is_dir() and not folder.is_symlink() else []
        found = max(found, sum(map(bool, map(OF_A_ZERO_RANK.fullmatch, inner))))
        found = max([found, *(int(own[1]) + 1 for own in map(RANK_BELOW.fullmatch, inner) if own)])
    return found


def _absent(names: Collection[str]) -> Iterator[Finding]:
    """What is missing of a save that is not of the model alone."""
    if not any(map(WITH_OPTIMIZER.fullmatch, names)):
        yield Finding(damages.MISSING_STATE, "optimizer", "no file or folder of an optimizer, and others are there")
        return
    if SCHEDULER not in names and not any(map(OF_DEEPSPEED.fullmatch, names)):  # which can have its own scheduler
        yield Finding(damages.MISSING_STATE, SCHEDULER, "missing: without it Trainer begins a new optimizer")
    if not any(map(RANDOM_STATE.fullmatch, names)):
        yield Finding(damages.UNUSUAL, "rng_state.pth", "no random state of any rank is there")


def _value(path: Path, name: str) -> Any:
    """What a torch file holds; an empty dict if it is not there, or cannot be read, which its reader reports."""
    try:
        return torch_file.read(path_within(path, name), trust=True).value
    except UserError:
        return {}


def _of_steps(path: Path, state: int | None, steps: Iterable[Any], groups: list[dict[str, Any]]) -> Iterator[Finding]:
    """Compare the steps of the Trainer, its scheduler, which counts those of the optimizer, and the optimizer.

    The Trainer also counts steps that fp16 skips, and those before a resume without the optimizer's files.
    """
    scheduler = _of_steps_alone(_value(path, SCHEDULER))
    of_scheduler, taken = counted(scheduler), last_step(steps)
    if taken is not None and state == of_scheduler == taken - 1:
        return  # some optimizers count from 1
    every = {"Trainer": state, "scheduler": of_scheduler, "optimizer": taken}
    known = {step for step in every.values() if step is not None}
    text = ", ".join(f"the {called}'s step is {step}" for called, step in every.items() if step is not None)
    if state is not None and of_scheduler == state and taken is not None and taken < state:
        yield Finding(damages.MIXED_STEPS, "optimizer", f"{text}: the optimizer's file is of an earlier save")
    elif len(known) > 1 and not _are_skipped(path, state, known - {state}):
        yield Finding(damages.UNUSUAL, STATE, f"{text}: a file of another save, or an optimizer that began anew")
    rates = scheduler.get("_last_lr")
    for rate, group in zip(rates if isinstance(rates, list) else [], groups, strict=False):
        own = group.get("lr")
        if isinstance(rate, float) and isinstance(own, float) and not math.isclose(rate, own, rel_tol=1e-6):
            yield Finding(damages.UNUSUAL, SCHEDULER, f"a learning rate of {rate:g}, the optimizer's is {own:g}")
            return


def skipped(steps: int) -> int:
    """How many steps fp16 may skip: some at the start, then at most one in a hundred."""
    return 16 + steps // 100


def _are_skipped(path: Path, state: int | None, others: set[int]) -> bool:
    """Whether the optimizer and scheduler are at one step, and behind by no more than fp16 skips."""
    if state is None or len(others) != 1 or not 0 < state - min(others) <= skipped(state):
        return False
    arguments = _value(path, ARGUMENTS)
    return not isinstance(arguments, torch_file.Instance) or arguments.fields.get("fp16") is not False
