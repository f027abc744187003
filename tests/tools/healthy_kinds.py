"""The kinds of healthy checkpoints, and how real packages write them.

Each writes `FOLDER/judged`, and most `FOLDER/earlier`, the save before it.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from ckpt_patches.convert.convert import Options, convert
from token_model import EXPERTS, VOCABULARY, WIDTH, Model, loss_of
from upstream import OWN_FOLDERS, REPOSITORY, newest, program_file, run_json, tree

Options_ = Mapping[str, Any]


class Job(NamedTuple):
    """A checkpoint to write."""

    kind: str
    seed: int
    folder: Path


class Kind(NamedTuple):
    """A kind of checkpoint, by the writer of its jobs and the options of the run."""

    write: Callable[[Sequence[tuple[Job, Any]]], list[str]]  # returns what could not be written, with the reason
    options: Any


# torch.distributed.checkpoint, one process


def train(model: nn.Module, optimizer: Any, seed: int, steps: int, **options: Any) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, generator, **options)
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def save(folder: Path, model: nn.Module, optimizer: Any, **more: Any) -> None:
    states, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": states, "optimizer": of_optimizer, **more}, checkpoint_id=folder, no_dist=True)


Make = Callable[[Any], Any]


def from_package(package: str, name: str, **settings: Any) -> Make:
    def make(parameters: Any) -> Any:
        module = __import__(package, fromlist=[name])
        return getattr(module, name)(parameters, **settings)

    return make


OF_TORCH = ("Adam", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Adafactor", "LBFGS")
OF_BITSANDBYTES = ("AdamW8bit", "Lion8bit", "PagedAdamW", "PagedAdamW8bit")
OF_TORCHAO = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
WITHOUT_RATE = ("Prodigy", "DAdaptAdam", "AliG")
OF_PYTORCH_OPTIMIZER = (
    *("SOAP", "Kron", "SM3", "SPAM", "Amos", "AdaPNM", "Prodigy", "Lion", "StableAdamW", "Shampoo", "ScalableShampoo"),
    *("Lamb", "AdEMAMix", "Adan", "MARS", "Tiger", "AdaBelief", "CAME", "ADOPT", "LaProp"),
    *("ScheduleFreeAdamW", "DAdaptAdam", "Yogi", "NovoGrad", "AdaFactor", "GaLore", "Muon", "AdamMini", "MADGRAD"),
)
OPTIMIZERS: dict[str, Make] = {
    "AdamW, beta1 0": from_package("torch.optim", "AdamW", lr=1e-2, betas=(0.0, 0.99)),
    "AMSGrad": from_package("torch.optim", "AdamW", lr=1e-2, amsgrad=True),
    "SGD": from_package("torch.optim", "SGD", lr=1e-2),
    "momentum": from_package("torch.optim", "SGD", lr=1e-2, momentum=0.9),
    **{name: from_package("torch.optim", name, lr=1e-2) for name in OF_TORCH},
    "Adafactor of transformers": from_package("transformers.optimization", "Adafactor"),
    "Adafactor of transformers, beta1": from_package(
        "transformers.optimization", "Adafactor", lr=1e-3, beta1=0.9, relative_step=False, scale_parameter=False
    ),
    **{
        f"{name} of bitsandbytes": from_package("bitsandbytes.optim", name, lr=1e-3, min_8bit_size=256)
        for name in OF_BITSANDBYTES
    },
    **{f"{name} of torchao": from_package("torchao.optim", name, lr=1e-2) for name in OF_TORCHAO},
    "schedule-free": from_package("schedulefree", "AdamWScheduleFree", lr=1e-2),
    **{
        name: from_package("pytorch_optimizer", name, **({} if name in WITHOUT_RATE else {"lr": 1e-3}))
        for name in OF_PYTORCH_OPTIMIZER
    },
    "Ranger21": from_package("pytorch_optimizer", "Ranger21", lr=1e-3, num_iterations=100),
}


def of_optimizer(seed: int, folder: Path, name: str) -> None:
    torch.manual_seed(seed)
    model = Model(4 * WIDTH if "torchao" in name else WIDTH)  # torchao leaves small parameters as they are
    optimizer = OPTIMIZERS[name](model.parameters())
    getattr(optimizer, "train", lambda: None)()  # of schedule-free optimizers
    train(model, optimizer, seed, 3 + seed % 4)
    save(folder / "judged", model, optimizer)


Prepare = Callable[[Model, int], Any]  # takes the seed; may return the parameters or groups of the optimizer


def dead_units(model: Model, seed: int) -> None:
    model.norm.bias.data[seed % 8 :: 5] = -100.0


def masked(parameter: torch.Tensor, mask: torch.Tensor) -> None:
    """What is not in the mask has no gradient."""
    parameter.register_hook(lambda grad: grad * mask)


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def pruned_blocks(model: Model, seed: int) -> None:
    masked(model.up.weight, (drawn(seed, WIDTH, 4) > 0.4).repeat_interleave(4, 0).repeat_interleave(WIDTH // 4, 1))


def pruned_elements(model: Model, seed: int) -> None:
    """Nine of ten elements of a matrix have no gradient."""
    masked(model.up.weight, drawn(seed, 4 * WIDTH, WIDTH) > 0.9)


def pruned_rows(model: Model, seed: int) -> None:
    """Rows and columns of a matrix, and their biases, are set to zero, and have no gradient."""
    kept = drawn(seed, 4 * WIDTH) > 0.5
    for parameter, mask in ((model.up.weight, kept[:, None]), (model.up.bias, kept), (model.down.weight, kept[None])):
        masked(parameter, mask)
        parameter.data *= mask


def lora(model: Model, _: int) -> Any:
    model.requires_grad_(False)
    a, b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
    nn.init.zeros_(b.weight)
    model.lora_a, model.lora_b = a, b
    model.down.register_forward_hook(lambda _, x, y: y + b(a(x[0][..., :WIDTH])))
    return [*a.parameters(), *b.parameters()]


def zero_head(model: Model, _: int) -> None:
    """In the first step nothing below it has a gradient."""
    nn.init.zeros_(model.head.weight)


def frozen(model: Model, seed: int) -> None:
    model.embedding.requires_grad_(False)
    if seed % 2:
        model.up.requires_grad_(False)


def unused(model: Model, _: int) -> None:
    """A branch that is in the optimizer and takes no part in the loss."""
    model.branch = nn.Linear(WIDTH, WIDTH)


def two_groups(model: Model, _: int) -> Any:
    parameters = list(model.parameters())
    return [{"params": parameters[::2], "weight_decay": 0.0}, {"params": parameters[1::2], "lr": 1e-4}]


def quantized_squares(optimizer: Any, seed: int) -> dict[str, Any]:
    """Second moments as fp8 has them, saved in fp32: log-normal by row, so that rows have many zeros or few."""
    generator = torch.Generator().manual_seed(seed)
    for state in optimizer.state.values():
        square = state["exp_avg_sq"]
        rows = torch.randn(square.shape[0], *[1] * (square.dim() - 1), generator=generator)
        values = (rows * (1 + seed % 5) + torch.randn(square.shape, generator=generator)).exp() * 1e-8
        scale = 448 / values.max()
        state["exp_avg_sq"] = (values * scale).to(torch.float8_e4m3fn).float() / scale * (square > 0)
    return {}


def losses(_: Any, seed: int) -> dict[str, Any]:
    own = torch.rand(4).index_fill(0, torch.tensor([seed % 4]), float("nan"))
    return {"train_state": {"losses": own}}


class Run(NamedTuple):
    """A run of AdamW in one process."""

    steps: Callable[[int], int] = lambda seed: 3  # of the seed, like all numbers here
    seen: Callable[[int], int] = lambda seed: VOCABULARY  # tokens
    experts: Callable[[int], int] = lambda seed: EXPERTS
    zeros: bool = False  # gradients of zeros for what was not used, as a gradient buffer has them
    prepare: Prepare = lambda model, seed: None
    rate: float = 1e-2
    silent: int = 0  # further steps, in which half of the tokens and an expert fall silent
    finish: Callable[[Any, int], dict[str, Any]] = lambda optimizer, seed: {}  # returns more to save
    earlier: bool = False  # also save the step before

    def write(self, seed: int, folder: Path) -> None:
        torch.manual_seed(seed)
        model = Model()
        groups = self.prepare(model, seed) or model.parameters()
        optimizer = torch.optim.AdamW(groups, lr=self.rate)
        if self.zeros:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.zero_grad = lambda: [parameter.grad.zero_() for parameter in model.parameters()]
        train(model, optimizer, seed, self.steps(seed), seen=self.seen(seed), experts=self.experts(seed))
        train(model, optimizer, seed + 1, self.silent, seen=VOCABULARY // 2, experts=EXPERTS - 1)
        more = self.finish(optimizer, seed)
        if self.earlier:
            save(folder / "earlier", model, optimizer)
            train(model, optimizer, seed + 1000, 1)
        save(folder / "judged", model, optimizer, **more)


def trained(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, seed, 3)
    weights, states = get_state_dict(model, optimizer)
    return weights, states


def of_muon(seed: int, folder: Path) -> None:
    """Muon for matrices, and AdamW for the rest, in one state."""
    torch.manual_seed(seed)
    model = Model()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    both = torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-2)
    for optimizer in both:
        train(model, optimizer, seed, 3)
    states, of_optimizers = get_state_dict(model, both)
    dcp.save({"model": states, "optimizer": of_optimizers}, checkpoint_id=folder / "judged", no_dist=True)


def of_a_gan(seed: int, folder: Path) -> None:
    """A generator and a discriminator of the same kind, with an optimizer each."""
    state: dict[str, Any] = {}
    for number, name in enumerate(("G", "D")):
        weights, states = trained(seed + number)
        state[name] = {"model": weights, "optimizer": states} if seed % 2 else weights
        if not seed % 2:
            state[f"optimizer_{name}"] = states
    dcp.save(state, checkpoint_id=folder / "judged", no_dist=True)


def of_another_run(seed: int, folder: Path) -> None:
    """Weights of another run, with an optimizer that is new."""
    torch.manual_seed(seed)
    model = Model()
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), seed, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, seed, seed % 2)
    save(folder / "judged", model, optimizer)


def weights_alone(seed: int, folder: Path) -> None:
    dcp.save({"model": trained(seed)[0]}, checkpoint_id=folder / "judged", no_dist=True)


def fixed(number: int) -> Callable[[int], int]:
    return lambda seed: number


UNUSUAL: dict[str, Callable[[int, Path], None]] = {
    "AdamW": Run(steps=lambda seed: 3 + seed % 4, earlier=True).write,
    "unseen rows": Run(seen=lambda seed: 4 + seed % 8).write,
    "a single seen row": Run(seen=fixed(1)).write,
    "experts never routed to": Run(experts=lambda seed: 1 + seed % (EXPERTS - 1), zeros=True).write,
    "2,000 steps": Run(silent=2000, zeros=True).write,
    "dead units": Run(prepare=dead_units).write,
    "pruned blocks": Run(prepare=pruned_blocks).write,
    "pruned elements": Run(steps=fixed(4), prepare=pruned_elements).write,
    "pruned rows": Run(prepare=pruned_rows).write,
    "first step of LoRA": Run(steps=fixed(1), prepare=lora).write,
    "first step": Run(steps=fixed(1), prepare=zero_head).write,
    "frozen": Run(prepare=frozen).write,
    "unused branch": Run(prepare=unused).write,
    "rate 0": Run(rate=0.0).write,
    "squares of 8 bits": Run(finish=quantized_squares).write,
    "NaN in the trainer's losses": Run(finish=losses).write,
    "two groups": Run(prepare=two_groups).write,
    "Muon and AdamW": of_muon,
    "a GAN": of_a_gan,
    "a new optimizer": of_another_run,
    "weights alone": weights_alone,
}


def write_in_process(jobs: Sequence[tuple[Job, Any]]) -> list[str]:
    refused = []
    for job, options in jobs:
        try:
            options(job.seed, job.folder)
        except Exception as error:  # a missing package, or a limit of an optimizer
            refused.append(f"{job.kind}, seed {job.seed}: {type(error).__name__}: {str(error)[:150]}")
    return refused


# Ranks of torch alone: dcp_saving.py

MESHES = ("fsdp", "hsdp", "fsdp_tp", "tp", "ddp", "replicate", "fsdp1")
OF_RANKS: dict[str, Options_] = {
    **{f"{mesh}": {"mesh": mesh} for mesh in MESHES},
    **{f"{mesh}, flat names": {"mesh": mesh, "save": "flat"} for mesh in ("fsdp", "hsdp", "ddp")},
    "numbered states": {"save": "raw"},
    "folders of Accelerate": {"save": "folders"},
    "async": {"save": "async"},
    "weights": {"save": "weights"},
    "no step": {"steps": 0},
    "first step": {"steps": 1},
    "bf16": {"dtype": "bfloat16"},
    "groups": {"options": {"groups": True}},
    "zeros": {"options": {"zeros": True}},
    "tied": {"options": {"tied": True}},
    "frozen": {"options": {"frozen": True}},
    "unused": {"options": {"unused": True}},
    "strided": {"options": {"strided": True}, "mesh": "ddp"},
    **{name: {"optimizer": name} for name in ("SGD", "Adagrad", "RMSprop", "Adadelta")},
    **{f"{name}, ddp": {"optimizer": name, "mesh": "ddp"} for name in ("NAdam", "Adamax", "RAdam")},
    "files of ranks": {"save": "ranks"},
    "files of ranks, fsdp1": {"save": "ranks", "mesh": "fsdp1_flat"},
    "files of ranks, hsdp": {"save": "ranks", "mesh": "hsdp"},
}


def write_of_ranks(jobs: Sequence[tuple[Job, Any]]) -> list[str]:
    cases = []
    for job, options in jobs:
        steps = options.get("steps", 3)
        for name, less in (("earlier", 1), ("judged", 0)):
            if steps >= less:
                own = {"seed": job.seed, **options, "steps": steps - less, "name": str(job.folder / name)}
                cases.append(own)
    _run("dcp_saving", lambda file: ("/", file, "4"), cases, tree("deepspeed", newest("deepspeed")))
    return []


def _run(program: str, arguments: Callable[[Path], tuple[Any, ...]], cases: Any, root: Path, **more: Any) -> Any:
    """Run a program of tests/programs on a list of cases."""
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary, "cases.json")
        file.write_text(json.dumps(cases))
        if program == "dcp_saving":
            from upstream import run

            return run(program, *map(str, arguments(file)), tree=root)
        return run_json(program, *map(str, arguments(file)), tree=root, **more)


# DeepSpeed: deepspeed_kinds.py

TOKENS = {"model": "tokens"}
OF_DEEPSPEED: dict[str, Options_] = {
    **{f"zero {stage}": {**TOKENS, "stage": stage} for stage in (0, 1, 2, 3)},
    **{f"zero {stage}, fp16": {**TOKENS, "stage": stage, "dtype": "fp16"} for stage in (0, 1, 2, 3)},
    **{f"zero {stage}, fp32": {**TOKENS, "stage": stage, "dtype": "fp32"} for stage in (1, 2, 3)},
    **{f"zero {stage}, beta1 0": {**TOKENS, "stage": stage, "optimizer": "beta1 0"} for stage in (1, 2, 3)},
    **{f"zero {stage}, unseen rows": {**TOKENS, "stage": stage, "seen": 8} for stage in (1, 2, 3)},
    **{f"zero {stage}, a single seen row": {**TOKENS, "stage": stage, "seen": 1} for stage in (1, 2, 3)},
    **{f"zero {stage}, experts never routed to": {**TOKENS, "stage": stage, "experts": 2} for stage in (1, 2, 3)},
    **{f"zero {stage}, 2,000 steps": {**TOKENS, "stage": stage, "later": True} for stage in (2, 3)},
    **{f"zero {stage}, offload": {**TOKENS, "stage": stage, "offload": True} for stage in (2, 3)},
    **{
        f"zero {stage}, AdamW8bit of bitsandbytes": {**TOKENS, "stage": stage, "optimizer": "AdamW8bit"}
        for stage in (2, 3)
    },
    "zero 1, Prodigy": {**TOKENS, "stage": 1, "optimizer": "Prodigy"},
    **{
        f"zero {stage}, {name}": {**TOKENS, "stage": stage, "optimizer": name}
        for stage in (2, 3)
        for name in ("SGD", "momentum", "RMSprop", "NAdam", "AMSGrad", "Adagrad", "Adamax", "Lion", "StableAdamW")
    },
    **{f"zero {stage}, AdaBelief": {**TOKENS, "stage": stage, "optimizer": "AdaBelief"} for stage in (2, 3)},
    "zero 2, schedule-free": {**TOKENS, "stage": 2, "optimizer": "ScheduleFreeAdamW"},
    **{f"zero {stage}, frozen, unused": {"stage": stage, "frozen": True, "unused": True} for stage in (1, 2, 3)},
    **{
        f"zero {stage}, zero-initialized, rate 0": {"stage": stage, "zero_initialized": True, "zero_rate": True}
        for stage in (2, 3)
    },
    **{f"zero {stage}, first step": {"stage": stage, "zero_initialized": True, "steps": 0} for stage in (2, 3)},
    **{f"zero {stage}, LoRA": {"stage": stage, "lora": True, "groups": 1, "steps": 0} for stage in (1, 3)},
    "zero 2, a mask": {"stage": 2, "buffers": True},
    "zero 1, fp16, overflows": {"stage": 1, "dtype": "fp16", "overflow": True},
    "zero 1, warm-up": {"stage": 1, "warm_up": True},
    "zero 1, tied": {"stage": 1, "tied": True},
    "zero 1, round robin": {"stage": 1, "round_robin_gradients": True, "groups": 3},
    "zero 3, sub-groups": {"stage": 3, "sub_group_size": 100},
    "pipeline": {"model": "pipeline"},
}
OF_EXPERTS: dict[str, Options_] = {f"experts, zero {stage}": {"model": "moe", "stage": stage} for stage in (0, 1, 2)}


def write_of_deepspeed(jobs: Sequence[tuple[Job, Any]]) -> list[str]:
    return _of_deepspeed(jobs, "2")


def write_of_experts(jobs: Sequence[tuple[Job, Any]]) -> list[str]:
    return _of_deepspeed(jobs, "4")


def _of_deepspeed(jobs: Sequence[tuple[Job, Any]], ranks: str) -> list[str]:
    cases = [{**options, **_asdict(job)} for job, options in jobs]
    root, env = tree("deepspeed", newest("deepspeed")), {"FURTHER_PACKAGES": packages()}
    refused: list[str] = _run("deepspeed_kinds", lambda f: (f, "--ranks", ranks), cases, root, env=env)["refused"]
    return refused


def _asdict(job: Job) -> dict[str, Any]:
    return {"kind": job.kind, "seed": job.seed, "folder": str(job.folder)}


def packages() -> str:
    """The folder of further packages; empty if there is none."""
    return os.environ.get("FURTHER_PACKAGES", "")


def write_universal(jobs: Sequence[tuple[Job, Any]]) -> list[str]:
    """ZeRO checkpoints, converted by `to-universal`."""
    own = [(job._replace(folder=job.folder / "source"), options) for job, options in jobs]
    refused = write_of_deepspeed(own)
    for job, _ in own:
        for name in ("earlier", "judged"):
            for folder in (job.folder / name).glob("global_step*"):
                convert(folder, job.folder.parent / name, Options(workers=1))
    return refused


# Megatron: megatron_healthy.py

NEW = newest("megatron-core")
OF_MEGATRON: dict[str, tuple[str, Options_]] = {
    **{
        f"{NEW}, {kind}": (NEW, {"format": kind})
        for kind in ("fully_reshardable", "dp_reshardable", "dp_zero_gather_scatter")
    },
    f"{NEW}, torch": (NEW, {"backend": "torch", "format": "dp_reshardable"}),
    f"{NEW}, tensor parallel": (NEW, {"tp": 2}),
    f"{NEW}, pipeline": (NEW, {"pp": 2, "format": "dp_reshardable"}),
    f"{NEW}, fp16, overflows": (NEW, {"dtype": "fp16", "scale": 2.0**32, "steps": 5, "format": "dp_reshardable"}),
    f"{NEW}, frozen, unused": (NEW, {"frozen": True, "unused": True, "format": "dp_reshardable"}),
    f"{NEW}, zero-initialized, rate 0": (NEW, {"zero_initialized": True, "rate": 0.0, "format": "dp_reshardable"}),
    f"{NEW}, SGD": (NEW, {"optimizer": "sgd", "whole": True}),
    f"{NEW}, whole": (NEW, {"whole": True}),
    "0.14.0, zarr": ("0.14.0", {"backend": "zarr", "format": "fully_sharded_model_space"}),
    "0.14.0, zarr, gathered": ("0.14.0", {"backend": "zarr", "format": "dp_zero_gather_scatter"}),
    "0.14.0, torch_dist": ("0.14.0", {"format": "fully_sharded_model_space"}),
    "0.14.0, torch": ("0.14.0", {"backend": "torch", "format": "fully_sharded_model_space"}),
    "0.14.0, tensor parallel": ("0.14.0", {"tp": 2, "format": "fully_sharded_model_space"}),
}


def write_of_megatron(jobs: Sequence[tuple[Job, Any]]) -> list[str]:
    refused: list[str] = []
    for version in {version for _, (version, _) in jobs}:
        refused += _of_megatron(version, [(job, options) for job, (of, options) in jobs if of == version])
    return refused


def _of_megatron(version: str, jobs: Sequence[tuple[Job, Any]]) -> list[str]:
    cases: list[Any] = []
    folders: list[Path] = []
    for job, options in jobs:
        steps = options.get("steps", 3)
        for name, less in (("earlier", 1), ("judged", 0)):
            cases.append({**options, "seed": job.seed, "steps": steps - less})
            folders.append(job.folder / name)
    # Without the fix, upstream's own race loses slices of a zarr checkpoint now and then on a busy machine.
    fixed = {"delivery": "hook", "fixes": ["zarr_create_synchronizer"]} if version.startswith("0.14") else {}
    with tempfile.TemporaryDirectory(dir=folders[0].parents[1]) as out:
        arguments = ("--ranks", "4", "--cases")
        root = tree("megatron-core", version)
        refused: list[str] = _run("megatron_healthy", lambda f: (out, *arguments, f), cases, root, **fixed)["refused"]
        for number, folder in enumerate(folders):
            if (made := Path(out, str(number))).is_dir():
                folder.parent.mkdir(parents=True, exist_ok=True)
                made.rename(folder)
    return refused


# Trainer of Transformers, and Accelerate: trainer_kinds.py

OF_TRAINER: dict[str, Options_] = {
    "AdamW": {},
    "bf16": {"dtype": "bf16"},
    "warm-up": {"warm_up": 4},
    "unseen tokens": {"seen": 6},
    "tied": {"tied": True},
    "LoRA": {"lora": True},
    "T5": {"model": "t5"},
    "Adafactor": {"optim": "adafactor"},
    "T5, Adafactor": {"model": "t5", "optim": "adafactor"},
    "schedule-free": {"optim": "schedule_free_adamw"},
    "SGD": {"optim": "sgd"},
    "only the model": {"only_model": True},
    "final model": {"final": True},
    "final LoRA": {"final": True, "lora": True},
    **{f"zero {stage}": {"deepspeed": stage} for stage in (2, 3)},
    "zero 3, LoRA": {"deepspeed": 3, "lora": True},
    "zero 2, T5": {"deepspeed": 2, "model": "t5"},
}
ACCELERATE = {
    "AdamW": ("torch.optim.AdamW", {"lr": 1e-2}),
    "beta1 0": ("torch.optim.AdamW", {"lr": 1e-2, "betas": (0.0, 0.99)}),
    "SGD": ("torch.optim.SGD", {"lr": 1e-2, "momentum": 0.9}),
    "Adafactor of transformers": ("transformers.optimization.Adafactor", {"lr": 1e-3, "relative_step": False}),
    "schedule-free": ("schedulefree.AdamWScheduleFree", {"lr": 1e-2}),
    **{f"{name} of bitsandbytes": (f"bitsandbytes.optim.{name}", {"min_8bit_size": 256}) for name in OF_BITSANDBYTES},
    **{f"{name} of torchao": (f"torchao.optim.{name}", {"lr": 1e-2}) for name in OF_TORCHAO},
    **{name: (f"pytorch_optimizer.{name}", {}) for name in OF_PYTORCH_OPTIMIZER},
}


def write_of_trainer(jobs: Sequence[tuple[Job, Any]]) -> list[str]:
    return _of_trainer(jobs, "2")


def write_of_accelerate(jobs: Sequence[tuple[Job, Any]]) -> list[str]:
    own = []
    for job, (name, settings) in jobs:
        width = 4 * WIDTH if "torchao" in name else WIDTH
        own.append((job, {"accelerate": name, "settings": settings, "width": width}))
    return _of_trainer(own, "1")


def _of_trainer(jobs: Sequence[tuple[Job, Any]], ranks: str) -> list[str]:
    """With the newest DeepSpeed on the path, which only some kinds use."""
    cases = [{**options, **_asdict(job)} for job, options in jobs]
    path = [REPOSITORY, *OWN_FOLDERS]
    path += [tree("deepspeed", newest("deepspeed"))] if any("deepspeed" in case for case in cases) else []
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "CKPT_PATCHES": "off"}
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary, "cases.json")
        file.write_text(json.dumps(cases))
        program = [sys.executable, str(program_file("trainer_kinds")), str(file), "--ranks", ranks]
        done = subprocess.run(program, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    refused: list[str] = json.loads(done.stdout.strip().splitlines()[-1])["refused"]
    return refused


def kinds() -> dict[str, Kind]:
    """All kinds, by name."""
    found = {f"dcp: {name}": Kind(write_in_process, write) for name, write in UNUSUAL.items()}
    for name in OPTIMIZERS:
        found[f"dcp: {name}"] = Kind(write_in_process, _of_optimizer(name))
    tables: list[tuple[str, Mapping[str, Any], Callable[[Sequence[tuple[Job, Any]]], list[str]]]] = [
        ("ranks", OF_RANKS, write_of_ranks),
        ("deepspeed", OF_DEEPSPEED, write_of_deepspeed),
        ("deepspeed", OF_EXPERTS, write_of_experts),
        ("universal", {f"zero {stage}": OF_DEEPSPEED[f"zero {stage}"] for stage in (1, 2, 3)}, write_universal),
        ("megatron", OF_MEGATRON, write_of_megatron),
        ("trainer", OF_TRAINER, write_of_trainer),
        ("accelerate", ACCELERATE, write_of_accelerate),
    ]
    for prefix, table, write in tables:
        found |= {f"{prefix}: {name}": Kind(write, options) for name, options in table.items()}
    return found


def _of_optimizer(name: str) -> Callable[[int, Path], None]:
    return lambda seed, folder: of_optimizer(seed, folder, name)
