"""The stacks that people run, one row each, and the newest releases.

A consumer's Dockerfile, lock file or submodules contain its pins. If a pin is not installable, the row uses the nearest
installable release: NGC's builds of torch are not on the package index.
"""

import re
from dataclasses import dataclass

MEGATRON_LM = "https://github.com/NVIDIA/Megatron-LM"


@dataclass(frozen=True)
class Row:
    """One stack: the packages that pip installs, and their Python. Pip installs nothing for an empty field."""

    name: str  # the name for `make stacks ROW=...`
    title: str  # "verl 0.9"
    python: str  # "3.12"
    torch: str  # a release
    megatron: str = ""  # a release of megatron-core, or a commit of Megatron-LM: 40 hexadecimal digits
    formats_of: str = ""  # for a commit, the release of tests/upstream.py that has its checkpoint formats
    deepspeed: str = ""  # a release
    nvrx: str = ""  # a release of nvidia-resiliency-ext
    others: tuple[str, ...] = ()  # requirements; pip chooses the NumPy release unless one is here

    @property
    def is_commit(self) -> bool:
        return bool(re.fullmatch(r"[0-9a-f]{40}", self.megatron))

    @property
    def commit(self) -> str:
        return f"Megatron-LM {self.megatron[:10]}" if self.is_commit else ""

    @property
    def megatron_release(self) -> str:
        """The release of megatron-core, or the release that is like the commit. Empty without megatron-core."""
        return self.formats_of or self.megatron

    @property
    def requirements(self) -> tuple[str, ...]:
        """The requirements that pip installs. A commit is not a requirement."""
        pins = {
            "torch": self.torch,
            "megatron-core": "" if self.is_commit else self.megatron,
            "deepspeed": self.deepspeed,
            "nvidia-resiliency-ext": self.nvrx,
        }
        return (*(f"{name}=={version}" for name, version in pins.items() if version), *self.others)

    @property
    def contents(self) -> str:
        """Describe the contents of the row in one line."""
        megatron = self.commit or f"megatron-core {self.megatron}"
        deepspeed, nvrx = f"DeepSpeed {self.deepspeed}", f"NVRx {self.nvrx}"
        parts = {megatron: self.megatron, deepspeed: self.deepspeed, nvrx: self.nvrx}
        there = [part for part, version in parts.items() if version]
        return ", ".join([f"Python {self.python}", f"torch {self.torch}", *there, *self.others])


ROWS = (
    Row(
        "nemo_26.04",
        "NeMo Framework 26.04",
        python="3.12",
        torch="2.11.0",
        megatron="0.17.0",  # the consumer's is a commit
        nvrx="0.6.0",
    ),
    Row(
        "nemo_26.06",
        "NeMo Framework 26.06",
        python="3.12",
        torch="2.12.0",
        megatron="0.18.0",  # the consumer's is a commit
        nvrx="0.6.0",
    ),
    Row(
        "bridge_0.4.2",
        "Megatron-Bridge 0.4.2",
        python="3.12",
        torch="2.11.0",
        megatron="2edffadb528ea07e261b0c02cdc42a7bb9c3197a",
        formats_of="0.17.1",
    ),
    Row(
        "bridge_0.6.0",
        "Megatron-Bridge 0.6.0",
        python="3.12",
        torch="2.12.0",
        megatron="cd4afffa648426a959dc7cb1e24b5ce7d0c3ff54",
        formats_of="0.19.0",
    ),
    Row(
        "bridge_main",
        "Megatron-Bridge of 2026-08-22",
        python="3.12",
        torch="2.12.0",
        megatron="2a75ac12c54ba6a42b34024756820bf819a2e25f",
        formats_of="0.19.2",
    ),
    Row(
        "nemo_rl_0.5",
        "NeMo-RL 0.5",
        python="3.12",
        torch="2.9.0",
        megatron="3cbe5c68a40c5820c11fc60fea1143dc6983706e",
        formats_of="0.16.0",
        others=("numpy<2",),  # Megatron-LM is that of the Megatron-Bridge commit that it pins, in place of a fork's
    ),
    Row(
        "nemo_rl_0.7",
        "NeMo-RL 0.7",
        python="3.13",
        torch="2.11.0",
        megatron="458c8d0ecafdf6d9e36771600d62ade27f2a67b7",
        formats_of="0.18.2",
        nvrx="0.6.0",
        others=("numpy>=2.1",),  # Megatron-LM is that of Megatron-Bridge 0.5.1: the pinned commit could not be had
    ),
    Row("verl_0.4", "verl 0.4", python="3.12", torch="2.6.0", megatron="0.12.2", others=("numpy<2",)),
    Row("verl_0.8", "verl 0.8", python="3.12", torch="2.11.0", megatron="0.16.1"),
    Row("verl_0.9", "verl 0.9", python="3.12", torch="2.11.0", megatron="0.18.0"),
    Row(
        "skyrl",
        "SkyRL",
        python="3.12",
        torch="2.11.0",
        megatron="71e418ea7d7b3a6c9a53238c543c3e0b43e11026",
        formats_of="0.19.0",
    ),
    Row("openrlhf", "OpenRLHF", python="3.12", torch="2.11.0", deepspeed="0.19.5"),  # it pins no Python and no torch
    Row("llama_factory", "LLaMA-Factory", python="3.11", torch="2.10.0", deepspeed="0.18.4"),
    Row("newest", "everything newest", python="3.13", torch="2.15.0", megatron="0.19.2", deepspeed="0.19.8"),
)
BY_NAME = {row.name: row for row in ROWS}
