"""Save shifted_saving.py's model in Megatron's `torch` format, on two tensor-parallel by two data-parallel ranks.

saved_in_torch.py OUT
"""

import sys
from pathlib import Path

import torch

import shifted_saving
from trainers import megatron_training as mt


def worker(rank: int, out: Path) -> None:
    from megatron.core import parallel_state

    mt.use_inner_optimizer("fused")
    model, optimizer = mt.build(make_model=shifted_saving.odd, bucket_size=300)
    shifted_saving.step(model, optimizer)
    folder = out / f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02}"
    if parallel_state.get_data_parallel_rank() == 0:
        folder.mkdir()
        torch.save({"model": mt.weights(model), "optimizer": optimizer.state_dict()}, folder / "model_optim_rng.pt")
    mt.inner(optimizer).save_parameter_state(str(folder / "distrib_optim.pt"))


if __name__ == "__main__":
    mt.spawn(worker, 4, Path(sys.argv[1]), tensor_parallel=2)
