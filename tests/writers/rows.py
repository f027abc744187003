"""The writers: their pip requirements, and the cases that their programs save."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Writer:
    """A trainer; the program beside this file saves with it."""

    name: str
    requirement: str
    cases: tuple[str, ...]  # that the program saves


WRITERS = {
    writer.name: writer
    for writer in (
        Writer("torchtitan", "torchtitan==0.3.0", ("fsdp2",)),
        Writer("verl", "verl==0.9.1", ("fsdp1", "fsdp2")),
        Writer("lightning", "lightning==2.6.6", ("fsdp2",)),
        Writer("accelerate", "accelerate==1.15.0", ("fsdp1", "fsdp1_original", "fsdp2", "ddp", "weights")),
    )
}
