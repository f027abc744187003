"""Give each optimizer the weights of its model chunks, experts included, for `--load-main-params-from-ckpt`.

https://github.com/NVIDIA/Megatron-LM/pull/3676
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import Source

fix = Fix(
    __name__,
    upstream=("https://github.com/NVIDIA/Megatron-LM/pull/3676",),
    symptom="experts train on from bf16 weights, not the fp32 ones of the checkpoint",
    releases=(("0.14.0", "0.17.1"),),
    stacks="experts, `--load-main-params-from-ckpt`",
    silent=True,
)


@fix.edit("megatron.core.optimizer.optimizer")
def follow_chunks(source: Source) -> None:
    """Dense and expert optimizers share model chunks; upstream gives each chunk to only one of them."""
    split = source.function("ChainedOptimizer._split_state_dict")
    number = "number_of[chunk]"
    to_each = "state_dicts = [state_dict] * len(self.chained_optimizers)"
    source.skip_if(
        to_each,
        "number_of = ...",
        f"offset = {number}",
        "(chunk_idx, chunk)",
        "enumerate(optimizer.model_chunks)",
        not source.has("offset += 1", within=split),
        within=split,
    )
    source.replace(source.one("state_dicts[0] = state_dict", within=split), to_each)
    source.replace(
        source.one("offset = 0", within=split),
        "number_of = {chunk: number for number, chunk in enumerate(self.model_chunks)}",
    )
    loop = source.loop("chunk_idx", within=split)
    source.replace(loop.target, "chunk_idx, chunk")
    source.replace(loop.iter, "enumerate(optimizer.model_chunks)")
    source.insert_before(loop.body[0], f"offset = {number}")
    source.remove(source.one("offset += 1", within=split))
