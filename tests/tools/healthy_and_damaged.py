"""Draw healthy and damaged checkpoints of real packages, audit them, and print the share of verdicts per kind.

    python tests/tools/healthy_and_damaged.py --seed 0 --count 5 [--only 'zero*'] [--packages FOLDER]

Kinds that need a package which is not installed are skipped, and the reason is printed. `--packages` names a folder
with further packages (`pip install --target`). The exit status is 1 if a healthy checkpoint is DAMAGED or INCOMPLETE,
less than 97 % of them are WHOLE, or a damaged one is WHOLE whose kind is not in `UNDETECTABLE`.
"""

import argparse
import fnmatch
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "programs"), str(TESTS.parent)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: E402

from ckpt_patches.audit.audit import Report, audit  # noqa: E402
from ckpt_patches.audit.judging import record_checksums  # noqa: E402
from ckpt_patches.formats.checkpoint import Checkpoint, Shard  # noqa: E402

WIDTH, VOCABULARY, EXPERTS = 16, 64, 4
MOMENTS = ("exp_avg", "exp_avg_sq")
# Kinds of damage that no rule can find, as docs/audit.md says with the reason.
UNDETECTABLE = (
    "*: whole rows of both moments",
    "*: a parameter without moments",
    "*: a rank's file of another run",
    "fsdp2: a rank's file of an earlier step",
)


class Model(nn.Module):
    """An embedding, a block with a bias of zeros, experts, and a head."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.up = nn.Linear(width, 4 * width)
        self.norm = nn.LayerNorm(4 * width)
        self.down = nn.Linear(4 * width, width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(EXPERTS))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.zeros_(self.down.bias)

    def forward(self, tokens: torch.Tensor, experts: int = EXPERTS) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.down(torch.relu(self.norm(self.up(x))))
        x = x + torch.stack([self.experts[n](x) for n in range(experts)]).mean(0)
        return self.head(x)


def loss_of(model: nn.Module, generator: torch.Generator, seen: int = VOCABULARY, **options: Any) -> torch.Tensor:
    tokens = torch.randint(0, seen, (64,), generator=generator)
    targets = torch.randint(0, VOCABULARY, (64,), generator=generator)
    return nn.functional.cross_entropy(model(tokens, **options).float(), targets)


def train(model: nn.Module, optimizer: Any, seed: int, steps: int, **options: Any) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, generator, **options).backward()
        optimizer.step()


def save(folder: Path, model: nn.Module, optimizer: Any, **more: Any) -> None:
    states, of_optimizer = get_state_dict(model, optimizer)
    alone = not torch.distributed.is_initialized()
    dcp.save({"model": states, "optimizer": of_optimizer, **more}, checkpoint_id=folder, no_dist=alone)


# Optimizers, by name: of torch, and of other packages

Make = Callable[[Any], Any]


def from_package(package: str, name: str, **settings: Any) -> Make:
    def make(parameters: Any) -> Any:
        module = __import__(package, fromlist=[name])
        return getattr(module, name)(parameters, **settings)

    return make


OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW, beta1 0": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.0, 0.99)),
    "AMSGrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "Adafactor of torch": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "Adafactor of transformers": from_package("transformers.optimization", "Adafactor"),
    "Adafactor of transformers, beta1": from_package(
        "transformers.optimization", "Adafactor", lr=1e-3, beta1=0.9, relative_step=False, scale_parameter=False
    ),
    "AdamW8bit of bitsandbytes": from_package("bitsandbytes.optim", "AdamW8bit", lr=1e-2, min_8bit_size=256),
    "Lion8bit of bitsandbytes": from_package("bitsandbytes.optim", "Lion8bit", lr=1e-3, min_8bit_size=256),
    "AdamW8bit of torchao": from_package("torchao.optim", "AdamW8bit", lr=1e-2),
    **{
        name: from_package("pytorch_optimizer", name, **({} if name == "Prodigy" else {"lr": 1e-3}))
        for name in ("SOAP", "Lion", "Prodigy", "Amos", "SM3", "AdaPNM", "Kron", "StableAdamW")
    },
}


def of_optimizer(name: str) -> Callable[[int, Path], None]:
    def write(seed: int, folder: Path) -> None:
        torch.manual_seed(seed)
        model = Model(4 * WIDTH if "torchao" in name else WIDTH)  # torchao leaves small parameters as they are
        optimizer = OPTIMIZERS[name](model.parameters())
        train(model, optimizer, seed, 3 + seed % 4)
        save(folder, model, optimizer)

    return write


# Unusual and healthy: torch.distributed.checkpoint, one process


def adamw(seed: int, **settings: Any) -> tuple[Model, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, **settings)


def unseen_rows(seed: int, folder: Path) -> None:
    model, optimizer = adamw(seed)
    train(model, optimizer, seed, 4, seen=4 + seed)
    save(folder, model, optimizer)


def silent_experts(seed: int, folder: Path) -> None:
    model, optimizer = adamw(seed)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.zero_grad = lambda: None  # gradients of zeros, as a gradient buffer has them
    train(model, optimizer, seed, 4, experts=1 + seed % (EXPERTS - 1))
    save(folder, model, optimizer)


def dead_units(seed: int, folder: Path) -> None:
    model, optimizer = adamw(seed)
    with torch.no_grad():
        model.norm.bias[seed % 8 :: 5] = -100.0
    train(model, optimizer, seed, 4)
    save(folder, model, optimizer)


def pruned(seed: int, folder: Path) -> None:
    """Blocks of a matrix are set to zero after each step, with their gradients."""
    model, optimizer = adamw(seed)
    mask = torch.rand(4 * WIDTH // 4, 4, generator=torch.Generator().manual_seed(seed)) > 0.4
    mask = mask.repeat_interleave(4, 0).repeat_interleave(4, 1)
    model.up.weight.register_hook(lambda grad: grad * mask)
    train(model, optimizer, seed, 4)
    save(folder, model, optimizer)


def first_step_of_lora(seed: int, folder: Path) -> None:
    torch.manual_seed(seed)
    model = Model().requires_grad_(False)
    a, b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
    nn.init.zeros_(b.weight)
    model.lora_a, model.lora_b = a, b
    model.down.register_forward_hook(lambda _, x, y: y + b(a(x[0][..., :WIDTH])))
    optimizer = torch.optim.AdamW([*a.parameters(), *b.parameters()], lr=1e-2)
    train(model, optimizer, seed, 1)
    save(folder, model, optimizer)


def frozen(seed: int, folder: Path) -> None:
    model, optimizer = adamw(seed)
    model.embedding.requires_grad_(False)
    if seed % 2:
        model.up.requires_grad_(False)
    train(model, optimizer, seed, 3)
    save(folder, model, optimizer)


def rate_of_zero(seed: int, folder: Path) -> None:
    model, optimizer = adamw(seed)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, seed, 1 + seed % 3)
    save(folder, model, optimizer)


def quantized_squares(seed: int, folder: Path) -> None:
    """Second moments as fp8 has them, saved in fp32: log-normal by row, so that rows have many zeros or few."""
    model, optimizer = adamw(seed)
    train(model, optimizer, seed, 4)
    generator = torch.Generator().manual_seed(seed)
    for state in optimizer.state.values():
        square = state["exp_avg_sq"]
        rows = torch.randn(square.shape[0], *[1] * (square.dim() - 1), generator=generator)
        values = (rows * (1 + seed) + torch.randn(square.shape, generator=generator)).exp() * 1e-8
        scale = 448 / values.max()
        state["exp_avg_sq"] = (values * scale).to(torch.float8_e4m3fn).float() / scale * (square > 0)
    save(folder, model, optimizer)


def decayed(seed: int, folder: Path) -> None:
    """Tokens and an expert fall silent after the first steps of 2000."""
    model, optimizer = adamw(seed)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.zero_grad = lambda: [parameter.grad.zero_() for parameter in model.parameters()]
    train(model, optimizer, seed, 5)
    train(model, optimizer, seed + 1, 2000, seen=VOCABULARY // 2, experts=EXPERTS - 1)
    save(folder, model, optimizer)


def a_buffer_of_losses(seed: int, folder: Path) -> None:
    model, optimizer = adamw(seed)
    train(model, optimizer, seed, 3)
    save(folder, model, optimizer, losses=torch.tensor([1.0, float("nan"), 0.5]))


def two_groups(seed: int, folder: Path) -> None:
    torch.manual_seed(seed)
    model = Model()
    parameters = list(model.parameters())
    groups = [{"params": parameters[::2], "weight_decay": 0.0}, {"params": parameters[1::2], "lr": 1e-4}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    train(model, optimizer, seed, 3)
    save(folder, model, optimizer)


def weights_alone(seed: int, folder: Path) -> None:
    model, _ = adamw(seed)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)


HEALTHY: dict[str, Callable[[int, Path], None]] = {
    **{f"dcp: {name}": of_optimizer(name) for name in OPTIMIZERS},
    "dcp: unseen rows": unseen_rows,
    "dcp: experts never routed to": silent_experts,
    "dcp: dead units": dead_units,
    "dcp: pruned blocks": pruned,
    "dcp: first step of LoRA": first_step_of_lora,
    "dcp: frozen": frozen,
    "dcp: rate 0": rate_of_zero,
    "dcp: squares of 8 bits": quantized_squares,
    "dcp: first moments decayed": decayed,
    "dcp: NaN in a buffer": a_buffer_of_losses,
    "dcp: two groups": two_groups,
    "dcp: weights alone": weights_alone,
}

# FSDP2 on two ranks; all in one process group

FSDP: dict[str, dict[str, Any]] = {
    "fsdp2: AdamW": {},
    "fsdp2: beta1 0": {"settings": {"betas": (0.0, 0.99)}},
    "fsdp2: unseen rows": {"train": {"seen": 8}},
    "fsdp2: half of the rows unseen": {"train": {"seen": VOCABULARY // 2}},
    "fsdp2: experts never routed to": {"train": {"experts": 2}},
    "fsdp2: bf16": {"dtype": torch.bfloat16},
}


def of_fsdp(rank: int, jobs: list[tuple[str, int, str]], port: int) -> None:
    from torch.distributed.fsdp import fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    for name, seed, folder in jobs:
        options = FSDP[name]
        torch.manual_seed(seed)
        model = Model().to(options.get("dtype", torch.float32))
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options.get("settings", {}))
        # Two saves: the second one is judged, and the first is that of an earlier step.
        train(model, optimizer, seed * 2 + rank, 2, **options.get("train", {}))
        save(Path(folder, "step-2"), model, optimizer)
        train(model, optimizer, 1000 + seed * 2 + rank, 1, **options.get("train", {}))
        save(Path(folder, "step-3"), model, optimizer)
    torch.distributed.destroy_process_group()


def write_fsdp(jobs: list[tuple[str, int, Path]]) -> None:
    from ckpt_patches.demo.ranks import free_port, results

    results(of_fsdp, 2, [(name, seed, str(folder)) for name, seed, folder in jobs], free_port())


# ZeRO, by the program of other tests, with options of our own; run with DeepSpeed's tree on the path

ZERO: dict[str, dict[str, Any]] = {
    **{f"zero {stage}: AdamW": {"stage": stage} for stage in (1, 2, 3)},
    "zero 2: beta1 0": {"stage": 2, "optimizer": "beta1 0"},
    "zero 3: beta1 0": {"stage": 3, "optimizer": "beta1 0"},
    "zero 1: frozen, unused": {"stage": 1, "frozen": True, "unused": True},
    "zero 3: frozen, unused": {"stage": 3, "frozen": True, "unused": True},
    "zero 2: zero-initialized, rate 0": {"stage": 2, "zero_initialized": True, "zero_rate": True},
    "zero 1: LoRA": {"stage": 1, "lora": True, "groups": 1},
    "zero 2: a mask": {"stage": 2, "mask": True},
    "zero 1: fp16, overflows": {"stage": 1, "dtype": "fp16", "overflow": True},
    "zero 1: SGD": {"stage": 1, "optimizer": "momentum"},
    "zero 2: Adagrad": {"stage": 2, "optimizer": "Adagrad"},
    "zero 2: warm-up": {"stage": 2, "warm_up": True},
}


def zero_ranks(rank: int, jobs: list[tuple[str, int, str]]) -> None:
    import zero_healthy

    zero_healthy.OPTIMIZERS["beta1 0"] = lambda groups, lr: torch.optim.AdamW(groups, lr=lr, betas=(0.0, 0.99))
    for name, seed, folder in jobs:
        steps = 1 + seed % 2 if "LoRA" in name else 2 + seed % 4
        for more in (0, 1):  # the second one is judged, and the first is that of an earlier step
            torch.manual_seed(seed)
            options = {**zero_healthy.PLAIN, **ZERO[name], "steps": steps + more}
            try:
                zero_healthy.train_and_save(options, Path(folder, ("earlier", "judged")[more]))
            except Exception as error:  # a limit of DeepSpeed, not of a checkpoint: equal on all ranks
                print(f"refused: {name}, seed {seed}: {type(error).__name__}: {error}", file=sys.stderr)
                shutil.rmtree(folder, ignore_errors=True)
                break


def write_zero(jobs: list[tuple[str, int, Path]]) -> None:
    listed = [(name, seed, str(folder)) for name, seed, folder in jobs]
    _in_a_tree("deepspeed", "--zero", json.dumps(listed))


def _in_a_tree(package: str, *arguments: str) -> None:
    from upstream import newest, tree

    path = [tree(package, newest(package)), TESTS.parent, TESTS, TESTS / "programs"]
    if package == "megatron-core":
        path[1:1] = [tree("triton", "3.9.0")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "CKPT_PATCHES": "off"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), *arguments], env=env, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    print("\n".join({line for line in done.stderr.splitlines() if line.startswith("refused")}))


# Megatron, by the program of other tests: its own draw

MEGATRON = "megatron: drawn"


def write_megatron(jobs: list[tuple[str, int, Path]]) -> None:
    from upstream import newest, run_json, tree

    seeds = [seed for _, seed, _ in jobs]
    with tempfile.TemporaryDirectory() as out:
        options = ("--seed", str(min(seeds)), "--count", str(len(jobs)))
        run_json("megatron_healthy", Path(out), *options, tree=tree("megatron-core", newest("megatron-core")))
        for (_, _, folder), number in zip(jobs, range(len(jobs)), strict=True):
            if (made := Path(out, str(number))).is_dir():
                shutil.copytree(made, folder)


# Damages of a healthy checkpoint


class Damage(NamedTuple):
    what: str
    of: str  # the healthy kinds, a pattern
    change: Callable[[Path, random.Random], bool]  # False: it does not apply


def values_of(shard: Shard, role: str) -> list["np.memmap[Any, np.dtype[Any]]"]:
    kind = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}[shard.streams[role].dtype]
    return [
        np.memmap(e.path, kind, "r+", e.offset, (e.nbytes // np.dtype(kind).itemsize,))
        for e in shard.streams[role].extents
        if e.nbytes
    ]


def changed(found: Checkpoint, shard: Shard, role: str, begin: int, end: int, change: Callable[[Any], Any]) -> None:
    """Change the elements of a state, and the checksums."""
    at = 0
    for part in values_of(shard, role):
        own = slice(max(begin - at, 0), max(min(end - at, len(part)), 0))
        part[own] = change(part[own])
        part.flush()
        at += len(part)
    for extent in shard.streams[role].extents:
        for record in found.records:
            if record.path == extent.path and record.offset <= extent.offset < record.offset + record.nbytes:
                record_checksums.update_checksum(record)


def zeros(values: Any) -> Any:
    return np.zeros_like(values)


def with_moments(found: Checkpoint, least: int = 1) -> list[Shard]:
    own = [shard for shard in found.shards if {*MOMENTS} <= shard.streams.keys() and shard.numel >= least]
    return [shard for shard in own if all(np.any(part) for part in values_of(shard, "exp_avg_sq"))]


def slice_of(*roles: str, rows: bool = False) -> Callable[[Path, random.Random], bool]:
    """Lose a slice, that is not whole rows, or one of whole rows."""

    def change(folder: Path, choose: random.Random) -> bool:
        found = audit(folder).checkpoint
        shards = [
            shard
            for shard in with_moments(found, 64)
            if len(shard.shape) > 1 and {*roles} <= shard.streams.keys() and shard.has_rows
        ]
        if "master" in roles:
            shards = [shard for shard in shards if "weight" in shard.streams]
        if not shards:
            return False
        shard = choose.choice(shards)
        begin, end = sorted(choose.sample(range(shard.numel + 1), 2))
        end = max(end, min(begin + 8, shard.numel))
        begin = min(begin, end - 8)
        if rows:
            begin -= begin % shard.row
            end = begin + shard.row
        elif begin % shard.row == 0 and end % shard.row == 0:
            begin, end = (begin + 1, end) if begin else (begin, end - 1)
        for role in roles:
            changed(found, shard, role, begin, end, zeros)
        return True

    return change


def a_parameter_without_moments(folder: Path, choose: random.Random) -> bool:
    found = audit(folder).checkpoint
    name = choose.choice([shard.parameter for shard in with_moments(found)])
    for shard in (shard for shard in found.shards if shard.parameter == name):
        for role in MOMENTS:
            changed(found, shard, role, 0, shard.numel, zeros)
    return True


def no_moments(folder: Path, choose: random.Random) -> bool:
    found = audit(folder).checkpoint
    for shard in found.shards:
        for role in {*MOMENTS} & shard.streams.keys():
            changed(found, shard, role, 0, shard.numel, zeros)
    return found.step != 0


def of_a_rank(*roles: str) -> Callable[[Path, random.Random], bool]:
    """Zero these states in all that one rank has written."""

    def change(folder: Path, choose: random.Random) -> bool:
        found = audit(folder).checkpoint
        name = choose.choice(["_1_0.distcp", "_rank_1_mp"] if choose.random() > 0.5 else ["_0_0.distcp", "_rank_0_mp"])
        pattern = {"_1_0.distcp": "1", "_rank_1_mp": "1"}.get(name, "0")
        files = [f"__{pattern}_0.distcp", f"zero_pp_rank_{pattern}_mp_rank_00_optim_states.pt"]
        done = False
        for shard in found.shards:
            for role in {*roles} & shard.streams.keys():
                at = 0
                extents = [extent for extent in shard.streams[role].extents if extent.nbytes]
                for part, extent in zip(values_of(shard, role), extents, strict=True):
                    if any(extent.path.endswith(file) for file in files):
                        changed(found, shard, role, at, at + len(part), zeros)
                        done = True
                    at += len(part)
        return done

    return change


def one_element(role: str, value: Callable[[Any], Any]) -> Callable[[Path, random.Random], bool]:
    def change(folder: Path, choose: random.Random) -> bool:
        found = audit(folder).checkpoint
        shard = choose.choice([shard for shard in with_moments(found) if role in shard.streams])
        at = choose.randrange(shard.numel)
        changed(found, shard, role, at, at + 1, value)
        return True

    return change


def not_rounding(how: str) -> Callable[[Path, random.Random], bool]:
    """Main parameters that are not those of the weights: other numbers, or those of some steps earlier."""

    def change(folder: Path, choose: random.Random) -> bool:
        found = audit(folder).checkpoint
        shards = [shard for shard in with_moments(found) if {"weight", "master"} <= shard.streams.keys()]
        if not shards:
            return False
        noise = np.random.default_rng(choose.randrange(1 << 30))
        for shard in shards if how == "all" else [choose.choice(shards)]:
            scale = 0.03 if how == "all" else 1.0

            def moved(values: Any, scale: float = scale) -> Any:
                return (values * (1 + scale * noise.normal(size=len(values)))).astype(np.float32)

            changed(found, shard, "master", 0, shard.numel, moved)
        return True

    return change


def loaded(folder: Path) -> Any:
    """The states of a checkpoint in torch.distributed.checkpoint, with its keys."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary, "all.pt")
        dcp_to_torch_save(folder, file)
        return torch.load(file, weights_only=False)


def again(folder: Path, change: Callable[[dict[str, Any]], None]) -> bool:
    """Save the states of an optimizer again, changed."""
    value = loaded(folder)
    for state in value["optimizer"]["state"].values():
        change(state)
    shutil.rmtree(folder)
    dcp.save(value, checkpoint_id=folder, no_dist=True)
    return True


def without(name: str) -> Callable[[Path, random.Random], bool]:
    return lambda folder, _: again(folder, lambda state: state.pop(name))


def without_in_one(folder: Path, choose: random.Random) -> bool:
    number = choose.randrange(8)
    seen: list[int] = []

    def change(state: dict[str, Any]) -> None:
        seen.append(1)
        if len(seen) == number + 1:
            state.pop("exp_avg_sq")

    return again(folder, change)


def steps_of_zero(folder: Path, _: random.Random) -> bool:
    return again(folder, lambda state: state["step"].zero_())


def another_step(folder: Path, choose: random.Random) -> bool:
    """One rank's file is that of the save before."""
    return _file_of(folder, folder.parent.with_name(f"{folder.parent.name}-source"), choose)


def _file_of(folder: Path, source: Path, choose: random.Random) -> bool:
    rank = choose.randrange(2)
    for pattern in (f"__{rank}_0.distcp", f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"):
        for file in folder.glob(pattern):
            (other,) = source.glob(f"**/{file.name}")
            shutil.copyfile(other, file)
            return True
    return False


def truncated(folder: Path, choose: random.Random) -> bool:
    files = sorted(file for file in folder.rglob("*") if file.suffix in (".distcp", ".pt"))
    file = choose.choice(files)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return True


def missing(folder: Path, choose: random.Random) -> bool:
    choose.choice(sorted(file for file in folder.rglob("*") if file.suffix in (".distcp", ".pt"))).unlink()
    return True


BASES = ("dcp: AdamW", "fsdp2: AdamW", *(f"zero {stage}: AdamW" for stage in (1, 2, 3)))
DAMAGES = [
    Damage("a slice of exp_avg", "*: AdamW", slice_of("exp_avg")),
    Damage("a slice of exp_avg_sq", "*: AdamW", slice_of("exp_avg_sq")),
    Damage("a slice of both moments", "*: AdamW", slice_of(*MOMENTS)),
    Damage("whole rows of exp_avg_sq", "*: AdamW", slice_of("exp_avg_sq", rows=True)),
    Damage("whole rows of both moments", "*: AdamW", slice_of(*MOMENTS, rows=True)),
    Damage("a slice of main parameters", "zero [12]: AdamW", slice_of("master")),
    Damage("a parameter without moments", "*: AdamW", a_parameter_without_moments),
    Damage("no moments", "*: AdamW", no_moments),
    Damage("moments of a rank", "[fz]*: AdamW", of_a_rank(*MOMENTS)),
    Damage("first moments of a rank", "[fz]*: AdamW", of_a_rank("exp_avg")),
    Damage("all states of a rank", "[fz]*: AdamW", of_a_rank("master", *MOMENTS)),
    Damage("weights of a rank", "fsdp2: AdamW", of_a_rank("master")),
    Damage("NaN in a moment", "*: AdamW", one_element("exp_avg", lambda v: v * np.nan)),
    Damage("NaN in a main parameter", "*: AdamW", one_element("master", lambda v: v * np.nan)),
    Damage("a negative square", "*: AdamW", one_element("exp_avg_sq", lambda v: -np.abs(v) - 1)),
    Damage("main parameters of a parameter", "zero [12]: AdamW", not_rounding("one")),
    Damage("main parameters of an earlier step", "zero [12]: AdamW", not_rounding("all")),
    Damage("exp_avg_sq dropped for all", "[df]*: AdamW", without("exp_avg_sq")),
    Damage("step dropped for all", "[df]*: AdamW", without("step")),
    Damage("exp_avg_sq dropped for one", "[df]*: AdamW", without_in_one),
    Damage("steps of 0", "[df]*: AdamW", steps_of_zero),
    Damage("a rank's file of an earlier step", "[fz]*: AdamW", another_step),
    Damage("a rank's file of another run", "[fz]*: AdamW", another_step),
    Damage("a truncated file", "*: AdamW", truncated),
    Damage("a missing file", "*: AdamW", missing),
]


def checkpoint_in(folder: Path) -> Path:
    """The checkpoint that a kind's folder has."""
    for name in ("step-3", "judged"):
        if (folder / name).is_dir():
            return checkpoint_in(folder / name)
    inner = [path for path in folder.glob("*") if path.is_dir() and path.name.startswith(("global_step", "iter_"))]
    return inner[0] if inner else folder


def earlier_in(folder: Path) -> Path:
    return next(folder / name for name in ("step-2", "earlier") if (folder / name).is_dir())


Table = dict[str, Counter[str]]


def write_healthy(out: Path, kinds: Sequence[str], count: int, seed: int) -> dict[str, list[Path]]:
    """The folders of each kind. Kinds that cannot be written are left out, with a line that says why."""
    made: dict[str, list[Path]] = {}
    jobs = [(kind, n, out / kind.replace(": ", "_") / str(n)) for kind in kinds for n in range(seed, seed + count)]
    for kind, number, folder in (job for job in jobs if job[0] in HEALTHY):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            HEALTHY[kind](number, folder)
            made.setdefault(kind, []).append(folder)
        except Exception as error:
            print(f"skipped: {kind}, seed {number}: {type(error).__name__}: {str(error)[:150]}", flush=True)
            if isinstance(error, ImportError):
                continue
    for known, write in ((FSDP, write_fsdp), (ZERO, write_zero), ((MEGATRON,), write_megatron)):
        own = [job for job in jobs if job[0] in known]
        if not own:
            continue
        try:
            for _, _, folder in own:
                folder.parent.mkdir(parents=True, exist_ok=True)
            write(own)
            for kind, _, folder in own:
                if folder.is_dir():
                    made.setdefault(kind, []).append(folder)
        except Exception as error:
            print(f"skipped: {own[0][0]} and others: {type(error).__name__}: {str(error)[-1500:]}", flush=True)
    return made


def judged(folder: Path, found: Counter[str], kinds: set[str]) -> Report:
    report = audit(folder, workers=1)
    found[report.verdict] += 1
    kinds |= {finding.kind.name for finding in report.findings if finding.kind.severity != "note"}
    return report


def damaged(out: Path, made: dict[str, list[Path]], only: str) -> Iterator[tuple[str, Path]]:
    """Each damaged checkpoint, with its kind."""
    for damage in DAMAGES:
        for base in (base for base in made if fnmatch.fnmatch(base, damage.of) and base in BASES):
            name = f"{base.removesuffix(': AdamW')}: {damage.what}"
            if not fnmatch.fnmatch(name, only) and not fnmatch.fnmatch("damaged", only):
                continue
            for number, healthy in enumerate(made[base]):
                own = checkpoint_in(healthy)
                folder = out / "damaged" / str(number) / own.name
                source = folder.parent.with_name(f"{number}-source")
                for path in (folder.parent, source):
                    shutil.rmtree(path, ignore_errors=True)
                shutil.copytree(own, folder)
                if damage.change is another_step:
                    others = made[base][(number + 1) % len(made[base])]
                    wanted = earlier_in(healthy) if "step" in damage.what else checkpoint_in(others)
                    shutil.copytree(wanted, source)
                if damage.change(folder, random.Random(f"{name} {number}")):
                    yield name, folder


def run(count: int, seed: int, only: str) -> int:
    every = [*HEALTHY, *FSDP, *ZERO, MEGATRON]
    is_of_damage = only == "damaged" or not any(fnmatch.fnmatch(kind, only) for kind in every)
    kinds = list(BASES) if is_of_damage else [kind for kind in every if fnmatch.fnmatch(kind, only)]
    bad = 0
    with tempfile.TemporaryDirectory() as out:
        made = write_healthy(Path(out), kinds, count, seed)
        total: Counter[str] = Counter()
        for kind, folders in made.items() if not is_of_damage else ():
            found, why = Counter[str](), set[str]()
            for folder in folders:
                judged(checkpoint_in(folder), found, why)
            total += found
            print(f"healthy  {kind:45} {_shares(found)} {', '.join(sorted(why))}", flush=True)
        if total:
            print(f"healthy  {'all':45} {_shares(total)}", flush=True)
            bad += total["DAMAGED"] + total["INCOMPLETE"] + (total["WHOLE"] < 0.97 * total.total())
        total.clear()
        own: dict[str, tuple[Counter[str], set[str]]] = {}
        for name, folder in damaged(Path(out), made, only):
            judged(folder, *own.setdefault(name, (Counter(), set())))
        for name, (found, why) in own.items():
            total += found
            is_known = any(fnmatch.fnmatch(name, pattern) for pattern in UNDETECTABLE)
            bad += 0 if is_known else found["WHOLE"]
            note = " (undetectable)" if is_known else ""
            print(f"damaged  {name + note:60} {_shares(found)} {', '.join(sorted(why))}", flush=True)
        if total:
            print(f"damaged  {'all':60} {_shares(total)}", flush=True)
    return 1 if bad else 0


def _shares(found: Counter[str]) -> str:
    return " ".join(f"{verdict} {found[verdict]}/{found.total()}" for verdict in sorted(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--only", default="*", help="a pattern of kinds; `damaged`: only these")
    parser.add_argument("--packages", default="", help="a folder of further packages")
    parser.add_argument("--zero", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.zero:
        from ckpt_patches.demo.deepspeed_training import results

        results(zero_ranks, 2, json.loads(args.zero))
        return 0
    if args.packages:
        sys.path.append(args.packages)
    return run(args.count, args.seed, args.only)


if __name__ == "__main__":
    sys.exit(main())
