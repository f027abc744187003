"""Trainings with the real DeepSpeed that are given as plain data (options.py): model, optimizer, steps."""

import functools
import gc
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.ops.adam import fused_adam
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

from trainers.deepspeed_state import SLICED
from trainers.experts_training import Expert
from trainers.optimizers import Lion, NoCompiler

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "AMSGrad": lambda groups, lr: torch.optim.AdamW(groups, lr=lr, amsgrad=True),
    "SGD": torch.optim.SGD,
    "momentum": lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
    "NAdam": torch.optim.NAdam,
    "Lion": Lion,
}
Options = dict[str, Any]
SAMPLES = 60  # per step; divisible by 1 to 5 ranks
BUILT_IN = {"built-in Adam": "Adam", "built-in AdamW": "AdamW", "Muon": "Muon"}


def patterns(options: dict[str, Any]) -> dict[str, list[str]]:
    """Return the patterns that a checkpoint must contain so that the converter accepts its slices."""
    whole = ["head.weight", "scale", *["down.bias"] * (not options["frozen"])]
    whole += ["again.weight"] * (not options["tied"]) + [r"unused\..*"] * options["unused"]
    return {"parameter_with_row_parallelism_patterns": ["down.weight"], "tp_replicated_parameter_patterns": whole}


class ToSlices(torch.autograd.Function):
    """The input of sliced layers. The backward pass sums the gradients of all slices."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return summed(gradients[0], ctx.group), None


class FromSlices(torch.autograd.Function):
    """The sum of the outputs of all slices."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


def summed(x: torch.Tensor, group: Any) -> torch.Tensor:
    x = x.contiguous().clone()
    torch.distributed.all_reduce(x, group=group)
    return x


class Model(torch.nn.Module):
    HIDDEN = 8

    def __init__(self, options: dict[str, Any], ranks: int) -> None:
        super().__init__()
        hidden = self.HIDDEN
        self.up = torch.nn.Linear(hidden, 3 * hidden)
        self.norm = torch.nn.LayerNorm(3 * hidden)
        self.down = torch.nn.Linear(3 * hidden, hidden)
        self.head = torch.nn.Linear(hidden, hidden, bias=False)
        self.again = torch.nn.Linear(hidden, hidden, bias=False)
        self.scale = torch.nn.Parameter(torch.ones(1))
        if options["experts"]:
            more = {"num_experts": options["experts"], "ep_size": expert_ranks(ranks)}
            expert = torch.nn.Sequential(Expert(hidden, hidden))
            self.experts = MoE(hidden, expert, k=1, min_capacity=0, use_rts=False, **more)
        if options["tied"]:
            self.again.weight = self.head.weight
        if options["unused"]:
            self.unused = torch.nn.Linear(hidden, 3)
        if options["zero_initialized"]:
            torch.nn.init.zeros_(self.down.bias)
        if options["frozen"]:
            self.norm.requires_grad_(False)
            self.down.bias.requires_grad_(False)
        if options["buffers"]:
            self.register_buffer("mask", torch.full((hidden, hidden), float("-inf")).triu(1))
            self.register_buffer("mean", torch.randn(hidden))
        if options["lora"]:  # rank-2 adapters; the second matrix starts as zeros; all else is frozen
            self.requires_grad_(False)
            self.lora_a = torch.nn.Linear(3 * hidden, 2, bias=False)
            self.lora_b = torch.nn.Linear(2, hidden, bias=False)
            torch.nn.init.zeros_(self.lora_b.weight)

    def cut(self, mpu: Any) -> None:
        """Keep this tensor-parallel rank's slices."""
        rank, size = mpu.get_slice_parallel_rank(), mpu.get_slice_parallel_world_size()
        for name, (axis, _) in SLICED.items():
            parameter = self.get_parameter(name)
            parameter.data = parameter.data.chunk(size, axis)[rank].contiguous()
            parameter.model_parallel = parameter.tensor_model_parallel = True  # else the norm omits it
        self.norm.normalized_shape = (3 * self.HIDDEN // size,)
        self.slices = mpu.get_slice_parallel_group()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "slices"):
            wide = self.norm(torch.tanh(self.up(ToSlices.apply(x, self.slices))))
            x = FromSlices.apply(torch.nn.functional.linear(wide, self.down.weight), self.slices) + self.down.bias
        else:
            wide = self.norm(torch.tanh(self.up(x)))
            x = self.down(wide)
        if hasattr(self, "lora_b"):
            x = x + self.lora_b(self.lora_a(wide))
        if hasattr(self, "mean"):
            x = x + self.mean.to(x.dtype)
        if hasattr(self, "experts"):
            x = x + self.experts(x)[0]
        output: torch.Tensor = self.again(x + self.head(x)) * self.scale
        return output


class Scale(torch.nn.Module):
    """The last layer of a pipeline."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))
        if options["buffers"]:
            self.register_buffer("mask", torch.full((8, 8), float("-inf")).triu(1))
            self.register_buffer("mean", torch.randn(Model.HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.mean.to(x.dtype) if hasattr(self, "mean") else x) * self.scale


def pipeline(options: dict[str, Any]) -> Any:
    """Create the layers on the given number of stages. The first and last square layers may be tied."""
    hidden, bias = Model.HIDDEN, {"bias": False}
    square = LayerSpec(torch.nn.Linear, hidden, hidden, **bias)
    head = TiedLayerSpec("head", torch.nn.Linear, hidden, hidden, **bias) if options["tied"] else square
    wide = LayerSpec(torch.nn.Linear, hidden, 3 * hidden)
    layers = [head, wide, torch.nn.Tanh(), LayerSpec(torch.nn.LayerNorm, 3 * hidden)]
    layers += [LayerSpec(torch.nn.Linear, 3 * hidden, hidden), square, head, LayerSpec(Scale, options)]
    model = PipelineModule(
        layers, options["pipeline"], loss_fn=loss, partition_method="uniform", activation_checkpoint_interval=0
    )
    for name, parameter in model.named_parameters():
        if options["zero_initialized"] and name == "4.bias":
            torch.nn.init.zeros_(parameter)
        if options["frozen"] and name.startswith(("3.", "5.")):
            parameter.requires_grad = False
    return model


def loss(output: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return (output.float() - 1).pow(2).mean()


def expert_ranks(ranks: int) -> int:
    """Return how many ranks share the experts: two if the number of ranks is even, else one."""
    return 1 + (ranks % 2 == 0)


def optimizer(model: Any, options: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of `deepspeed.initialize`. This function adds a built-in optimizer to the config."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    count = options["groups"]
    held: list[list[Any]] = [[] for _ in range(count)]
    own = [name for name, _ in named if "deepspeed_experts" not in name]  # each rank has all of these
    for name, parameter in named:
        by_kind = options["pipeline"] or name not in own  # independent of the stages
        held[(name.endswith("bias") if by_kind else own.index(name)) % count].append(parameter)
    groups: list[dict[str, Any]] = [{"params": some, "weight_decay": 0.01 * n} for n, some in enumerate(held)]
    if options["single"] and not options["lora"]:  # a group with one element
        scale = [parameter for name, parameter in named if name.endswith("scale")]
        for group in groups:
            group["params"] = [one for one in group["params"] if not any(one is own for own in scale)]
        groups.append({"params": scale, "weight_decay": 0.0})
    if options["empty_group"]:
        groups.insert(len(groups) // 2, {"params": [], "weight_decay": 0.3})
    for number, group in enumerate(groups):
        group["lr"] = 1e-2 / (number + 1)
        if options["stage_decay"]:
            group["weight_decay"] += 0.1 * model.stage_id
    if options["zero_rate"]:
        groups[-1]["lr"] = 0.0
    if options["reversed"]:
        groups.reverse()
    if options["experts"]:
        groups = [{**group, "name": f"group {number}"} for number, group in enumerate(groups)]
        groups = split_params_into_different_moe_groups_for_optimizer(groups)
    if options["optimizer"] in OPTIMIZERS:
        return {"optimizer": OPTIMIZERS[options["optimizer"]](groups, lr=1e-2)}
    name = BUILT_IN[options["optimizer"]]
    of_adam = {"torch_adam": True} if name != "Muon" else {}
    config["optimizer"] = {"type": name, "params": {"lr": 1e-2, **of_adam}}
    if name == "Muon":
        fused_adam.FusedAdamBuilder = NoCompiler  # DeepSpeed then uses its Adam for vectors
        config["zero_optimization"]["reduce_scatter"] = False
    return {"model_parameters": groups if name != "Muon" else [parameter for _, parameter in named]}


def engine(options: Options, on: Options, seed: int, *, universal: bool = False) -> Any:
    """Create an engine on the given ranks and nodes."""
    ranks = on["ranks"]
    gc.freeze()
    torch._dynamo.config.disable = True
    torch.manual_seed(seed)
    model = pipeline(options) if options["pipeline"] else Model(options, ranks)
    data_parallel = ranks // max(1, options["pipeline"]) // options["tp"]
    zero = {"stage": options["stage"], "reduce_bucket_size": options["bucket"]}
    flags = ("round_robin_gradients", "overlap_comm", "parameter_alignment")
    zero |= {name: True for name in flags if options[name]}
    zero |= {"contiguous_gradients": options["contiguous_gradients"]}
    if options["stage"] == 3:
        zero["stage3_param_persistence_threshold"] = options["persistent"]
        zero |= {"sub_group_size": options["sub_group_size"]} if options["sub_group_size"] else {}
        zero |= {"zero_hpz_partition_size": ranks // on["nodes"]} if options["hpz"] else {}
        zero |= {"save_muon_momentum_buffer_in_memory": True} if options["momentum_in_memory"] else {}
    if options["offload"]:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // data_parallel // options["accumulation"],
        "gradient_accumulation_steps": options["accumulation"],
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0 if options["clipping"] else 0.0,
        "zero_optimization": zero,
        "checkpoint": {
            "load_universal": universal,
            **({"writer": options["writer"]} if options["writer"] else {}),
        },
    }
    if options["dtype"] == "bf16":
        config["bf16"] = {"enabled": True}
    if options["dtype"] == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 24 if options["overflow"] else 4, "hysteresis": 1}
    if options["fp32_gradients"]:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if options["warm_up"]:
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
    mpu = groups_of_sequences() if options["sequences"] and ranks % 2 == 0 else None
    if options["tp"] > 1:
        model.cut(mpu := groups_of_slices(options["tp"]))
    return deepspeed.initialize(model=model, config=config, mpu=mpu, **optimizer(model, options, config))[0]


@functools.cache
def groups_of_sequences() -> Any:
    """Make pairs of ranks share sequences, as in DeepSpeed's ALST. DeepSpeed before 0.17 does not support this."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    parallel_state_sp.initialize_sequence_parallel(2)
    return parallel_state_sp


@functools.cache
def groups_of_slices(size: int) -> Any:
    """Create the groups of tensor-parallel ranks as Megatron-DeepSpeed does."""
    topology = PipeModelDataParallelTopology(num_pp=1, num_mp=size, num_dp=dist.get_world_size() // size)
    return PipelineParallelGrid(topology=topology)


def train(run: Any, options: Options, first: int, steps: int) -> list[float]:
    """Train, and return the mean loss of each step."""
    if options["pipeline"]:
        return train_pipeline(run, options, first, steps)
    rank, ranks, count = dist.get_rank(), dist.get_world_size(), options["accumulation"]
    if options["tp"] > 1:
        rank, ranks = run.mpu.get_data_parallel_rank(), run.mpu.get_data_parallel_world_size()
    dtype, losses = next(run.module.parameters()).dtype, []
    for step in range(first, first + steps):
        total = torch.zeros(())
        for part in samples(step, dtype).chunk(ranks)[rank].chunk(count):
            of_part = loss(run(part))
            run.backward(of_part)
            with torch.no_grad():
                run.step()
            total += of_part.detach() / count
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def train_pipeline(run: Any, options: Options, first: int, steps: int) -> list[float]:
    rank, ranks = run.grid.get_data_parallel_rank(), run.grid.get_data_parallel_world_size()
    dtype, losses = next(run.module.parameters()).dtype, []
    for step in range(first, first + steps):
        own = samples(step, dtype).chunk(ranks)[rank].chunk(options["accumulation"])
        losses.append(float(run.train_batch(iter([(part, part) for part in own]))))
    return losses


def samples(step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(SAMPLES, Model.HIDDEN, generator=torch.Generator().manual_seed(step)).to(dtype)
