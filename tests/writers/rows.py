"""The writers: what pip installs, and the cases that each one's program is asked for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Writer:
    """What writes checkpoints: a program beside this file."""

    name: str
    requirement: str
    cases: tuple[str, ...]  # that it is asked for


WRITERS = {
    writer.name: writer
    for writer in (
        Writer("torchtitan", "torchtitan==0.3.0", ("fsdp2",)),
        Writer("verl", "verl==0.9.1", ("fsdp1", "fsdp2")),
        Writer("lightning", "lightning==2.6.6", ("fsdp2",)),
        Writer("accelerate", "accelerate==1.15.0", ("fsdp1", "fsdp1_original", "fsdp2", "ddp", "weights")),
    )
}
