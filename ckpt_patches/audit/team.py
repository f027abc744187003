"""The processes that audit or repair together: the first one gives orders, judges and reports; the others obey.

Each scans its share of a checkpoint. What it finds is far less than what it reads, and goes to the first one.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ckpt_patches.audit import damages
from ckpt_patches.audit.damages import Finding
from ckpt_patches.audit.replies import Reply, decoded, encoded
from ckpt_patches.audit.scan import Part, together
from ckpt_patches.errors import UserError
from ckpt_patches.group import Group
from ckpt_patches.meeting import Meeting

AT_A_TIME = 1 << 16  # odd runs, checksums and parts that are sent at a time, and those of one span more
DONE = b"done"


class UnreadableShareError(Exception):
    """Another process cannot read its share of a checkpoint to its end."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.detail)
        self.finding = finding


class Team:
    """This process among the others; by default it is alone, and then there is nobody to tell or to hear."""

    def __init__(self, group: Group | None = None, meeting: Meeting | None = None) -> None:
        self._group = group or Group()
        self._meeting = meeting or Meeting(self._group, Path())
        self._audit = 0  # the number of the one that is going on

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def size(self) -> int:
        return self._group.size

    def check(self) -> None:
        """That all is well with the others.

        Raises:
            OthersFailed: it is not.
        """
        self._meeting.check()

    def next_audit(self) -> None:
        """From now on parts are of the next checkpoint that was ordered to be audited."""
        self._audit += 1

    # Of the first process

    def order(self, **order: Any) -> None:
        """Tell the others what to do next."""
        if self.size > 1:
            self._meeting.send(json.dumps(order).encode())

    def parts_of_others(self, files: str) -> Iterator[Part]:
        """What the others have found in their shares, in order; `files` is what they should have been looking at.

        Raises:
            UnreadableShareError: a share cannot be read to its end.
            UserError: a process has found other files.
            OthersFailed: a process does not answer.
        """
        for rank in range(1, self.size):
            is_last = False
            while not is_last:
                reply = decoded(self._meeting.receive(rank))
                if reply.audit == self._audit:  # and not of one that was given up before its end
                    yield from _of(reply, rank, files)
                    is_last = reply.is_last

    def wait_for_others(self) -> None:
        """Until they have done what they were told, which has no other result.

        Raises:
            OthersFailed: one could not.
        """
        for rank in range(1, self.size):
            while self._meeting.receive(rank) != DONE:
                pass

    def end(self, status: int) -> None:
        """There is nothing more to do: all exit with this status."""
        self.order(end=status)
        self._meeting.wait_for_shares()
        self._meeting.finish()

    # Of the others

    def next_order(self) -> dict[str, Any]:
        """What the first one tells to do next.

        Raises:
            OthersFailed: nothing more comes.
        """
        order: dict[str, Any] = json.loads(self._meeting.receive())
        return order

    def tell_parts(self, parts: Iterable[Part], files: str) -> None:
        """Send what is found in this process's share, a bounded part of it at a time; where that ends by an exception,
        all that was found before it.
        """
        ready: list[Part] = []
        weight = 0
        try:
            for part in parts:
                add(part, ready)
                weight += 1 + len(part.odd.runs.code) + len(part.pieces)
                if weight >= AT_A_TIME:
                    self._tell(Reply(self._audit, files, ready))
                    ready, weight = [], 0
        finally:
            self._tell(Reply(self._audit, files, ready))

    def tell_end(self, files: str, reason: tuple[str, str] | None) -> None:
        """Nothing more comes of this process's share; why, if it was not read to its end."""
        self._tell(Reply(self._audit, files, [], is_last=True, reason=reason))

    def _tell(self, reply: Reply) -> None:
        self._meeting.send(encoded(reply))

    def tell_done(self) -> None:
        self._meeting.send(DONE)

    def leave(self) -> None:
        """Of one that was told the end: wait until the first one has heard it."""
        self._meeting.finish()


def _of(reply: Reply, rank: int, files: str) -> Iterator[Part]:
    if reply.reason:
        name, detail = reply.reason
        raise UnreadableShareError(Finding(damages.UNREADABLE, name, detail=detail))
    if reply.files != files:
        raise UserError(f"process {rank} has found other files in it than process 0: it changes; audit it again")
    yield from reply.parts


def add(part: Part, to: list[Part]) -> None:
    """Another part of the last one's shard is joined with it."""
    if to and to[-1].shard == part.shard:
        last = to.pop()
        part = Part(part.shard, together([last.odd, part.odd]), last.pieces + part.pieces)
    to.append(part)
