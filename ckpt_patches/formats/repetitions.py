"""Load a large pickle with many repetitions of the same opcodes, in a fraction of the unpickler's memory.

The index of two million chunks has a hundred million opcodes. Python's unpickler keeps every object that they create,
because a pickle can fetch each of them again from the memo. This module removes consecutive objects with the same
opcodes from the pickle before unpickling. The arguments of these opcodes (numbers, strings, memo slots) become arrays,
a `Segment`, with one example of the objects, in which a `Hole` replaces each argument that differs. Every opcode of a
segment is compared with the example's. Pickles of another kind, such as those of protocols before 4, which number their
memo slots, are refused, and the caller unpickles them normally.
https://docs.python.org/3/library/pickletools.html
"""

import io
import itertools
import pickle
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_patches.formats import pickles

LEAST = 8  # objects in a run; fewer are cheaper to unpickle normally
SPARE = 4 << 20  # bytes of opcodes allowed outside of runs, in addition to an eighth of those in runs
BLOCK = 1 << 20  # bytes to compare with a template at a time
ATTEMPT = 256  # bytes of SPARE that each failed attempt to find a run costs
MOST_TEMPLATES, MOST_OF_A_CLASS = 256, 16
MOST_OPCODES = 256  # per object
MOST_FETCHED = 1 << 16  # objects in runs that others fetch; torch's indexes fetch none
MARKS = 4  # per run; only opcodes that take everything above a mark take so many values from the stack

# Opcodes by their argument. `J` and `\x8a` can have negative numbers, which are not allowed in segments.
NUMBER, GET, TEXT = "number", "get", "text"
_KINDS = {
    **dict.fromkeys(b"KMJ\x8a", NUMBER),
    **dict.fromkeys(b"hj", GET),
    **dict.fromkeys(b"\x8cX", TEXT),
}
# Other opcodes that create objects without changing earlier ones, so that one example can represent all.
_PLAIN = frozenset(b"()}]\x81\x85\x86\x87tRbusN\x88\x89\x94")
_MARK, _MEMOIZE, _FRAME, _STOP, _STACK_GLOBAL = b"(\x94\x95.\x93"
_TO_MARK = frozenset(b"tuled1o\x90\x91")  # take everything above a mark
_REFUSED = frozenset(b"PQgpqri")
_MADE = b")\x81"  # after a class is fetched: create an object of it
_FILL = bytes([_MEMOIZE])  # store an object in the next memo slot


def _widths(widths: dict[bytes, int]) -> npt.NDArray[np.int64]:
    table = np.zeros(256, np.int64)
    for opcode, width in widths.items():
        table[opcode[0]] = width
    return table


_WIDTHS = {
    NUMBER: _widths({b"K": 1, b"M": 2, b"J": 4}),
    GET: _widths({b"h": 1, b"j": 4}),
    TEXT: _widths({b"\x8c": 1, b"X": 4}),  # of the length field
}
_LONG = 0x8A
_MASKS = np.array([(1 << 8 * width) - 1 for width in range(8)], np.uint64)


class IrregularError(Exception):
    """A pickle that this module does not read; it can be valid."""


class _Inert:
    """An object that no opcode can use, and only readers that know its class."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise IrregularError(f"{name} of a {type(self).__name__}")

    def __setstate__(self, state: Any) -> None:
        raise IrregularError(f"the state of a {type(self).__name__}")

    def __hash__(self) -> int:
        raise IrregularError(f"a {type(self).__name__} as a key")


class Hole(_Inert):
    """The placeholder, in an example, for an argument that differs."""

    __slots__ = ("column", "kind")

    def __init__(self, column: int, kind: str) -> None:
        self.column, self.kind = column, kind


class _Unmade(_Inert):
    """An object of a segment with unknown content."""

    __slots__ = ()


class _Mark(_Inert):
    """One of the placeholders for a run."""

    __slots__ = ("number", "run")

    def __init__(self, run: "Run", number: int) -> None:
        self.run, self.number = run, number

    __hash__ = object.__hash__  # a run of keys and values becomes two keys and two values


class _Template:
    """The opcodes that create an object, or a key and its value, and which of their arguments differ."""

    def __init__(self, opcodes: list[tuple[str, bytes]]) -> None:
        self.opcodes = opcodes  # kind of argument or "", and the bytes (empty if they differ)
        self.slots = sum(own == _FILL for _, own in opcodes)  # in the memo
        self.example: tuple[Any, ...] = ()
        self.slots_of_example = range(0)  # in the shortened pickle; empty if it is not there
        self.found = _Found(-1)
        self.steps: list[tuple[str, bytes, int]] = []  # equal bytes joined; with the number of slots filled before
        slots = 0
        for kind, own in opcodes:
            if own and self.steps and self.steps[-1][1]:
                self.steps[-1] = "", self.steps[-1][1] + own, self.steps[-1][2]
            else:
                self.steps.append(("" if own else kind, own, slots))
            slots += own == _FILL
        self.columns = [(kind, slots) for kind, own, slots in self.steps if not own]
        fixed = (int.from_bytes(own[1:], "little") for kind, own in opcodes if kind == GET and own)
        self.highest = max(fixed)  # slot that all of them fetch; the class is always fetched

    def including(self, opcodes: list[tuple[str, bytes]]) -> list[tuple[str, bytes]] | None:
        """Its opcodes, extended to match these too; None if more than arguments differ."""
        if [kind or own for kind, own in opcodes] != [kind or own for kind, own in self.opcodes]:
            return None
        pairs = zip(self.opcodes, opcodes, strict=True)
        return [(kind, own if own == other else b"") for (kind, own), (_, other) in pairs]


class _Found:
    """The objects that match a template and begin in a block of the pickle."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.starts = self.ends = np.empty(0, np.int64)
        self.columns: list[npt.NDArray[Any]] = []  # two for a string: begin and end


class _Candidates:
    """The objects that match any template of a class and begin in a block, in order."""

    def __init__(self, templates: list[_Template], block: int) -> None:
        self.templates, self.block = tuple(templates), block
        own = [template.found for template in templates]
        starts = np.concatenate([found.starts for found in own])
        order = np.argsort(starts, kind="stable")
        order = order[np.diff(starts[order], prepend=-1) > 0]
        self.starts = starts[order]
        self.ends = np.concatenate([found.ends for found in own])[order]
        self.rows = np.concatenate([np.arange(len(found.starts)) for found in own])[order]  # in its template's `_Found`
        self.kinds = np.repeat(np.arange(len(own)), [len(found.starts) for found in own])[order]
        self.slots = np.array([template.slots for template in templates])[self.kinds]
        is_last = np.concatenate([self.ends[:-1] != self.starts[1:], np.full(min(len(order), 1), True)])
        self.last = np.flatnonzero(is_last)


class Run:
    """Consecutive objects that match templates."""

    def __init__(self, first: int, slots: npt.NDArray[Any], kinds: npt.NDArray[Any]) -> None:
        self.count, self.times_read = len(kinds), 0
        self.ends = _compact(first + np.cumsum(slots))  # of the memo slots that they fill
        self.first, self.end = first, int(self.ends[-1])
        self.more = 0  # slots filled by the end of the run in the original pickle, and not in the shortened one
        self.kinds = kinds
        self.segments: dict[int, Segment] = {}  # by kind

    def at(self, number: int) -> "tuple[Segment, int, int]":
        """The object that fills a slot: its segment, its number there, and the slot within the object."""
        own = int(np.searchsorted(self.ends, number, "right"))
        segment = self.segments[int(self.kinds[own])]
        first = self.first if own == 0 else int(self.ends[own - 1])
        return segment, int(np.searchsorted(segment.places, own)), number - first

    def rows(self, function: Callable[..., tuple[Any, ...]]) -> Iterable[tuple[Any, ...]]:
        """The results of a function for each object. The function is only called with examples."""
        made = [
            (segment.places, zip(*map(segment.values, function(*segment.template.example)), strict=True))
            for segment in self.segments.values()
        ]
        if len(made) == 1:
            return made[0][1]
        found: list[tuple[Any, ...]] = [()] * self.count
        for places, rows in made:
            for place, row in zip(places.tolist(), rows, strict=True):
                found[place] = row
        return found


class Segment:
    """The objects of a run that match the same template."""

    def __init__(
        self,
        owner: "_Shortened",
        template: _Template,
        places: npt.NDArray[Any],
        columns: list[npt.NDArray[Any] | list[str]],
    ) -> None:
        self._owner, self.template, self._columns = owner, template, columns
        self.places, self.count = _compact(places), len(places)  # in the run

    def values(self, part: Any) -> Iterable[Any]:
        """The value, for each object, of a part of the example.

        Raises:
            IrregularError: the part is not a number, a string, None, or a tuple of them.
        """
        if isinstance(part, Hole):
            column = self._columns[part.column]
            if isinstance(column, list):
                return column
            if part.kind == GET:
                return self._owner.objects(column)
            return itertools.repeat(int(column[0]), self.count) if self._is_constant(part) else column.tolist()
        if isinstance(part, tuple):
            if all(map(self._is_constant, part)):
                return itertools.repeat(self.at(part, 0), self.count)
            return zip(*map(self.values, part), strict=True)
        if part is None or isinstance(part, (str, int)):
            return itertools.repeat(part, self.count)
        raise IrregularError(f"a {type(part).__name__} in each of many objects")

    def _is_constant(self, part: Any) -> bool:
        """Whether a part is a number that is the same for all objects."""
        if not isinstance(part, Hole):
            return isinstance(part, int)
        column = self._columns[part.column]
        return part.kind == NUMBER and not isinstance(column, list) and column.strides == (0,)

    def at(self, part: Any, number: int) -> Any:
        """The same for one object; an `_Unmade` if the value is not a number, a string, None, or a tuple."""
        if isinstance(part, Hole) and part.kind != GET:
            column = self._columns[part.column]
            return column[number] if isinstance(column, list) else int(column[number])
        if isinstance(part, tuple):
            return tuple(self.at(own, number) for own in part)
        return part if part is None or isinstance(part, (str, int)) else _Unmade()


class Loaded:
    """The value of a pickle, with marks in place of runs. Objects in runs have the classes named in `starts`."""

    def __init__(self, data: bytes, find_class: Callable[[str, str], Any], starts: frozenset[str]) -> None:
        """Raises IrregularError, or any error of unpickling: this module cannot read the pickle."""
        shortened = _Shortened(data, starts)
        self._runs = shortened.runs
        pickles.check(bytes(shortened.out))
        self.value = _Unpickler(shortened, find_class).load()

    def check(self) -> None:
        """Check that every run was read exactly once.

        Raises:
            IrregularError: one was not.
        """
        if any(run.times_read != 1 for run in self._runs):
            raise IrregularError("a run in an unexpected place")


def starmap(function: Callable[..., tuple[Any, ...]], items: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Like itertools.starmap, also for objects in runs: there the function is called with the example.

    Raises:
        IrregularError: a run is not complete, or the function uses parts of its objects with unknown values.
    """
    marks: list[_Mark] = []
    for item in items:
        marks += (own for own in item if isinstance(own, _Mark))
        if not marks:
            yield function(*item)
        elif len(marks) % len(item) or [(own.run, own.number) for own in marks] != [
            (marks[0].run, number) for number in range(len(marks))
        ]:
            raise IrregularError("a run that is not complete")
        elif len(marks) == MARKS:
            marks[0].run.times_read += 1
            yield from marks[0].run.rows(function)
            marks = []
    if marks:
        raise IrregularError("a run that is not complete")


class _Unpickler(pickle.Unpickler):
    """Unpickles the shortened pickle."""

    def __init__(self, shortened: "_Shortened", find_class: Callable[[str, str], Any]) -> None:
        super().__init__(io.BytesIO(shortened.out))
        self._shortened, self._find_class = shortened, find_class

    def find_class(self, module: str, name: str) -> Any:
        return self._find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        value, number = pid if isinstance(pid, tuple) else (None, pid)
        found = self._shortened.inserted[number]
        if isinstance(found, tuple):  # an object of a segment; `value` is its example
            return found[0].at(value, found[1])
        if isinstance(found, _Mark) and value is not None:  # `value`: examples of templates that are new in this run
            for template, example in zip(self._shortened.examples[number], value, strict=True):
                template.example = example
        return found

    def load(self) -> Any:
        value = super().load()
        self._shortened.memo = self.memo.copy()
        return value


class _Shortened:
    """A pickle without its runs."""

    def __init__(self, data: bytes, starts: frozenset[str]) -> None:
        self.out = bytearray()
        self.inserted: list[Any] = []  # marks, holes, and objects of segments, by persistent ID
        self.examples: dict[int, list[_Template]] = {}
        self.runs: list[Run] = []
        self.slots = 0  # filled so far in the original pickle
        self.memo: dict[int, Any] = {}  # of the shortened pickle, once it is loaded
        self._fetched_of_runs = 0
        self._data, self._starts = data, {name.encode() for name in starts}
        self._more = 0
        self._templates: dict[bytes, list[_Template]] = {}  # by the opcode that fetches the class
        self._candidates: dict[bytes, _Candidates] = {}
        self._classes: set[int] = set()  # slots of the classes in `starts`
        self._count = 0  # of templates
        # For each open mark: opcode that fetches the last object's class, its index, and `_forgotten` at that time.
        self._levels: list[tuple[bytes, int, int]] = [(b"", 0, 0)]
        self._opcodes: list[int] = []  # offsets, since the last `_forget`
        self._forgotten = 0  # calls of `_forget`
        self._at = self._copied = 0
        self._texts: dict[bytes, str] = {}
        self._bytes = _Bytes(data)
        self._read()
        del self._data, self._bytes, self._texts, self._templates, self._candidates

    def _read(self) -> None:
        data, end_of, text, limit = self._data, pickles.end_of, b"", SPARE
        in_runs = 0  # bytes, minus the cost of failed attempts
        frame_end = 0
        while True:
            at, opcode = self._at, data[self._at]
            end = end_of(data, at)
            kind = _KINDS.get(opcode)
            if at - in_runs > limit or opcode in _REFUSED or at < frame_end < end:
                raise IrregularError("other opcodes than those of runs")
            if kind is None and opcode not in _PLAIN:
                self._forget()
            if kind == GET:
                number = int.from_bytes(data[at + 1 : end], "little")
                if number in self._classes and data[end : end + 2] == _MADE:
                    self._learn(data[at:end])
                    if self._take_run(data[at:end]):
                        if at < frame_end < self._at:
                            raise IrregularError("a frame that ends within a run")
                        in_runs += self._at - at
                        limit = SPARE + max(in_runs, 0) // 8
                        continue
                    in_runs -= ATTEMPT
                    self._levels[-1] = data[at:end], len(self._opcodes), self._forgotten
                if self._more:
                    self._replace(end, self._fetched(number))
            elif kind == TEXT:
                text = data[at + (2 if opcode == 0x8C else 5) : end]
            elif opcode == _MEMOIZE:
                self.slots += 1
            elif opcode == _FRAME:
                before, frame_end = frame_end, end + int.from_bytes(data[at + 1 : end], "little")
                if before > at or frame_end > len(data):
                    raise IrregularError("a frame that is cut off, or begins within another one")
                self._replace(end, b"")
            elif opcode == _STACK_GLOBAL:
                if text in self._starts:
                    self._classes.add(self.slots)
            elif opcode == _MARK:
                self._levels.append((b"", 0, 0))
            elif opcode in _TO_MARK and len(self._levels) > 1:
                self._levels.pop()
            elif opcode == _STOP:
                self._replace(end, b".")
                return
            self._opcodes.append(at)
            self._at = end
            if len(self._opcodes) > MOST_OPCODES:
                self._forget()

    def _forget(self) -> None:
        """Discard the opcodes so far, which do not belong to an object of a segment."""
        self._opcodes.clear()
        self._forgotten += 1

    def _replace(self, end: int, own: bytes) -> None:
        """Write these bytes in place of those from the current position to `end`."""
        self.out += self._data[self._copied : self._at]
        self.out += own
        self._copied = end

    def _fetched(self, number: int) -> bytes:
        """Opcodes for the shortened pickle that fetch the object in a slot of the original pickle."""
        if number >= self.slots:
            raise IrregularError("a slot that is not filled")
        run = self._run_before(number)
        if run is None or number >= run.end:
            return b"j%b" % (number - (run.more if run else 0)).to_bytes(4, "little")
        segment, own, slot = run.at(number)
        example = segment.template.slots_of_example[slot].to_bytes(4, "little")
        return b"j%bJ%b\x86Q" % (example, self._insert((segment, own)))

    def _run_before(self, number: int) -> Run | None:
        """The last run that begins at a slot or before it."""
        at = bisect_right(self.runs, number, key=lambda run: run.first) - 1
        return self.runs[at] if at >= 0 else None

    def _insert(self, what: Any) -> bytes:
        self.inserted.append(what)
        return (len(self.inserted) - 1).to_bytes(4, "little")

    def objects(self, numbers: npt.NDArray[Any]) -> list[Any]:
        """The objects in slots of the original pickle."""
        made = {number: self._object(number) for number in np.unique(numbers).tolist()}
        return [made[number] for number in numbers.tolist()]

    def _object(self, number: int) -> Any:
        run = self._run_before(number)
        if run is None or number >= run.end:
            return self.memo[number - (run.more if run else 0)]
        self._fetched_of_runs += 1
        if self._fetched_of_runs > MOST_FETCHED:
            raise IrregularError("many objects that are fetched from runs")
        segment, own, slot = run.at(number)
        return segment.at(self.memo[segment.template.slots_of_example[slot]], own)

    # Templates

    def _learn(self, key: bytes) -> None:
        """Add a template of the object that ends here, or extend one to match it."""
        last, number, when = self._levels[-1]
        if last != key or when != self._forgotten:
            return
        bounds = [*self._opcodes[number:], self._at]
        opcodes = [_opcode(self._data[at:end]) for at, end in itertools.pairwise(bounds)]
        known = self._templates.setdefault(key, [])
        for number, template in enumerate(known):
            if (both := template.including(opcodes)) is not None:
                if both != template.opcodes:
                    known[number] = self._template(both)
                return
        known.insert(0, self._template(opcodes))
        del known[MOST_OF_A_CLASS:]

    def _template(self, opcodes: list[tuple[str, bytes]]) -> _Template:
        self._count += 1
        if self._count > MOST_TEMPLATES:
            raise IrregularError("too many kinds of objects")
        return _Template(opcodes)

    def _take_run(self, key: bytes) -> bool:
        """Replace the run of a class's objects that begins here with marks; False if no run begins here."""
        run, end = self._run(key)
        if run is None:
            return False
        used = [segment.template for segment in run.segments.values()]
        new = [template for template in used if not template.slots_of_example]
        made = [self._example(template) for template in new]
        filled = self.slots - self._more  # slots of the shortened pickle
        for template in new:
            template.slots_of_example = range(filled, filled + template.slots)
            filled += template.slots
        marks = [self._insert(_Mark(run, number)) for number in range(MARKS)]
        self.examples[len(self.inserted) - MARKS] = new
        first = b"(%bt" % b"".join(b"(%bt" % own for own in made) if made else b""
        self._replace(end, first + b"J%b" % marks[0] + (b"\x86Q" if made else b"Q"))
        self.out += b"".join(b"J%bQ" % mark for mark in marks[1:])
        self._at, self.slots = end, run.end
        self._more = run.more = self.slots - filled
        self.runs.append(run)
        self._forget()
        return True

    def _example(self, template: _Template) -> bytes:
        """Opcodes that create the example, with holes."""
        made, column = [], 0
        for kind, own in template.opcodes:
            if not own:
                made.append(b"J%bQ" % self._insert(Hole(column, kind)))
                column += 1
            elif kind == GET:
                made.append(self._fetched(int.from_bytes(own[1:], "little")))
            else:
                made.append(own)
        return b"".join(made)

    def _found(self, key: bytes) -> _Candidates | None:
        """The objects of a class in the current block."""
        templates, block = self._templates.get(key, []), self._at // BLOCK
        known = self._candidates.get(key)
        if not templates or (known and known.block == block and known.templates == tuple(templates)):
            return known
        for template in templates:
            if template.found.block != block:
                template.found = self._bytes.find(template, block)
        self._candidates[key] = _Candidates(templates, block)
        return self._candidates[key]

    def _run(self, key: bytes) -> tuple[Run | None, int]:
        """The run of a class's objects that begins here, and its end; None if it is short, or fetches empty slots."""
        found = self._found(key)
        row = 0 if found is None else int(np.searchsorted(found.starts, self._at))
        if found is None or row == len(found.starts) or found.starts[row] != self._at:
            return None, 0
        stop = int(found.last[np.searchsorted(found.last, row)]) + 1
        if stop - row < LEAST:
            return None, 0
        kinds = _compact(found.kinds[row:stop])
        run = Run(self.slots, found.slots[row:stop], kinds)
        for kind in np.unique(kinds).tolist():
            template, places = found.templates[kind], np.flatnonzero(kinds == kind)
            firsts = run.ends[places].astype(np.int64) - template.slots
            columns = self._columns(template, found.rows[row:stop][places], firsts)
            if columns is None:
                return None, 0
            run.segments[kind] = Segment(self, template, places, columns)
        return run, int(found.ends[stop - 1])

    def _columns(
        self, template: _Template, rows: npt.NDArray[Any], firsts: npt.NDArray[Any]
    ) -> list[npt.NDArray[Any] | list[str]] | None:
        """The arguments of objects with these first slots; None if one fetches an empty slot."""
        if template.highest >= self.slots:
            return None
        columns: list[npt.NDArray[Any] | list[str]] = []
        left = iter(template.found.columns)
        for kind, slots in template.columns:
            column = next(left)[rows]
            if kind == GET and not (column < firsts + slots).all():
                return None
            columns.append(self._read_texts(column, next(left)[rows]) if kind == TEXT else _compact(column))
        return columns

    def _read_texts(self, starts: npt.NDArray[Any], ends: npt.NDArray[Any]) -> list[str]:
        """Decode strings. They are cached because most occur many times."""
        found = []
        for at, end in zip(starts.tolist(), ends.tolist(), strict=True):
            own = self._data[at:end]
            if (text := self._texts.get(own)) is None:
                text = self._texts[own] = str(own, "utf-8", "surrogatepass")
            found.append(text)
        return found


def _opcode(data: bytes) -> tuple[str, bytes]:
    """An opcode of a template. Numbers are assumed to differ between objects."""
    kind = _KINDS.get(data[0], "")
    return kind, b"" if kind == NUMBER else data


def _compact(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    least, most = column.min(), column.max()
    if least == most:
        return np.broadcast_to(column[:1].copy(), column.shape)
    return column.astype(np.uint32) if most < 1 << 32 else column.copy()


class _Bytes:
    """A pickle's bytes, for comparison with templates."""

    def __init__(self, data: bytes) -> None:
        self._all = np.frombuffer(data, np.uint8)

    def _windows(self, width: int) -> npt.NDArray[np.uint8]:
        """At each byte, the next `width` bytes."""
        return np.lib.stride_tricks.sliding_window_view(self._all, width)

    def find(self, template: _Template, block: int) -> _Found:
        """The objects that match a template and begin in a block, except close to the pickle's end."""
        found, begin = _Found(block), block * BLOCK
        first = template.steps[0][1][:4]
        words: npt.NDArray[Any] = np.ndarray((max(len(self._all) - 3, 0),), "<u4", self._all, strides=(1,))[
            begin : begin + BLOCK
        ]
        starts = begin + np.flatnonzero(words == int.from_bytes(first, "little"))
        rows: list[Any] = [starts, starts.copy()]  # followed by a column for each argument
        for kind, own, _ in template.steps:
            rows = self._same(rows, own) if own else self._arguments(rows, kind)
        found.starts, found.ends, *found.columns = rows
        return found

    def _kept(self, rows: list[Any], good: npt.NDArray[np.bool_]) -> list[Any]:
        return rows if good.all() else [column[good] for column in rows]

    def _same(self, rows: list[Any], own: bytes) -> list[Any]:
        rows = self._kept(rows, rows[1] <= len(self._all) - len(own))
        same = (self._windows(len(own))[rows[1]] == np.frombuffer(own, np.uint8)).all(axis=1)
        rows = self._kept(rows, same)
        rows[1] = rows[1] + len(own)
        return rows

    def _arguments(self, rows: list[Any], kind: str) -> list[Any]:
        rows = self._kept(rows, rows[1] <= len(self._all) - 9)
        at = rows[1]
        opcode, behind = self._all[at], self._windows(8)[at + 1].view("<u8")[:, 0]
        width = _WIDTHS[kind][opcode]
        value = behind & _MASKS[width]
        good = width > 0
        if kind == TEXT:
            end = at + 1 + width + value.astype(np.int64)
            return self._kept([rows[0], end, *rows[2:], at + 1 + width, end], good & (end <= len(self._all)))
        if kind == NUMBER:
            counted = behind & 0xFF
            is_long = (opcode == _LONG) & (counted > 0) & (counted < 8)
            counted = np.where(is_long, counted, 1)
            value = np.where(is_long, (behind >> 8) & _MASKS[counted], value)
            good = (good & (value < 1 << 31)) | (is_long & (value < _MASKS[counted] // 2 + 1))
            width = np.where(is_long, 1 + counted.astype(np.int64), width)
        rows = [rows[0], at + 1 + width, *rows[2:], value.astype(np.int64)]
        return self._kept(rows, good)
