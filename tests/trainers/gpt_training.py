"""Small GPTs with their optimizers and schedulers, for trainings with the real megatron-core on CPU ranks."""

import random
from typing import Any
from unittest import mock

from trainers import megatron_training as mt  # isort: skip  the GPU stub must load first
import torch
import torch.distributed as dist

Options = dict[str, Any]
VOCABULARY, SEEN, LENGTH, HIDDEN, LAYERS, EXPERTS = 64, 40, 8, 16, 2, 4
SEQUENCES = 12  # per step; divisible by 1 to 4 and 6 data-parallel ranks
RATE, DECAY = 1e-2, 0.1


def initialize(layout: Options) -> None:
    """Create Megatron's groups of ranks."""
    from megatron.core import parallel_state, tensor_parallel

    more = {"num_distributed_optimizer_instances": layout["instances"]} if layout["instances"] > 1 else {}
    parallel_state.initialize_model_parallel(
        layout["tp"],
        layout["pp"],
        expert_model_parallel_size=max(1, layout["ep"]),
        context_parallel_size=layout["cp"],
        **more,
    )
    mt.without_transformer_engine()
    mt.use_inner_optimizer(layout["inner"])
    on_cpu()
    tensor_parallel.random.initialize_rng_tracker()
    tensor_parallel.model_parallel_cuda_manual_seed(1)


class OnCpu:
    """A stub of the module torch: it has torch's functions, but tensors for the GPU are created on the CPU.

    The GPU stub is not active within a backward pass, where the ranks of experts exchange tokens.
    """

    def __getattr__(self, name: str) -> Any:
        return self if name == "cuda" else getattr(torch, name)


def on_cpu() -> None:
    """Replace what experts need from a GPU and Transformer Engine; 0.14 also looks up a function of the latter."""
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import moe_utils

    vars(moe_utils).setdefault("te_general_gemm", None)
    own = OnCpu()
    vars(own)["current_device"] = lambda: torch.device("cpu")
    vars(mappings)["torch"] = own


def gathered(
    outputs: list[torch.Tensor], own: torch.Tensor, group: Any = None, *, as_it_is: Any = dist.all_gather, **more: Any
) -> Any:
    """Gather tensors of different sizes, as NCCL does and Gloo does not."""
    if len({one.numel() for one in outputs}) == 1:
        return as_it_is(outputs, own, group=group, **more)
    for number, output in enumerate(outputs):
        rank = dist.get_global_rank(group, number)
        if rank == dist.get_rank():
            output.copy_(own)
        dist.broadcast(output, rank, group=group)
    return None


def build(options: Options, seed: int, **more: Any) -> tuple[Any, Any]:
    """Create the model under Megatron's DDP and its optimizer; `more` is for the tiny model's `build`."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[options["dtype"]]
    network = gpt(options, dtype, seed)
    if options["fsdp2"]:
        return fully_sharded(network, options)
    return mt.build(
        config=network.config,
        bucket_size=options["bucket"] or None,
        instances=options["instances"],
        offload_fraction=options["offload"],
        overlap=options["overlap"],
        precision_aware=options["precision_aware"],
        make_model=lambda config, dtype, native: network,
        settings=settings(options),
        overrides=of_mup if options["mup"] else None,
        **more,
    )


def fully_sharded(network: Any, options: Options) -> tuple[Any, Any]:
    """Shard an fp32 model by torch FSDP2 as Megatron-LM does, but on CPU ranks, and create its optimizer."""
    from megatron.core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from torch.distributed.device_mesh import DeviceMesh

    network.config.transformer_impl = "local"  # else it wraps layers in layers that are wrapped already
    on_ranks = DeviceMesh.from_group
    with mock.patch.object(DeviceMesh, "from_group", staticmethod(lambda group, _: on_ranks(group, "cpu"))):
        model = TorchFullyShardedDataParallel(network.config, DistributedDataParallelConfig(), network)
    config = OptimizerConfig(**{"params_dtype": torch.float32, **settings(options)})
    return model, get_megatron_optimizer(config, [model])


def settings(options: Options) -> Options:
    """Return the optimizer's settings."""
    found: Options = {
        "optimizer": options["algorithm"],
        "lr": rate(options),
        "min_lr": options.get("min_lr", RATE / 10),
        "weight_decay": DECAY,
        "clip_grad": 1.0 if options["clipping"] else 0.0,
        "use_distributed_optimizer": options["optimizer"] == "distributed",
        "initial_loss_scale": 2.0**32 if options["overflow"] else 16.0,
    }
    if options["decoupled_rate"]:
        found |= {"decoupled_lr": RATE / 4, "decoupled_min_lr": RATE / 40}
    return found


def rate(options: Options) -> float:
    return RATE / 2 if options.get("override") else RATE


def of_mup(config: Any) -> Any:
    from megatron.core.optimizer import get_mup_config_overrides, get_standard_config_overrides

    return {**get_standard_config_overrides(config), **get_mup_config_overrides(config, 4.0, config.optimizer)}


def scheduler(optimizer: Any, options: Options) -> Any:
    return mt.scheduler(
        optimizer, max_lr=rate(options), min_lr=RATE / 10, lr_warmup_steps=2 * SEQUENCES,
        lr_decay_steps=20 * SEQUENCES, start_wd=DECAY, end_wd=2 * DECAY, wd_incr_steps=20 * SEQUENCES,
        wd_incr_style="linear", override_opt_param_scheduler=bool(options.get("override")),
    )  # fmt: skip


def gpt(options: Options, dtype: torch.dtype, seed: int) -> Any:
    """Create this rank's part of a GPT with two layers."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    torch.manual_seed(seed)
    random.seed(seed)
    config = transformer_config(options, dtype)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False),
        VOCABULARY,
        LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not options["untied"],
        position_embedding_type="learned_absolute" if options["learned_positions"] else "rope",
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(seed * 2.0**-8)  # else norms and biases do not depend on the seed
    model = model.to(dtype)
    for name, parameter in model.named_parameters():
        if options["fp32_norms"] and "norm" in name:
            parameter.data = parameter.data.float()
        if options["frozen"] and ("self_attention.linear_qkv" in name or "norm" in name):
            parameter.requires_grad = False
        if options["zero_initialized"] and "linear_proj" in name:
            torch.nn.init.zeros_(parameter)
    return model


def transformer_config(options: Options, dtype: torch.dtype) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    more: Options = {}
    if options["ep"]:
        more = {"num_moe_experts": options.get("experts", EXPERTS), "moe_router_topk": 2, "moe_grouped_gemm": False}
        more["sequence_parallel"] = options["tp"] > 1
    if options["gated"]:
        more |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        ffn_hidden_size=24,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        add_bias_linear=options["biases"],
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        expert_model_parallel_size=max(1, options["ep"]),
        tensor_model_parallel_size=options["tp"],
        pipeline_model_parallel_size=options["pp"],
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        persist_layer_norm=False,
        **more,
    )


def step(model: Any, optimizer: Any, number: int, *, shared: int = 0) -> float:
    """Take one step and return the mean loss of all data-parallel ranks. The tokens depend only on `number`.

    The ranks divide the sequences, or all of them have `shared` ones.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model.zero_grad_buffer()
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(100 + number)
    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    sequences = torch.randint(0, SEEN, (shared or SEQUENCES, LENGTH), generator=generator)
    tokens = (sequences if shared else sequences.chunk(ranks)[rank]).cuda()
    positions = torch.arange(LENGTH).repeat(len(tokens), 1).cuda()
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1).view(1, 1, LENGTH, LENGTH).cuda()
    losses = [torch.zeros(())]

    def mean(output: torch.Tensor) -> tuple[torch.Tensor, Options]:
        loss = output.float().mean()
        losses.append(loss.detach())
        return loss, {}

    def forward(_: Any, own: Any) -> tuple[torch.Tensor, Any]:
        return own(tokens, positions, mask, labels=tokens.roll(-1, 1)), mean

    config = model.module.config
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=None,
        model=[model],
        num_microbatches=1,
        seq_length=LENGTH * parallel_state.get_context_parallel_world_size(),  # each rank has all tokens
        micro_batch_size=len(tokens),
        forward_only=False,
    )
    optimizer.step()
    loss = torch.stack(losses).sum()
    dist.all_reduce(loss)
    return float(loss) / int(dist.get_world_size())
