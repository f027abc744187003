"""A tiny model with the real megatron-core on CPU ranks: build it, step it, read its optimizer state."""

import contextlib
import importlib.util
import inspect
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainers import fake_gpu
from trainers.gpu import REAL_GPU, share_gpu
from trainers.keeper import fork_keeper
from trainers.ranks import free_port
from trainers.ranks import gathered as gathered
from trainers.ranks import results as run_ranks

if not REAL_GPU:
    fake_gpu.install()

import torch  # after the stub GPU is installed
import torch.distributed as dist

Model = Any
Optimizer = Any
Make = Callable[[], tuple[Model, Optimizer]]
CHECKPOINT, TRUTH = "checkpoint", "truth.pt"  # in the folder of a run


def spawn(
    worker: Callable[..., None], ranks: int, *args: object, tensor_parallel: int = 1, pipeline_parallel: int = 1
) -> None:
    """Run `worker(rank, *args)` on ranks, as `results` does, for what it prints."""
    results(worker, ranks, *args, parallel=(tensor_parallel, pipeline_parallel))


def results(worker: Callable[..., Any], ranks: int, *args: object, parallel: tuple[int, int] = (1, 1)) -> list[Any]:
    """The return values of `worker(rank, *args)`, one per rank; `parallel` is (TP, PP).

    Raises:
        RankError: a rank raised an error.
    """
    import_packages()
    return run_ranks(_start, ranks, worker, ranks, str(free_port()), parallel, *args)


def import_packages() -> None:
    """Import packages once, not on every rank."""
    import megatron.core.dist_checkpointing
    import megatron.core.optimizer  # noqa: F401
    import torch._dynamo  # else the first collective imports it on every rank

    torch.set_num_threads(1)


def fork_keeper_of_results() -> None:
    """Fork the keeper for saves in torch_dist."""
    with contextlib.suppress(ImportError):  # upstream's main may move it
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        fork_keeper(filesystem_async)


def _start(
    rank: int, worker: Callable[..., Any], ranks: int, port: str, parallel: tuple[int, int], *args: object
) -> Any:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=port, LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(ranks)
    )
    if REAL_GPU:
        torch.cuda.set_device(rank % torch.cuda.device_count())
        if ranks > torch.cuda.device_count():
            share_gpu(rank)
    fork_keeper_of_results()
    dist.init_process_group("cpu:gloo,cuda:nccl" if REAL_GPU else "gloo", rank=rank, world_size=ranks)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(*parallel)
    without_transformer_engine()
    result = worker(rank, *args)
    dist.barrier()
    if REAL_GPU:  # Gloo's of torch 2.6 can wait here for ever for its own threads
        dist.destroy_process_group()  # after an error NCCL would wait here for other ranks
    return result


def use_inner_optimizer(name: str) -> None:
    """`fused`: Apex's Adam, or the stub of Transformer Engine's; `torch`: the release's default."""
    if name == "fused" and importlib.util.find_spec("apex") is None:
        from trainers import stub_fused_adam

        stub_fused_adam.patch_megatron()


def without_transformer_engine() -> None:
    """Set a Transformer Engine version: releases compare it even if none is installed; 0.12 steps only with it."""
    import megatron.core.utils
    from packaging.version import Version

    if getattr(megatron.core.utils, "_te_version", 0) is None:
        megatron.core.utils._te_version = Version("0.0.0")
    with contextlib.suppress(ImportError):  # 0.7 to 0.9 have no such module
        from megatron.core import fp8_utils

        refused = getattr(fp8_utils, "_quantize_param_shard_impl", None)
        if refused is not None and inspect.getfullargspec(refused).varargs:
            # It raises even without any fp8 parameter.
            fp8_utils._quantize_param_shard_impl = lambda *args, **kwargs: None


def build(
    *,
    offload_fraction: float | None = None,
    precision_aware: bool = False,
    overlap: bool = False,
    native_fp32: bool = False,
    fp16: bool = False,
    bucket_size: int | None = None,
    instances: int = 1,
    make_model: Callable[[Any, torch.dtype, bool], Model] | None = None,
    settings: Mapping[str, Any] | None = None,
    overrides: Callable[[Any], Any] | None = None,
    config: Any = None,
    make_optimizer: Callable[..., Optimizer] | None = None,
) -> tuple[Model, Optimizer]:
    """The model in Megatron's DDP, and its distributed optimizer; `config` is the transformer's.

    A number as `offload_fraction` selects the hybrid optimizer. `native_fp32` adds a parameter in fp32. All parameters
    are in one bucket, unless `bucket_size` (elements) is set. `instances` of the optimizer share the data-parallel
    ranks (since 0.10). `settings` extend the optimizer's configuration; `overrides` computes overrides of single
    parameters from it (since 0.16). `make_optimizer` takes the place of Megatron's function.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = config or transformer_config(torch.float16 if fp16 else torch.bfloat16)
    dtype = config.params_dtype
    torch.manual_seed(1)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=(settings or {}).get("use_distributed_optimizer", True),
        overlap_grad_reduce=bucket_size is not None,  # no buckets without it
        grad_reduce_in_fp32=True,
        bucket_size=bucket_size,
        **({"num_distributed_optimizer_instances": instances} if instances > 1 else {}),
    )
    model = (make_model or tiny_model)(config, dtype, native_fp32).cuda()
    options: dict[str, Any] = {
        "optimizer": "adam",
        "lr": 1e-2,
        "weight_decay": 0.1,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "params_dtype": dtype,
        "clip_grad": 0.0,
        "use_distributed_optimizer": True,
    }
    if precision_aware:
        options["use_precision_aware_optimizer"] = True
        if "fp8_recipe" in OptimizerConfig.__dataclass_fields__:
            # As in Megatron-LM's arguments, with or without fp8. With None, 0.13 stores the gradients where its
            # optimizer does not find them, and never steps.
            options["fp8_recipe"] = "delayed"
    if offload_fraction is not None:
        options.update(
            optimizer_cpu_offload=True,
            optimizer_offload_fraction=offload_fraction,
            overlap_cpu_optimizer_d2h_h2d=overlap,
            use_torch_optimizer_for_cpu_offload=True,
            pin_cpu_grads=True,
            pin_cpu_params=True,
        )
    model = DistributedDataParallel(config, ddp, model)
    with contextlib.ExitStack() as stack:
        if precision_aware and offload_fraction is None:
            stack.enter_context(fused_adam_of_transformer_engine())
        if native_fp32:
            # A shard of an fp32 parameter is a view of it; torch's optimizers accept it as a leaf only without grad.
            stack.enter_context(torch.no_grad())
        chosen = OptimizerConfig(**{**options, **(settings or {})})
        more = {"config_overrides": overrides(chosen)} if overrides else {}
        return model, (make_optimizer or get_megatron_optimizer)(chosen, [model], **more)


@contextlib.contextmanager
def fused_adam_of_transformer_engine() -> Iterator[None]:
    """The precision-aware optimizer imports Transformer Engine's FusedAdam, whose installation needs a GPU."""
    from trainers import stub_fused_adam

    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers")
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[names[-1]])["FusedAdam"] = stub_fused_adam.FusedAdam
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def transformer_config(dtype: torch.dtype) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
    )


def tiny_model(config: Any, dtype: torch.dtype, native_fp32: bool, hidden: int = 33, out: int = 7) -> Model:
    """Two linear layers, 16 x hidden and hidden x out; with `native_fp32` also a scale in fp32."""
    from megatron.core.transformer.module import MegatronModule

    class Tiny(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config)
            self.a = torch.nn.Linear(16, hidden)
            self.b = torch.nn.Linear(hidden, out)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.b(torch.relu(self.a(x)))
            return out * self.scale.to(out.dtype) if native_fp32 else out

    model = Tiny().to(dtype)
    if native_fp32:
        model.scale = torch.nn.Parameter(torch.full((out,), 1.5))
    return model


def dense_and_expert(config: Any, dtype: torch.dtype, native_fp32: bool) -> Model:
    """Two linear layers, 16 x 16; the second is an expert of this expert-parallel rank."""
    from megatron.core.transformer.module import MegatronModule

    class Model(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config)
            self.dense = torch.nn.Linear(16, 16)
            self.expert = torch.nn.Linear(16, 16)
            for parameter in self.expert.parameters():
                parameter.allreduce = False  # as Megatron marks expert parameters

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.expert(self.dense(x))
            return out

    return Model().to(dtype)


def step(model: Model, optimizer: Optimizer, iteration: int) -> None:
    """One training step on a batch that depends only on the iteration."""
    generator = torch.Generator().manual_seed(100 + iteration)
    dtype = next(p.dtype for name, p in model.named_parameters() if name.endswith("a.weight"))
    x = torch.randn(4, 16, generator=generator).to(dtype).cuda()
    update(model, optimizer, lambda: model(x).float().pow(2).mean())


def update(model: Model, optimizer: Optimizer, loss: Callable[[], torch.Tensor]) -> None:
    """One training step with this loss."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    optimizer.scale_loss(loss()).backward()
    model.finish_grad_sync()
    optimizer.step()


def inner(optimizer: Optimizer) -> Optimizer:
    """The first optimizer of the chain that later releases return."""
    while hasattr(optimizer, "chained_optimizers"):
        optimizer = optimizer.chained_optimizers[0]
    return optimizer


def release() -> tuple[int, int]:
    from megatron.core import package_info

    return int(package_info.MAJOR), int(package_info.MINOR)


def named(name: str) -> str:
    """A sharding format's name in this release; it changed in 0.15."""
    former = {"dp_reshardable": "fully_sharded_bucket_space", "fully_reshardable": "fully_sharded_model_space"}
    return former.get(name, name) if release() < (0, 15) else name


def sharded_backend(name: str) -> str:
    """torch_dist, or zarr where torch_dist fails: up to 0.12 with a current torch, and for padded buckets."""
    return "zarr" if release() < (0, 13) or name == "fully_sharded_bucket_space" else "torch_dist"


def sharded_state_dict(
    name: str, model: Model, optimizer: Optimizer, *, is_loading: bool, **metadata: Any
) -> dict[str, Any]:
    """The model's weights and the optimizer's state in a sharding format; its selection changed in 0.14.

    The name `default` selects no format. `metadata` is given where a release accepts it.
    """
    of_model = model.sharded_state_dict()
    parameters = inspect.signature(inner(optimizer).sharded_state_dict).parameters
    chosen: dict[str, Any] = {"sharding_type": name}
    if "metadata" in parameters:
        chosen = {"metadata": {"distrib_optim_sharding_type": name, **metadata}}
    if name == "default":
        chosen = {}
    of_optimizer = optimizer.sharded_state_dict(of_model, is_loading=is_loading, **chosen)
    return {"model": of_model, "optimizer": of_optimizer}


def save(name: str, model: Model, optimizer: Optimizer, folder: Path) -> None:
    """Save a checkpoint in a format: `torch`, or a sharding format of the optimizer's state."""
    name = named(name)
    if name != "torch":
        write(sharded_state_dict(name, model, optimizer, is_loading=False), folder, sharded_backend(name))
        return
    make_folder(folder)
    inner(optimizer).save_parameter_state(str(folder / "distrib_optim.pt"))
    if dist.get_rank() == 0:
        torch.save({"model": weights(model), "optimizer": optimizer.state_dict()}, folder / "model_optim.pt")
    dist.barrier()


def write(state_dict: Any, folder: Path, backend: str) -> None:
    """Save a sharded checkpoint on all ranks; it is complete when any rank returns."""
    from megatron.core import dist_checkpointing

    make_folder(folder)
    dist_checkpointing.save(state_dict, str(folder), (backend, 1))
    dist.barrier()


def make_folder(folder: Path) -> None:
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()


def load(name: str, model: Model, optimizer: Optimizer, folder: Path) -> None:
    """Load in Megatron's order: build the sharded state dict, load the weights, then the optimizer's state."""
    name = named(name)
    if name != "torch":
        from megatron.core import dist_checkpointing

        loaded = dist_checkpointing.load(sharded_state_dict(name, model, optimizer, is_loading=True), str(folder))
        set_weights(model, loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        return
    # Megatron-LM trusts this file of its own training run; its content is not tested here.
    loaded = torch.load(folder / "model_optim.pt", weights_only=False)
    set_weights(model, loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    inner(optimizer).load_parameter_state(str(folder / "distrib_optim.pt"))


def saved_locally(name: str, model: Model, optimizer: Optimizer) -> Any:
    """A local checkpoint with NVRx, as its file would bring it back."""
    from megatron.core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict

    state = sharded_state_dict(name, model, optimizer, is_loading=False)
    checkpoint, _ = MCoreTensorAwareStateDict.from_state_dict(state, algo="atomic")
    tensors = [tensor.clone() for tensor in checkpoint.pop_tensors()]
    read = pickle.loads(pickle.dumps(checkpoint))
    read.insert_tensors(tensors)
    return read


def load_local(name: str, model: Model, optimizer: Optimizer, checkpoint: Any) -> None:
    loaded = checkpoint.to_state_dict(sharded_state_dict(name, model, optimizer, is_loading=True), algo="atomic")
    set_weights(model, loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])


def everything(model: Model, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Every full weight, main parameter and moment, in fp32."""
    return {**weights(model), **optimizer_state(model, optimizer)}


def weights(model: Model) -> dict[str, torch.Tensor]:
    """A copy of every parameter, in fp32, by name."""
    return {name: p.detach().float().clone() for name, p in model.named_parameters()}


def optimizer_state(model: Model, optimizer: Optimizer, group: Any = None) -> dict[str, torch.Tensor]:
    """Every parameter's full main parameter and moments, in fp32, from the shards of a group's ranks.

    A moment that does not exist is zeros.
    """
    distributed, state = inner(optimizer), {}
    for name, p in model.named_parameters():
        full = {key: torch.zeros(p.numel()) for key in ("param", "exp_avg", "exp_avg_sq")}
        if p in distributed.model_param_group_index_map:  # this rank owns a part of it
            number, order = distributed.model_param_group_index_map[p]
            main_param = distributed.optimizer.param_groups[number]["params"][order]
            own = distributed.optimizer.state.get(main_param, {})
            owned = distributed._get_model_param_range_map(p)["param"]
            found = {**own, "param": own.get("master_param", main_param)}
            for key in full.keys() & found.keys():  # before the first step there are no moments
                full[key][owned.start : owned.end] = found[key].detach().float()
        for key, tensor in full.items():
            dist.all_reduce(tensor, group=group)
            state[f"{name}.{key}"] = tensor
    return state


def set_weights(model: Model, values: dict[str, torch.Tensor]) -> None:
    for name, p in model.named_parameters():
        p.data.copy_(
            values[name].to(p.dtype)
        )  # in torch 2.15 a change of `p` itself would stop gradients of its shards


def resumed(name: str, make: Make, folder: Path, *, steps: int, inner: str = "fused", ranks: int = 2) -> str:
    """What differs when ranks save in a format and resume, in words, or "" if nothing; see `resume`."""
    return str(results(resume, ranks, name, folder, make, steps, inner)[0])


def resume(rank: int, name: str, folder: Path, make: Make, steps: int, inner: str = "fused") -> str:
    """Train `steps` steps, save in a format, load into a fresh run, and take two steps in both runs.

    Returns how many weights, main parameters and moments differ after the load, or after the steps, in words.
    """
    save_and_keep(rank, name, folder, make, steps, inner)
    return load_kept(name, folder, make, inner)


def save_and_keep(rank: int, name: str, folder: Path, make: Make, steps: int, inner: str = "fused") -> None:
    """Train `steps` steps, save, and keep the live state then and two steps later beside the checkpoint."""
    use_inner_optimizer(inner)
    model, optimizer = make()
    for iteration in range(steps):
        step(model, optimizer, iteration)
    save(name, model, optimizer, folder / CHECKPOINT)
    saved = everything(model, optimizer)
    for iteration in range(steps, steps + 2):
        step(model, optimizer, iteration)
    end = everything(model, optimizer)
    if rank == 0:
        torch.save((steps, saved, end), folder / TRUTH)
    dist.barrier()


def load_kept(name: str, folder: Path, make: Make, inner: str = "fused") -> str:
    """Load what `save_and_keep` saved, on any number of ranks. Returns what differs then, or two steps later."""
    use_inner_optimizer(inner)
    model, optimizer = make()
    load(name, model, optimizer, folder / CHECKPOINT)
    steps, saved, end = torch.load(folder / TRUTH)
    if different := how_many_differ(saved, everything(model, optimizer)):
        return different
    for iteration in range(steps, steps + 2):
        step(model, optimizer, iteration)
    return how_many_differ(end, everything(model, optimizer))


def how_many_differ(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> str:
    """How many states differ, in words, or "" if none."""
    different = [name for name, state in expected.items() if not torch.equal(state, found[name])]
    return f"{len(different)} of {len(expected)} states differ, and no error" if different else ""


def weights_lost(model: Model, optimizer: Optimizer) -> list[str]:
    """Load a model's weights. Returns those that a step at learning rate 0 changes."""
    set_weights(model, {name: torch.full_like(weight, 0.75) for name, weight in weights(model).items()})
    optimizer.reload_model_params()
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 0.0, 0.0
    step(model, optimizer, 1)
    return [name for name, weight in weights(model).items() if not bool(weight.eq(0.75).all())]


def one_weight(tensor: torch.Tensor) -> dict[str, Any]:
    """The sharded state dict of one weight."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    return {"weight": ShardedTensor.from_rank_offsets("weight", tensor)}


def scheduler(optimizer: Any, **settings: Any) -> Any:
    """Megatron's scheduler of the learning rate and the weight decay."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    plain = {
        "init_lr": 0.0, "max_lr": 1e-3, "min_lr": 0.0, "lr_warmup_steps": 0, "lr_decay_steps": 80,
        "lr_decay_style": "linear", "start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 80, "wd_incr_style": "constant",
        "use_checkpoint_opt_param_scheduler": False, "override_opt_param_scheduler": False,
    }  # fmt: skip
    return OptimizerParamScheduler(optimizer, **{**plain, **settings})
