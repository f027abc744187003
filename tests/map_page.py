"""Draw docs/map.svg: the data flow of saves, conversions and loads, with each fix at the stage of its bug.

python tests/map_page.py
"""

import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from ckpt_patches.engine.fix import load
from ckpt_patches.engine.registry import APEX, CORE, DEEPSPEED, FIXES, NVRX, TORCH, package_with
from ckpt_patches.runtime.durable import replace_durably
from upstream import REPOSITORY

PICTURE = REPOSITORY / "docs" / "map.svg"
SAVE, DISK, LOAD = 0, 1, 2
COLUMNS = ("Save", "On disk, and conversion", "Load")


@dataclass(frozen=True)
class Stage:
    """A step of a program, or files on disk."""

    package: str
    column: int
    title: str
    text: tuple[str, ...]  # who reads and writes what
    modules: tuple[str, ...] = ()  # upstream's; empty for files
    tools: str = ""  # this package's commands that read or write the files


# Each stage: its name, column, title and tools; then who reads and writes what; after @ upstream's modules, without
# the package name.
MEGATRON = """\
rng | save | Collect the states of random numbers
  each rank reads its own
  makes: a shard of each rank whose state differs
  @ megatron.training.checkpointing
format | save | Choose the format
  reads: what the caller asks for
  makes: one of the sharding types
  @ optimizer.distrib_optimizer dist_checkpointing.mapping rerun_state_machine
state | save | Cut up the optimizer's state
  each rank reads its masters, moments and step
  makes: shards of buckets, or of parameters
  @ optimizer.distrib_optimizer optimizer.optimizer
gather | save | Gather it (torch, dp_zero_gather_scatter, fully_reshardable)
  data-parallel rank 0 reads the others' parts
  makes: whole buffers, or parameters
  @ optimizer.distrib_optimizer
share | save | Share out the shards
  all ranks read what each of them holds
  makes: who writes which shard
  @ dist_checkpointing.exchange_utils dist_checkpointing.mapping dist_checkpointing.strategies.fully_parallel
  @ megatron.training.checkpointing
zarr | save | Write zarr
  one rank creates each array
  every rank writes its ranges of the chunks
  @ dist_checkpointing.strategies.zarr
async | save | Write torch_dist, in the background
  a worker reads copies of the tensors
  writes: a file each, then the index
  @ dist_checkpointing.strategies.async_utils dist_checkpointing.strategies.torch
  @ dist_checkpointing.strategies.filesystem_async
megatron files | disk | Megatron checkpoint | audit · repair · fingerprint
  zarr: a folder an array, a file a chunk
  torch_dist: *.distcp and .metadata
  torch: distrib_optim.pt, model_optim_rng.pt
  param groups and step: common.pt
migration | disk | Migration, for 0.16 and later | migrate
  reads: zarr, or flattened ranges
  writes: torch_dist in today's formats
check | load | Check and read the shards
  each rank reads the index, and its shards
  checks: that they cover each array
  @ dist_checkpointing.serialization dist_checkpointing.validation dist_checkpointing.exchange_utils
groups | load | Give param groups their settings
  reads: the saved groups and the run's own
  sets: learning rates, weight decays, step
  @ optimizer.optimizer optimizer.distrib_optimizer
optimizer | load | Copy the state into the optimizer
  each rank reads its part, or what rank 0 scatters
  sets: masters, moments, step
  @ optimizer.distrib_optimizer optimizer.optimizer
offload | load | Refresh the copies of CPU offload
  the hybrid optimizer reads weights and state
  sets: its copies on CPU and GPU
  @ optimizer.cpu_offloading.hybrid_optimizer
scheduler | load | Load the scheduler
  reads: its state, or the command line
  sets: learning rate and weight decay
  @ optimizer_param_scheduler
"""
DEEPSPEED_STAGES = """\
wrapper | save | Choose the optimizer's wrapper
  the engine reads ZeRO's stage and the data types
  decides: who holds and saves the state
  @ runtime.constants runtime.bf16_optimizer runtime.base_optimizer
model states | save | Write the model states
  reads: weights, shapes, the client's state
  writes: *_model_states.pt, of each rank at ZeRO-3
  @ runtime.engine
optimizer states | save | Write the optimizer's states
  each rank reads its flat partitions and padding
  writes: its *_optim_states.pt
  @ runtime.engine
latest | save | Name the checkpoint
  all ranks have written
  rank 0 writes: latest
  @ runtime.engine
zero files | disk | ZeRO checkpoint | audit · repair · fingerprint
  a file of model states, or one a rank
  a file of optimizer states a rank
extract | disk | Conversion: cut out the fragments | to-universal
  reads: the ranks' files, in the ranks' order
  writes: a file a rank, parameter and state; settings
  @ checkpoint.ds_to_universal checkpoint.zero_checkpoint checkpoint.deepspeed_checkpoint
  @ checkpoint.reshape_utils
merge | disk | Conversion: join the fragments | to-universal
  reads: the fragments of each parameter
  writes: fp32.pt, exp_avg.pt, exp_avg_sq.pt
  @ checkpoint.ds_to_universal
universal files | disk | Universal checkpoint | audit · repair · fingerprint
  a folder a parameter, a file a state
  settings: zero/optimizer_state.pt
ordinary load | load | Load a ZeRO checkpoint
  each rank reads its own files
  sets: partitions, settings, step
  @ runtime.engine runtime.checkpoint_engine.torch_checkpoint_engine
  @ runtime.checkpoint_engine.fast_checkpoint_engine runtime.zero.stage_1_and_2 runtime.zero.stage3
  @ utils.zero_to_fp32
universal load | load | Load a universal checkpoint
  each rank reads its part of each parameter
  sets: masters and moments
  @ runtime.base_optimizer runtime.zero.stage_1_and_2 runtime.zero.stage3 runtime.bf16_optimizer
  @ checkpoint.universal_checkpoint
settings | load | … its settings and step
  reads: the saved param groups, the model states
  sets: learning rates, betas, decays, step
  @ runtime.engine runtime.zero.stage_1_and_2 runtime.zero.stage3 checkpoint.universal_checkpoint
links | load | Link parameters to their state
  reads: where each lies in the flat tensors
  sets: the links of safe_get_full_… and of loads
  @ utils.tensor_fragment runtime.zero.stage_1_and_2 runtime.bf16_optimizer
"""


def _stages(package: str, listed: str) -> Iterator[tuple[str, Stage]]:
    """The stages of a package, by their names."""
    for part in re.split(r"\n(?! )", listed.strip()):
        head, *lines = part.split("\n  ")
        name, column, title, tools = (*head.split(" | "), "")[:4]
        found = [module for line in lines if line.startswith("@ ") for module in line[2:].split()]
        modules = [module if package_with(module) else f"{package}.{module}" for module in found]
        text = [line for line in lines if not line.startswith("@ ")]
        yield name, Stage(package, ("save", "disk", "load").index(column), title, tuple(text), tuple(modules), tools)


NVRX_STAGES = """\
nvrx | save | Write torch_dist, in the background
  a worker receives the trainer's tensors
  writes: a file each, then the index
  @ checkpointing.async_ckpt.core checkpointing.async_ckpt.filesystem_async checkpointing.utils
nvrx files | disk | torch_dist checkpoint | audit
  *.distcp and .metadata
"""

APEX_STAGES = """\
apex save | save | Save an optimizer's state
  FusedAdam, DistributedFusedAdam: state_dict
  @ optimizers.fused_adam
apex files | disk | the program's own file
  torch.save of the state_dict
apex load | load | Load an optimizer's state
  FusedAdam, DistributedFusedAdam: load_state_dict
  @ optimizers.fused_adam contrib.optimizers.distributed_fused_adam
"""

TORCH_STAGES = """\
dcp | save | Write a state dict, in the background
  staging: copies of its tensors on the CPU
  a thread writes: a file a rank, then the index
  @ staging state_dict_saver
dcp files | disk | torch.distributed.checkpoint | audit · repair · fingerprint
  *.distcp and .metadata
"""


STAGES = dict(
    [
        *_stages(CORE, MEGATRON),
        *_stages(DEEPSPEED, DEEPSPEED_STAGES),
        *_stages(NVRX, NVRX_STAGES),
        *_stages(APEX, APEX_STAGES),
        *_stages(TORCH, TORCH_STAGES),
    ]
)

# The stages in which each fix's bug shows.
SITS = {name: load(name).stages for name in FIXES}

# The arrows between stages.
CHAINS = """
rng > format > state > gather > share > zarr > megatron files > migration > check > groups > optimizer > offload
share > async > megatron files > check
megatron files > scheduler
wrapper > model states > optimizer states > latest > zero files > extract > merge > universal files
model states > zero files > ordinary load > links
nvrx > nvrx files
dcp > dcp files
apex save > apex files > apex load
universal files > universal load > settings > links
"""
ARROWS = [arrow for chain in CHAINS.strip().splitlines() for arrow in pairwise(chain.split(" > "))]

# In units of the picture; scaled to two thirds, it is as wide as a page of text.
WIDTH, MARGIN, GUTTER, GAP = 1260, 24, 54, 20
BOX = (WIDTH - 2 * MARGIN - 2 * GUTTER) // 3
LINE, FIX, PAD = 17, 22, 12
HEADING, COLUMN_HEADING = 44, 28
TITLE_LETTER, LETTER, CODE_LETTER = 7.6, 6.5, 7.3  # maximum average width of a letter in a line
STYLE = """
text { font-family: "DejaVu Sans", Verdana, Arial, sans-serif; font-size: 12px; fill: #24292f; }
.heading { font-size: 19px; font-weight: bold; } .column { font-size: 14px; fill: #57606a; font-weight: bold; }
.title { font-size: 12.5px; font-weight: bold; } .soft { fill: #57606a; font-size: 11.5px; }
.code { font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: 11.5px; }
.fix { fill: #8a1c12; } .tool { fill: #0a4f9e; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; } .column, .soft { fill: #9198a1; } .fix { fill: #ffa198; } .tool { fill: #79c0ff; }
[fill="#ffffff"] { fill: #0d1117; } [fill="#f6f8fa"] { fill: #161b22; }
[fill="#ffebe9"] { fill: #3d1512; } [fill="#ddf4ff"] { fill: #0c2d4a; }
}
"""


@dataclass(frozen=True)
class Line:
    """A text line of a box."""

    text: str
    style: str  # classes of the style sheet
    height: int
    letter: float  # width of a letter


@dataclass(frozen=True)
class Box:
    """A stage with its position."""

    stage: Stage
    x: int
    y: int
    lines: tuple[Line, ...]

    @property
    def height(self) -> int:
        return sum(line.height for line in self.lines) + 2 * PAD

    @property
    def middle(self) -> int:
        return self.y + self.height // 2


def lines_of(name: str) -> tuple[Line, ...]:
    """The text lines of a stage's box."""
    stage = STAGES[name]
    found = [Line(part, "title", LINE, TITLE_LETTER) for part in _wrapped(stage.title, TITLE_LETTER)]
    found += [Line(part, "soft", LINE, LETTER) for text in stage.text for part in _wrapped(text, LETTER)]
    found += [Line(fix, "code fix", FIX, CODE_LETTER) for fix, stages in SITS.items() if name in stages]
    if stage.tools:
        found.append(Line(stage.tools, "code tool", FIX, CODE_LETTER))
    return tuple(found)


def _wrapped(text: str, letter: float) -> list[str]:
    return textwrap.wrap(text, int((BOX - 2 * PAD) / letter), subsequent_indent="   " if ": " in text else "")


def boxes(package: str, top: int) -> dict[str, Box]:
    """The boxes of a package, stacked in their columns; the middle column is spread to the height of the others."""
    columns = [[name for name, own in STAGES.items() if (own.package, own.column) == (package, at)] for at in range(3)]
    heights = [sum(Box(STAGES[name], 0, 0, lines_of(name)).height for name in names) for names in columns]
    tallest = max(height + GAP * (len(names) - 1) for height, names in zip(heights, columns, strict=True))
    found = {}
    for at, (names, height) in enumerate(zip(columns, heights, strict=True)):
        gap = (tallest - height) // max(len(names) - 1, 1) if at == DISK else GAP
        gap = min(gap, 4 * GAP)
        y = top + (tallest - height - gap * (len(names) - 1)) // 2
        for name in names:
            found[name] = Box(STAGES[name], MARGIN + at * (BOX + GUTTER), y, lines_of(name))
            y += found[name].height + gap
    return found


def drawing() -> str:
    """The picture; equal tables give equal text."""
    parts: list[str] = []
    y = MARGIN
    titles = {
        CORE: "megatron-core",
        DEEPSPEED: "DeepSpeed",
        NVRX: "nvidia-resiliency-ext",
        APEX: "apex",
        TORCH: "torch",
    }
    for package, name in titles.items():
        parts.append(_text(MARGIN, y + 22, name, "heading"))
        for at, column in enumerate(COLUMNS):
            parts.append(_text(MARGIN + at * (BOX + GUTTER), y + HEADING + 14, column, "column"))
        placed = boxes(package, y + HEADING + COLUMN_HEADING)
        parts += _arrows(placed)
        parts += [part for box in placed.values() for part in _box(box)]
        y = max(box.y + box.height for box in placed.values()) + 2 * MARGIN
    legend = "Red: a fix, where its bug sits (a page each in docs/). Blue: commands of ckpt-patches. Dashed: files."
    parts.append(_text(MARGIN, y, legend, "soft"))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + MARGIN}" '
        f'viewBox="0 0 {WIDTH} {y + MARGIN}" role="img" aria-label="Who reads and writes what, and where bugs sit">'
    )
    marker = (
        '<defs><marker id="tip" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">'
        '<path d="M0 0 L9 4 L0 8 z" fill="#6e7781"/></marker></defs>'
    )
    ground = f'<rect width="{WIDTH}" height="{y + MARGIN}" rx="8" fill="#ffffff"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", marker, ground, *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x}" y="{y}" class="{style}" xml:space="preserve">{escape(text)}</text>'


def _box(box: Box) -> Iterable[str]:
    are_files = not box.stage.modules and box.stage.title.endswith("checkpoint")
    look = 'fill="#f6f8fa" stroke="#8c959f" stroke-dasharray="5 4"' if are_files else 'fill="#ffffff" stroke="#8c959f"'
    yield f'<rect x="{box.x}" y="{box.y}" width="{BOX}" height="{box.height}" rx="6" {look}/>'
    y = box.y + PAD
    for line in box.lines:
        if "fix" in line.style or "tool" in line.style:
            fill = "#ffebe9" if "fix" in line.style else "#ddf4ff"
            width = round(len(line.text) * CODE_LETTER + 12)
            yield f'<rect x="{box.x + PAD}" y="{y + 2}" width="{width}" height="{FIX - 3}" rx="4" fill="{fill}"/>'
            yield _text(box.x + PAD + 6, y + 16, line.text, line.style)
        else:
            yield _text(box.x + PAD, y + 13, line.text, line.style)
        y += line.height


def _arrows(placed: dict[str, Box]) -> list[str]:
    return [_arrow(placed[begin], placed[end], placed.values()) for begin, end in ARROWS if begin in placed]


def _arrow(begin: Box, end: Box, every: Iterable[Box]) -> str:
    """An arrow straight down in a column, around boxes in between, or through the gutter to the next column."""
    if begin.x != end.x:
        between = end.x - GUTTER // 2
        return _path(
            [(begin.x + BOX, begin.middle), (between, begin.middle), (between, end.middle), (end.x, end.middle)]
        )
    if any(box.x == begin.x and begin.y < box.y < end.y for box in every):
        edge, beside = begin.x, begin.x - MARGIN // 2
        if begin.stage.column == LOAD:  # its left side has the arrows from the files
            edge, beside = begin.x + BOX, begin.x + BOX + MARGIN // 2
        return _path([(edge, begin.middle), (beside, begin.middle), (beside, end.middle), (edge, end.middle)])
    x = begin.x + BOX // 2
    return _path([(x, begin.y + begin.height), (x, end.y)])


def _path(points: Sequence[tuple[int, int]]) -> str:
    places = " L".join(f"{x} {y}" for x, y in points)
    return f'<path d="M{places}" fill="none" stroke="#6e7781" stroke-width="1.4" marker-end="url(#tip)"/>'


def write() -> None:
    replace_durably(PICTURE, drawing().encode("utf-8"))


if __name__ == "__main__":
    write()
    print(f"wrote {PICTURE}")
