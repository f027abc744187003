"""Wrappers that `fingerprint_megatron` adds to megatron-core: a save records the live state, a load verifies it.

An optimizer adds a note on its state to its sharded state dict; `dist_checkpointing.save`, which all ranks call, merges
the notes. A load passes the record to the optimizer in the returned state dict, with the group of ranks that have an
optimizer: other ranks have nothing to train. The `torch` format has no record.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import distributed

from ckpt_patches.fingerprint import megatron_state, proof
from ckpt_patches.fingerprint.comparison import Verdict
from ckpt_patches.fingerprint.live_state import Live
from ckpt_patches.fingerprint.record import Record, Settings, merged, plain_values, setting_differences
from ckpt_patches.formats.recorded import KEY

RUN, SCHEDULER, POSITION = "run", "learning-rate scheduler", "data position"
SCHEDULERS = ("opt_param_scheduler", "lr_scheduler")  # its keys in a state dict: Megatron's, verl's
COUNTERS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
NOT_LOADED = "the checkpoint has its state, and the run has not loaded it"
NOT_RETURNED = "this state dict is not one that dist_checkpointing.load has returned"
NOTE = f"{KEY}_note"  # in a state dict during a save or load, never in a checkpoint
Method = Callable[..., Any]

_loaded: list[Any] = []  # the recorded run state of the last load since `load_checkpoint` began
_waits_for_scheduler = False  # whether the scheduler's state came with the last optimizer, and has not been loaded
_depth = 0  # nested calls of optimizer methods: by a chain, or a load while a state dict is made


class Given(NamedTuple):
    """The values that a load passes to the optimizer."""

    record: Any
    group: Any  # the ranks that have an optimizer
    has_scheduler: bool  # whether the checkpoint has a scheduler's state


# The run's state besides its optimizer. The record has it separately, under RUN: it loads after the optimizer.


def of_save(state_dict: Mapping[str, Any]) -> dict[str, Settings]:
    """The scheduler and the data position of a run that saves this state dict."""
    schedulers = [state_dict[key] for key in SCHEDULERS if isinstance(state_dict.get(key), dict)]
    found = {SCHEDULER: plain_values(schedulers[-1])} if schedulers else {}
    return found | ({POSITION: position(state_dict["args"])} if "args" in state_dict else {})


def position(args: Any) -> Settings:
    """The position in the data, from the arguments of Megatron-LM's scripts."""
    return {name: getattr(args, name) for name in COUNTERS if isinstance(getattr(args, name, None), int)}


def compared(what: str, saved: Mapping[str, Settings], live: Settings) -> Verdict:
    """Compare those values of the run that both releases have with the record."""
    if what not in saved:
        return Verdict(not_verified={what: "the checkpoint's fingerprint does not have it"})
    its = {name: value for name, value in saved[what].items() if name in live}
    differences = setting_differences({what: its}, {what: live}, its)
    return Verdict(settings=differences, besides=() if differences else (what,))


# Wrappers


def noted(method: Method) -> Method:
    """Wrap `sharded_state_dict`: add the live state for a save, or a request for the record for a load."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def with_note(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        of_model, is_loading = bound.arguments["model_sharded_state_dict"], bound.arguments["is_loading"]
        if _depth:
            return method(self, *args, **kwargs)
        places = megatron_state.places(of_model)
        note = None if is_loading else megatron_state.live(self, places)
        made = _inside(method, self, *args, **kwargs)
        self._ckpt_patches_places = places
        if isinstance(made, dict):
            made[NOTE] = note
        return made

    return with_note


def saving(save: Method) -> Method:
    """Wrap `dist_checkpointing.save`: merge the notes of all ranks."""

    @functools.wraps(save)
    def with_record(sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        notes = [_at(sharded_state_dict, path).pop(NOTE) for path in list(_paths(sharded_state_dict))]
        if any(proof.from_all(bool(notes), None)):
            record = proof.recorded(dataclasses.replace(_together(notes), others=of_save(sharded_state_dict)))
            sharded_state_dict[KEY] = {**record, RUN: record["others"], "others": {}}
        return save(sharded_state_dict, *args, **kwargs)

    return with_record


def loading(load: Method) -> Method:
    """Wrap `dist_checkpointing.load`: pass the record to the optimizers that requested it."""

    @functools.wraps(load)
    def with_record(sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        paths = list(_paths(sharded_state_dict))
        wishes = proof.from_all(bool(paths), None)
        result = load(sharded_state_dict, *args, **kwargs)
        state_dict = result[0] if isinstance(result, tuple) else result
        record = state_dict.pop(KEY, None)
        _loaded[:] = [_of_run(record)]
        schedulers = [state_dict[key] for key in SCHEDULERS if isinstance(state_dict.get(key), dict)]
        for scheduler in schedulers:
            scheduler[NOTE] = _of_run(record)
        if any(wishes):
            given = Given(record, None if all(wishes) else _group_of(wishes), bool(schedulers))
            for path in paths:
                with contextlib.suppress(KeyError, IndexError, TypeError):  # nothing was loaded there
                    _at(state_dict, path)[NOTE] = given
        return result

    return with_record


def verified(method: Method) -> Method:
    """Wrap `load_state_dict`: after the outermost call, compare the live state with the record."""

    @functools.wraps(method)
    def with_proof(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        global _waits_for_scheduler
        given = state_dict.get(NOTE) if isinstance(state_dict, dict) else None
        if isinstance(state_dict, dict) and NOTE in state_dict:  # also as None, from a local checkpoint
            state_dict = {name: value for name, value in state_dict.items() if name != NOTE}
        result = _inside(method, self, state_dict, *args, **kwargs)
        if _depth == 0 and isinstance(given, Given):
            live = megatron_state.live(self, getattr(self, "_ckpt_patches_places", {}))
            _waits_for_scheduler = given.has_scheduler
            proof.prove(live, given.record, given.group)
        elif _depth == 0:
            proof.conclude(Verdict(not_verified={"the optimizer's state": NOT_RETURNED}))
        return result

    return with_proof


def scheduler_verified(method: Method) -> Method:
    """Wrap the scheduler's `load_state_dict`: compare the scheduler with the record."""

    @functools.wraps(method)
    def with_proof(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        global _waits_for_scheduler
        _waits_for_scheduler = False
        saved = state_dict.pop(NOTE, None) if isinstance(state_dict, dict) else None
        result = method(self, state_dict, *args, **kwargs)
        if saved:
            live = plain_values(self.state_dict())
            if getattr(self, "override_opt_param_scheduler", False):  # it overrides the loaded values
                live = {name: value for name, value in live.items() if name == "num_steps"}
            proof.conclude(compared(SCHEDULER, saved, live))
        return result

    return with_proof


def scheduler_steps(step: Method) -> Method:
    """Wrap the scheduler's `step`: the first one after an optimizer's load names a scheduler that was not loaded."""

    @functools.wraps(step)
    def with_note(self: Any, increment: int, *args: Any, **kwargs: Any) -> Any:
        global _waits_for_scheduler
        if _waits_for_scheduler and increment:  # a new scheduler takes a step of 0
            _waits_for_scheduler = False
            proof.conclude(Verdict(not_verified={SCHEDULER: NOT_LOADED}))
        return step(self, increment, *args, **kwargs)

    return with_note


def run_verified(load_checkpoint: Method) -> Method:
    """Wrap `megatron.training`'s `load_checkpoint`, called by all ranks: compare the run's other state at the end."""

    @functools.wraps(load_checkpoint)
    def with_proof(*args: Any, **kwargs: Any) -> Any:
        _loaded.clear()
        result = load_checkpoint(*args, **kwargs)
        saved = _loaded.pop() if _loaded else {}
        options = load_checkpoint.__globals__["get_args"]()
        if saved and not options.finetune:
            of_ranks = proof.from_all(compared(POSITION, saved, position(options)), None)
            settings = proof.each_once(one for own in of_ranks for one in own.settings)
            proof.conclude(dataclasses.replace(of_ranks[0], settings=settings))
        return result

    return with_proof


def _of_run(record: Any) -> dict[str, Settings]:
    """The run's state besides its optimizer, from a record; empty if it has none."""
    found = record.get(RUN) if isinstance(record, dict) else None
    return found if isinstance(found, dict) else {}


def _inside(method: Method, *args: Any, **kwargs: Any) -> Any:
    global _depth
    _depth += 1
    try:
        return method(*args, **kwargs)
    finally:
        _depth -= 1


def _together(notes: list[Live]) -> Live:
    """One Live for all optimizers of a rank."""
    own = merged(Record({}, note.settings, note.left_out, note.buckets) for note in notes)
    return Live(
        lambda: (part for note in notes for part in note.parts()), own.settings, own.left_out, buckets=own.buckets
    )


# Nested state dicts


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths in a state dict to the dicts with a note."""
    if isinstance(value, dict):
        if NOTE in value:
            yield path
        for key, inner in value.items():
            yield from _paths(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _paths(inner, (*path, index))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _group_of(wishes: list[bool]) -> Any:
    """A new group of the ranks that request the record; all ranks must create it."""
    return distributed.new_group([rank for rank, wish in enumerate(wishes) if wish])
