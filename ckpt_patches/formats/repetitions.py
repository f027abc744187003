"""Load a large pickle in which the same opcodes come again and again, in a fraction of the unpickler's memory.

An index of two million chunks is a hundred million opcodes, and Python's unpickler keeps every object that they make,
because a pickle can fetch each of them once more. Here objects that the same opcodes make, one behind the other, are
left out of the pickle that it is given: the arguments of these opcodes (numbers, texts, and which objects are fetched)
are arrays, a `Segment`, with one example of the objects, in which a `Hole` stands for each argument that differs. Every
opcode of a segment is compared with those of the example. A pickle that is not of this kind is refused, and whoever
calls takes the ordinary way.
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

LEAST = 8  # objects of a run; fewer are cheaper the ordinary way
SPARE = 4 << 20  # bytes of other opcodes, besides an eighth of what is in runs
BLOCK = 1 << 20  # bytes that are compared with a template at a time
ATTEMPT = 256  # bytes of these that it costs if no run begins where one could
MOST_TEMPLATES, MOST_OF_A_CLASS = 256, 16
MOST_OPCODES = 256  # of an object
MOST_FETCHED = 1 << 16  # objects of runs that others fetch; torch makes its indexes of new ones
MARKS = 4  # that stand for a run: no opcode takes so many from the stack but those that take all from a mark

# Opcodes by their argument. Numbers can be negative in `J` and `\x8a`; these are in no segment.
NUMBER, GET, PUT, TEXT = "number", "get", "put", "text"
_KINDS = {
    **dict.fromkeys(b"KMJ\x8a", NUMBER),
    **dict.fromkeys(b"hj", GET),
    **dict.fromkeys(b"qr", PUT),
    **dict.fromkeys(b"\x8cX", TEXT),
}
# What else makes objects, and changes none that was there before: one example can stand for all.
_PLAIN = frozenset(b"()}]\x81\x85\x86\x87tRbusN\x88\x89\x94")
_MARK, _MEMOIZE, _FRAME, _STOP, _STACK_GLOBAL, _GLOBAL = b"(\x94\x95.\x93c"
_TO_MARK = frozenset(b"tuled1o\x90\x91")  # take all from a mark on
_REFUSED = frozenset(b"PQgpi")
_MADE = b")\x81"  # behind the fetching of a class: an object of it


def _widths(widths: dict[bytes, int]) -> npt.NDArray[np.int64]:
    table = np.zeros(256, np.int64)
    for opcode, width in widths.items():
        table[opcode[0]] = width
    return table


_WIDTHS = {
    NUMBER: _widths({b"K": 1, b"M": 2, b"J": 4}),
    GET: _widths({b"h": 1, b"j": 4}),
    PUT: _widths({b"q": 1, b"r": 4}),
    TEXT: _widths({b"\x8c": 1, b"X": 4}),  # of the length
}
_LONG = 0x8A
_MASKS = np.array([(1 << 8 * width) - 1 for width in range(8)], np.uint64)


class IrregularError(Exception):
    """A pickle that is not read here; it may be sound."""


class _Inert:
    """What no opcode and no reader can use that does not know it."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise IrregularError(f"{name} of a {type(self).__name__}")

    def __setstate__(self, state: Any) -> None:
        raise IrregularError(f"the state of a {type(self).__name__}")

    def __hash__(self) -> int:
        raise IrregularError(f"a {type(self).__name__} as a key")


class Hole(_Inert):
    """In an example in the place of an argument that differs."""

    __slots__ = ("column", "kind")

    def __init__(self, column: int, kind: str) -> None:
        self.column, self.kind = column, kind


class _Unmade(_Inert):
    """An object of a segment of which nothing is known here."""

    __slots__ = ()


class _Mark(_Inert):
    """One of those that stand for a run."""

    __slots__ = ("number", "run")

    def __init__(self, run: "Run", number: int) -> None:
        self.run, self.number = run, number

    __hash__ = object.__hash__  # a run of keys and values is two keys and two values


class _Template:
    """The opcodes that make an object, or a key and its value, and which of their arguments differ."""

    def __init__(self, opcodes: list[tuple[str, bytes]]) -> None:
        self.opcodes = opcodes  # kind of argument, or "", and the bytes, which are empty if they differ
        self.slots = sum(map(_fills, opcodes))  # of the memo
        self.example: tuple[Any, ...] = ()
        self.slots_of_example: range | None = None  # in the shorter pickle
        self.found = _Found(-1)
        self.steps: list[tuple[str, bytes, int]] = []  # of equal bytes one; and how many slots are filled before
        slots = 0
        for kind, own in opcodes:
            if own and self.steps and self.steps[-1][1]:
                self.steps[-1] = "", self.steps[-1][1] + own, self.steps[-1][2]
            else:
                self.steps.append(("" if own else kind, own, slots))
            slots += _fills((kind, own))
        self.columns = [(kind, slots) for kind, own, slots in self.steps if not own and kind != PUT]
        fixed = (int.from_bytes(own[1:], "little") for kind, own in opcodes if kind == GET and own)
        self.highest = max(fixed)  # slot that all of them fetch; there is that of the class

    def including(self, opcodes: list[tuple[str, bytes]]) -> list[tuple[str, bytes]] | None:
        """What these and its own have in common; None if they are not the same but for arguments."""
        if [kind or own for kind, own in opcodes] != [kind or own for kind, own in self.opcodes]:
            return None
        pairs = zip(self.opcodes, opcodes, strict=True)
        return [(kind, own if own == other else b"") for (kind, own), (_, other) in pairs]


def _fills(opcode: tuple[str, bytes]) -> bool:
    """Whether it keeps an object in a slot of the memo."""
    return opcode[0] == PUT or opcode[1] == bytes([_MEMOIZE])


class _Found:
    """The objects of a template that begin in a block of the pickle."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.starts = self.ends = self.first_puts = np.empty(0, np.int64)
        self.columns: list[npt.NDArray[Any]] = []  # of a text two: where it begins, and ends


class _Candidates:
    """The objects of all templates of a class that begin in a block, in their order."""

    def __init__(self, templates: list[_Template], block: int) -> None:
        self.templates, self.block = tuple(templates), block
        own = [template.found for template in templates]
        starts = np.concatenate([found.starts for found in own])
        order = np.argsort(starts, kind="stable")
        order = order[np.diff(starts[order], prepend=-1) > 0]
        self.starts = starts[order]
        self.ends = np.concatenate([found.ends for found in own])[order]
        self.rows = np.concatenate([np.arange(len(found.starts)) for found in own])[order]  # of its template's
        self.kinds = np.repeat(np.arange(len(own)), [len(found.starts) for found in own])[order]
        self.slots = np.array([template.slots for template in templates])[self.kinds]
        without = [found.first_puts if len(found.first_puts) else np.full(len(found.starts), -1) for found in own]
        self.first_puts = np.concatenate(without)[order]  # -1: of a pickle that does not number its slots
        follows = self.ends[:-1] == self.starts[1:]
        step = np.where(self.first_puts[:-1] < 0, 0, self.slots[:-1])
        follows &= np.diff(self.first_puts) == step
        self.last = np.flatnonzero(np.concatenate([~follows, np.full(min(len(order), 1), True)]))


class Run:
    """Objects one behind the other that templates tell."""

    def __init__(self, first: int, slots: npt.NDArray[Any], kinds: npt.NDArray[Any]) -> None:
        self.count, self.times_read = len(kinds), 0
        self.ends = _compact(first + np.cumsum(slots))  # slots of the memo that they fill
        self.first, self.end = first, int(self.ends[-1])
        self.more = 0  # how many slots the pickle has filled at its end that the shorter one has not
        self.kinds = kinds
        self.segments: dict[int, Segment] = {}  # by kind

    def at(self, number: int) -> "tuple[Segment, int, int]":
        """Which object fills a slot, as one of its segment, and its slot there."""
        own = int(np.searchsorted(self.ends, number, "right"))
        segment = self.segments[int(self.kinds[own])]
        first = self.first if own == 0 else int(self.ends[own - 1])
        return segment, int(np.searchsorted(segment.places, own)), number - first

    def rows(self, function: Callable[..., tuple[Any, ...]]) -> Iterable[tuple[Any, ...]]:
        """What a function has of each of the objects."""
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
    """Those objects of a run that the same opcodes make."""

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
        """What each of the objects has where the example has this.

        Raises:
            IrregularError: it is neither a number, a text, nor a tuple of them.
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
        """Whether it is a number that is the same for all."""
        if not isinstance(part, Hole):
            return isinstance(part, int)
        column = self._columns[part.column]
        return part.kind == NUMBER and not isinstance(column, list) and column.strides == (0,)

    def at(self, part: Any, number: int) -> Any:
        """The same of one of them; something that nobody can use where that is not a number, a text, or a tuple."""
        if isinstance(part, Hole) and part.kind != GET:
            column = self._columns[part.column]
            return column[number] if isinstance(column, list) else int(column[number])
        if isinstance(part, tuple):
            return tuple(self.at(own, number) for own in part)
        return part if part is None or isinstance(part, (str, int)) else _Unmade()

    @property
    def slots_of_example(self) -> range:
        assert self.template.slots_of_example is not None  # as it is in the shorter pickle
        return self.template.slots_of_example


class Loaded:
    """What a pickle holds, with marks in the place of runs: of objects of the classes of the names `starts`."""

    def __init__(self, data: bytes, find_class: Callable[[str, str], Any], starts: frozenset[str]) -> None:
        """Raises IrregularError, or anything that unpickling raises: the pickle is not read here."""
        shortened = _Shortened(data, starts)
        self._runs = shortened.runs
        pickles.check(bytes(shortened.out))
        self.value = _Unpickler(shortened, find_class).load()

    def check(self) -> None:
        """That every run was read, once.

        Raises:
            IrregularError: one was not.
        """
        if any(run.times_read != 1 for run in self._runs):
            raise IrregularError("a run in an unexpected place")


def starmap(function: Callable[..., tuple[Any, ...]], items: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """As that of itertools, also of objects in runs: the function is applied to their example.

    Raises:
        IrregularError: a run is not complete, or the function takes something else of its objects than can be told.
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
    """Of the shorter pickle."""

    def __init__(self, shortened: "_Shortened", find_class: Callable[[str, str], Any]) -> None:
        super().__init__(io.BytesIO(shortened.out))
        self._shortened, self._find_class = shortened, find_class

    def find_class(self, module: str, name: str) -> Any:
        return self._find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        value, number = pid if isinstance(pid, tuple) else (None, pid)
        found = self._shortened.inserted[number]
        if isinstance(found, tuple):  # an object of a segment, and its example
            return found[0].at(value, found[1])
        if isinstance(found, _Mark) and value is not None:  # examples of the templates that are new in its run
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
        self.inserted: list[Any] = []  # marks, holes, and objects of segments, by their persistent ids
        self.examples: dict[int, list[_Template]] = {}
        self.runs: list[Run] = []
        self.slots = 0  # that are filled, as in the pickle
        self.memo: dict[int, Any] = {}  # of the shorter pickle, once it is loaded
        self._fetched_of_runs = 0
        self._outside: dict[int, Any] = {}  # what is in slots that are in no run, as far as it was fetched
        self._data, self._starts = data, {name.encode() for name in starts}
        self._firsts: list[int] = []
        self._more = 0
        self._templates: dict[bytes, list[_Template]] = {}  # by how the class is fetched
        self._candidates: dict[bytes, _Candidates] = {}
        self._classes: set[int] = set()  # their slots
        self._count = 0  # of templates
        # Of each open mark how the class of the last object is fetched, the number of its opcode, and since when.
        self._levels: list[tuple[bytes, int, int]] = [(b"", 0, 0)]
        self._opcodes: list[int] = []  # where they begin, since all before was forgotten
        self._forgotten = 0  # times
        self._at = self._copied = 0
        self._texts: dict[bytes, str] = {}
        self._bytes = _Bytes(data)
        self._read()
        del self._data, self._bytes, self._texts, self._templates, self._candidates

    def _read(self) -> None:
        data, end_of, text, limit = self._data, pickles.end_of, b"", SPARE
        in_runs = 0  # bytes, less what attempts cost
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
            elif kind == PUT:
                if int.from_bytes(data[at + 1 : end], "little") != self.slots:
                    raise IrregularError("slots in another order")
                self._replace(end, bytes([_MEMOIZE]))
                self.slots += 1
            elif kind == TEXT:
                text = data[at + (2 if opcode == 0x8C else 5) : end]
            elif opcode == _MEMOIZE:
                self.slots += 1
            elif opcode == _FRAME:
                before, frame_end = frame_end, end + int.from_bytes(data[at + 1 : end], "little")
                if before > at or frame_end > len(data):
                    raise IrregularError("a frame that is cut off, or begins within another one")
                self._replace(end, b"")
            elif opcode in (_STACK_GLOBAL, _GLOBAL):
                if (text if opcode == _STACK_GLOBAL else data[at:end].split(b"\n")[1]) in self._starts:
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
        """The opcodes before, which are not those of an object of a segment."""
        self._opcodes.clear()
        self._forgotten += 1

    def _replace(self, end: int, own: bytes) -> None:
        """Have these bytes in the place of those up to here."""
        self.out += self._data[self._copied : self._at]
        self.out += own
        self._copied = end

    def _fetched(self, number: int) -> bytes:
        """The opcodes that fetch from the memo of the shorter pickle what the pickle has in a slot."""
        if number >= self.slots:
            raise IrregularError("a slot that is not filled")
        at = bisect_right(self._firsts, number) - 1
        if at < 0:
            return b"j%b" % number.to_bytes(4, "little")
        if number >= self.runs[at].end:
            return b"j%b" % (number - self.runs[at].more).to_bytes(4, "little")
        segment, own, slot = self.runs[at].at(number)
        example = segment.slots_of_example[slot].to_bytes(4, "little")
        return b"j%bJ%b\x86Q" % (example, self._insert((segment, own)))

    def _insert(self, what: Any) -> bytes:
        self.inserted.append(what)
        return (len(self.inserted) - 1).to_bytes(4, "little")

    def objects(self, numbers: npt.NDArray[Any]) -> list[Any]:
        """What the pickle has in slots."""
        if numbers.strides == (0,) and len(numbers):
            return self.objects(numbers[:1].copy()) * len(numbers)
        found: list[Any] = []
        for number in numbers.tolist():
            if number in self._outside:
                found.append(self._outside[number])
                continue
            at = bisect_right(self._firsts, number) - 1
            run = self.runs[at] if at >= 0 else None
            if run is None or number >= run.end:
                found.append(self.memo[number - (run.more if run else 0)])
                self._outside[number] = found[-1]
                continue
            self._fetched_of_runs += 1
            if self._fetched_of_runs > MOST_FETCHED:
                raise IrregularError("many objects that are fetched from runs")
            segment, own, slot = run.at(number)
            found.append(segment.at(self.memo[segment.slots_of_example[slot]], own))
        return found

    # Templates

    def _learn(self, key: bytes) -> None:
        """A template of the object that ends here, or one that includes it."""
        last, number, when = self._levels[-1]
        if last != key or when != self._forgotten:
            return
        bounds = [*self._opcodes[number:], self._at]
        opcodes = [_opcode(self._data[at:end]) for at, end in itertools.pairwise(bounds)]
        if len({kind == PUT for kind, own in opcodes if _fills((kind, own))}) > 1:
            return
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
        """Leave out what the templates of a class tell from here on, if that is enough."""
        run, end = self._run(key)
        if run is None:
            return False
        used = [segment.template for segment in run.segments.values()]
        new = [template for template in used if template.slots_of_example is None]
        made = [self._example(template) for template in new]
        filled = self.slots - self._more  # slots of the shorter pickle
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
        self._firsts.append(run.first)
        self._forget()
        return True

    def _example(self, template: _Template) -> bytes:
        """Opcodes that make one, with holes."""
        made, column = [], 0
        for kind, own in template.opcodes:
            if kind == PUT:
                made.append(bytes([_MEMOIZE]))
            elif not own:
                made.append(b"J%bQ" % self._insert(Hole(column, kind)))
                column += 1
            elif kind == GET:
                made.append(self._fetched(int.from_bytes(own[1:], "little")))
            else:
                made.append(own)
        return b"".join(made)

    def _found(self, key: bytes) -> _Candidates | None:
        """The objects of a class in this block."""
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
        """The objects of a class from here on, and where they end; none if they are few, or fetch what is not there."""
        found = self._found(key)
        row = 0 if found is None else int(np.searchsorted(found.starts, self._at))
        if found is None or row == len(found.starts) or found.starts[row] != self._at:
            return None, 0
        stop = int(found.last[np.searchsorted(found.last, row)]) + 1
        if stop - row < LEAST or found.first_puts[row] not in (-1, self.slots):
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
        """The arguments of objects whose first slots are these; None if one fetches what is not there."""
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
        """The same ones come again and again."""
        found = []
        for at, end in zip(starts.tolist(), ends.tolist(), strict=True):
            own = self._data[at:end]
            if (text := self._texts.get(own)) is None:
                text = self._texts[own] = str(own, "utf-8", "surrogatepass")
            found.append(text)
        return found


def _opcode(data: bytes) -> tuple[str, bytes]:
    """Of a template: numbers, and slots that are filled, differ from one object to the next."""
    kind = _KINDS.get(data[0], "")
    return kind, b"" if kind in (NUMBER, PUT) else data


def _compact(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    least, most = column.min(), column.max()
    if least == most:
        return np.broadcast_to(column[:1].copy(), column.shape)
    return column.astype(np.uint32) if most < 1 << 32 else column.copy()


class _Bytes:
    """A pickle's bytes, compared with templates."""

    def __init__(self, data: bytes) -> None:
        self._all = np.frombuffer(data, np.uint8)

    def _windows(self, width: int) -> npt.NDArray[np.uint8]:
        """At each byte the bytes from there on."""
        return np.lib.stride_tricks.sliding_window_view(self._all, width)

    def find(self, template: _Template, block: int) -> _Found:
        """The objects that begin in a block. One that ends close to the pickle's end is not found."""
        found, begin = _Found(block), block * BLOCK
        first = template.steps[0][1][:4]
        words: npt.NDArray[Any] = np.ndarray((max(len(self._all) - 3, 0),), "<u4", self._all, strides=(1,))[
            begin : begin + BLOCK
        ]
        starts = begin + np.flatnonzero(words == int.from_bytes(first, "little"))
        rows: list[Any] = [starts, starts.copy()]  # and behind them a column for each argument
        for kind, own, _ in template.steps:
            rows = self._same(rows, own) if own else self._arguments(rows, kind)
        kinds = [kind for kind, own, _ in template.steps if not own for _ in range(2 if kind == TEXT else 1)]
        puts = [column for kind, column in zip(kinds, rows[2:], strict=True) if kind == PUT]
        in_order = [put == puts[0] + number for number, put in enumerate(puts)]
        rows = self._kept(rows, np.all([rows[0] >= 0, *in_order], axis=0))
        found.starts, found.ends = rows[:2]
        if puts:
            found.first_puts = rows[2 + kinds.index(PUT)]
        found.columns = [column for kind, column in zip(kinds, rows[2:], strict=True) if kind != PUT]
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
