"""DeepSpeed's checkpoints without ZeRO: `mp_rank_*_model_states.pt` hold the weights and the optimizer's state."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckpt_patches.audit import damages
from ckpt_patches.audit.damages import Finding
from ckpt_patches.audit.readers import tensor_streams
from ckpt_patches.audit.readers.checkpoint import (
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    Checkpoint,
    Shard,
    first_beta,
    last_step,
)
from ckpt_patches.formats import zero
from ckpt_patches.formats.torch_file import TensorHeader
from ckpt_patches.formats.zero_inventory import taken_steps

MOMENTS = {EXP_AVG: "exp_avg", EXP_AVG_SQ: "exp_avg_sq"}
MASTERS = ("fp32_groups_flat", "fp32_groups")  # of FP16_Optimizer and FP16_UnfusedOptimizer


def is_plain(path: Path) -> bool:
    folder = zero.look(path)
    return bool(folder.models) and not folder.optimizer


def read(path: Path) -> Checkpoint:
    """The structure of a checkpoint; what is wrong with its files is among the findings."""
    found = Checkpoint(path, "deepspeed without zero")
    folder = zero.look(path)
    steps: list[Any] = []
    for (_, model_rank), name in sorted(folder.models.items(), key=lambda item: item[1]):
        value = tensor_streams.read(path / name, found)
        if isinstance(value, dict):
            steps += _read_rank(
                found, path / name, value, f"mp_rank_{model_rank:02d}" if len(folder.models) > 1 else ""
            )
    for name in folder.names:
        if name.endswith(".pt") and name not in found.read:
            tensor_streams.read(path / name, found)
    found.step = last_step(steps)
    return found


def _read_rank(found: Checkpoint, path: Path, value: dict[str, Any], label: str) -> list[Any]:
    """One model-parallel rank; the steps that its file states."""
    stage = stage_of(value.get("ds_config"))
    if stage:
        detail = f"a save of ZeRO stage {stage} has a file of optimizer states for each rank, and none is there"
        found.findings.append(Finding(damages.INCOMPLETE_SAVE, path.name, label, detail=detail))
        return []
    optimizers = list(_optimizers(value.get("optimizer")))
    states = [state for optimizer, _ in optimizers for state in optimizer["state"].values()]
    taken = taken_steps(value)
    if taken and not any(isinstance(state, dict) and state for state in states):
        detail = f"{taken} steps were taken, and no state of an optimizer is in the file"
        found.findings.append(Finding(damages.MISSING_STATE, path.name, label, detail=detail))
    steps: list[Any] = []
    for optimizer, masters in optimizers:
        groups = [group for group in optimizer["param_groups"] if isinstance(group, dict)]
        found.beta1 = first_beta(groups)
        steps += [group["step"] for group in groups if "step" in group]
        for number, state in optimizer["state"].items():
            if isinstance(state, dict):
                steps.append(tensor_streams.scalar(path, state.get("step")))
                found.shards += _shard(found, path, label, number, state, masters)
    return steps


def stage_of(config: Any) -> int:
    """ZeRO's stage by the configuration that is saved with the model."""
    own = config.get("zero_optimization") if isinstance(config, dict) else None
    stage = own.get("stage", 0) if isinstance(own, dict) else int(own is True)
    return stage if isinstance(stage, int) and 0 <= stage <= 3 else 0


def _optimizers(value: Any) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """The state dicts of torch's form in what is saved of an optimizer, and the main parameters beside each."""
    if not isinstance(value, dict):
        return
    if isinstance(value.get("state"), dict) and isinstance(value.get("param_groups"), list):
        yield value, []
        return
    masters: list[Any] = next((value[key] for key in MASTERS if isinstance(value.get(key), list)), [])
    for inner in value.values():
        yield from ((optimizer, own or masters) for optimizer, own in _optimizers(inner))


def _shard(
    found: Checkpoint, path: Path, label: str, number: Any, state: dict[str, Any], masters: list[Any]
) -> Iterator[Shard]:
    """The arrays of one parameter, or of a group of flattened ones, that have the same number of elements."""
    name = f"optimizer.{number!s:.50}"
    tensors = {role: state.get(key) for role, key in MOMENTS.items()}
    if type(number) is int and 0 <= number < len(masters):
        tensors[MASTER] = masters[number]
    streams = {
        role: own
        for role, tensor in tensors.items()
        if (own := tensor_streams.stream(found, path, f"{name}.{role}", tensor)) is not None
    }
    sizes = {stream.numel for stream in streams.values()}
    if len(sizes) == 1:
        shape = next(t.shape for t in tensors.values() if isinstance(t, TensorHeader))
        yield Shard(name, label, shape, streams, has_rows=MASTER not in streams)
