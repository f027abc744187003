"""Weights of few bits: NaN is found, and rounding is never called damage. And what lies beside shards in torch_dist."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_patches.audit.audit import DAMAGED, UNKNOWN, WHOLE, audit
from ckpt_patches.formats import torch_file
from crafted_files import change, copied, found_in, names
from test_audit_coverage import MODEL
from zero_checkpoints import trained

NAME = "decoder.layers.0.mlp.linear_fc1.weight"
ROWS, ROW = 48, 384
FLOATS_OF_8_BITS = [name for name in sorted(vars(torch)) if name.startswith("float8_")]
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
Make = Callable[[torch.Tensor], torch.Tensor]


@pytest.mark.parametrize("name", [*FLOATS_OF_8_BITS, "complex64", "complex128", "complex32", "float64"])
def test_nan_is_found_in_a_buffer_of_any_type_that_has_it(name: str, tmp_path: Path) -> None:
    """NaN in a buffer is damage for every dtype that has NaN, in imaginary parts too."""
    dtype = getattr(torch, name)
    odd = torch.tensor([complex(1, np.nan)]) if dtype.is_complex else torch.tensor([np.nan])
    path = copied(trained("0.16.2", "stage2")["stage2"], tmp_path)
    change(path / MODEL, lambda value: value["module"].update(buffer=torch.arange(1, 64).to(dtype)))
    assert found_in(path) == (WHOLE, set())
    change(path / MODEL, lambda value: value["module"].update(buffer=odd.to(dtype).repeat(64)))
    assert found_in(path) == (DAMAGED, {"not_finite"})


# megatron-core's torch_dist


def masters() -> torch.Tensor:
    return torch.randn(ROWS, ROW, generator=torch.Generator().manual_seed(0)) * 0.02


def scaled(values: torch.Tensor, dtype: torch.dtype, *, power_of_two: bool = False) -> torch.Tensor:
    """Quantize numbers to 8 bits with a scale for each row, and dequantize them."""
    scale = values.abs().amax(dim=-1, keepdim=True) / LARGEST[dtype]
    if power_of_two:
        scale = 2.0 ** torch.ceil(torch.log2(scale))
    return (values / scale).to(dtype).float() * scale


def of_one_scale(values: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    return scaled(values.flatten(), dtype).view(values.shape)


def of_blocks(values: torch.Tensor, size: int, *, power_of_two: bool = False) -> torch.Tensor:
    parts = scaled(values.reshape(-1, size), torch.float8_e4m3fn, power_of_two=power_of_two)
    return parts.view(values.shape).bfloat16()


def of_fp4(values: torch.Tensor) -> torch.Tensor:
    """NVFP4: blocks of 16 four-bit numbers."""
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    parts = values.reshape(-1, 16)
    scale = (parts.abs().amax(dim=1, keepdim=True) / 6).to(torch.float8_e5m2).float()
    nearest = (parts.abs() / scale).unsqueeze(-1).sub(numbers).abs().argmin(-1)
    return (numbers[nearest] * parts.sign() * scale).view(values.shape).bfloat16()


DEQUANTIZED: dict[str, Make] = {
    "one scale": lambda values: of_one_scale(values).bfloat16(),
    "one scale, fp16": lambda values: of_one_scale(values).half(),
    "one scale, fp32": of_one_scale,
    "e5m2": lambda values: of_one_scale(values, torch.float8_e5m2).bfloat16(),
    # As delayed scaling does: many numbers become denormal or zero in the dtype.
    "a margin": lambda values: ((values / 2e-2).to(torch.float8_e4m3fn).float() * 2e-2).bfloat16(),
    "scales of blocks": lambda values: of_blocks(values, 128),
    "MXFP8": lambda values: of_blocks(values, 32, power_of_two=True),
    "NVFP4": of_fp4,
}

MOMENTS = ("exp_avg", "exp_avg_sq")


def saved(path: Path, weight: torch.Tensor, master: torch.Tensor, moment: torch.Tensor | None = None) -> Path:
    """Save with torch.distributed.checkpoint in megatron-core's layout."""
    path.mkdir()
    own = master.square() + 1e-8 if moment is None else moment
    moments = {f"optimizer.state.{key}.{NAME}": own * n for n, key in enumerate(MOMENTS, 1)}
    dcp.save({NAME: weight, f"optimizer.state.param.{NAME}": master, **moments}, checkpoint_id=path, no_dist=True)
    groups = [{"lr": 1e-3, "step": 7, "betas": (0.9, 0.95), "params": [0]}]
    optimizer = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_sharded_model_space"}
    torch.save({"optimizer": optimizer}, path / "common.pt")
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return path


def test_ordinary_weights_are_compared(tmp_path: Path) -> None:
    master = masters()
    assert found_in(saved(tmp_path / "whole", master.bfloat16(), master)) == (WHOLE, set())
    stale = saved(tmp_path / "stale", masters().flip(0).bfloat16(), master)
    assert found_in(stale) == (DAMAGED, {"unrounded_master"})


@pytest.mark.parametrize("kind", DEQUANTIZED)
def test_weights_that_were_kept_in_few_bits_are_no_damage(kind: str, tmp_path: Path) -> None:
    """Dequantized weights, as megatron-core saves them in the model's dtype, are not compared, and not damage."""
    path = saved(tmp_path / "checkpoint", DEQUANTIZED[kind](masters()), masters())
    report = audit(path, workers=1)
    assert (report.verdict, names(report, notes=True)) == (WHOLE, {"few_bits"})


ZEROS = {
    "a row": (slice(640, 704), True, WHOLE, {"sparse_moment"}),
    "a row, squares of fp32": (slice(640, 704), False, DAMAGED, {"lost_moment", "sparse_moment"}),
    "a slice across rows": (slice(600, 1000), True, DAMAGED, {"lost_moment", "sparse_moment"}),
}


@pytest.mark.parametrize("zeros", ZEROS)
def test_rows_of_squares_of_8_bits_round_to_zero(zeros: str, tmp_path: Path) -> None:
    """Other squares show that they were of 8 bits: they have few significands, and zeros in many places."""
    own, of_8_bits, verdict, kinds = ZEROS[zeros]
    generator = torch.Generator().manual_seed(0)
    squares: dict[str, torch.Tensor] = {}
    for number, spread in enumerate((0.3, 4, 4)):
        square = (torch.randn(64, 64, generator=generator) * spread).exp() * 1e-8
        if number == 0:
            square.view(-1)[own] = 0
        rounded = of_one_scale(square)
        squares[f"layer{number}.weight"] = rounded if of_8_bits else square * (rounded > 0)
    report = audit(saved_by_torch(tmp_path, squares, generator), workers=1)
    assert (report.verdict, names(report, notes=True)) == (verdict, kinds)


@pytest.mark.parametrize(
    ("numel", "of_8_bits", "verdict"),
    [(64, True, WHOLE), (2048, True, WHOLE), (64, False, DAMAGED), (2048, False, DAMAGED), (43, False, WHOLE)],
)
def test_a_run_in_a_bias_is_of_rounding_only_if_that_was_of_8_bits(
    numel: int, of_8_bits: bool, verdict: str, tmp_path: Path
) -> None:
    """Six numbers, which 37 zeros leave of 43, do not tell."""
    generator = torch.Generator().manual_seed(0)
    square = (torch.randn(numel, generator=generator) * 0.3).exp() * 1e-8
    square[3:40] = 0
    moments = {"bias": of_one_scale(square) if of_8_bits else square}
    for number in range(3):
        moments[f"layer{number}.weight"] = of_one_scale((torch.randn(64, 64, generator=generator) * 4).exp() * 1e-8)
    assert audit(saved_by_torch(tmp_path, moments, generator), workers=1).verdict == verdict


def saved_by_torch(path: Path, squares: dict[str, torch.Tensor], generator: torch.Generator) -> Path:
    """Save random weights and first moments with these second moments."""
    states = {
        name: {
            "step": torch.tensor(3.0),
            "exp_avg": torch.randn(own.shape, generator=generator) * 1e-4,
            "exp_avg_sq": own,
        }
        for name, own in squares.items()
    }
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "params": [*states]}]
    model = {name: torch.randn(own.shape, generator=generator) for name, own in squares.items()}
    content = {"model": model, "optimizer": {"state": states, "param_groups": groups}}
    dcp.save(content, checkpoint_id=path, no_dist=True)
    return path


def test_ordinary_weights_of_another_step_are_unknown(tmp_path: Path) -> None:
    """Most main parameters are near to their weights and do not round to them: nothing tells which are wrong."""
    noise = torch.randn(ROWS, ROW, generator=torch.Generator().manual_seed(1))
    path = saved(tmp_path / "checkpoint", (masters() * (1 + 0.02 * noise)).bfloat16(), masters())
    assert found_in(path) == (UNKNOWN, {"other_masters"})


@pytest.mark.parametrize("kind", DEQUANTIZED)
def test_masters_of_another_model_are_told_from_the_rounding_of_few_bits(kind: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "checkpoint", DEQUANTIZED[kind](masters()), masters().flip(0) * 8)
    assert found_in(path) == (DAMAGED, {"unrounded_master"})


def test_a_lost_slice_of_masters_is_damage_beside_weights_of_8_bits(tmp_path: Path) -> None:
    lost = masters()
    lost[4:8] = 0
    verdict, found = found_in(saved(tmp_path / "checkpoint", of_one_scale(masters()).bfloat16(), lost))
    assert (verdict, "lost_master" in found) == (DAMAGED, True)


def test_few_or_equal_weights_tell_no_type(tmp_path: Path) -> None:
    """Few or equal weights that differ from their main parameters are not shown to be of 8 bits."""
    for number, shape in enumerate([(4, 8), (512,), (32, 16)]):
        path = saved(tmp_path / str(number), torch.ones(shape).bfloat16(), torch.full(shape, 1.05))
        assert found_in(path) == (UNKNOWN, {"other_masters"})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_what_is_compared_with_nothing_is_named(dtype: torch.dtype, tmp_path: Path) -> None:
    weight = (masters() / 1e-4).to(dtype)
    assert found_in(saved(tmp_path / "one", weight, masters())) == (UNKNOWN, {"not_judged"})
    weight.view(torch.uint8)[3, 5] = 0x7F  # NaN
    assert found_in(saved(tmp_path / "other", weight, masters())) == (DAMAGED, {"not_judged", "not_finite"})
    codes = torch.ones(ROWS, ROW, dtype=torch.uint8)
    assert found_in(saved(tmp_path / "codes", masters().bfloat16(), masters(), codes)) == (UNKNOWN, {"not_judged"})
    transposed = saved(tmp_path / "transposed", masters().bfloat16(), masters().T.contiguous())
    assert found_in(transposed) == (UNKNOWN, {"not_judged"})


# State that is not sharded


def test_what_torch_dist_keeps_beside_its_shards_is_judged(tmp_path: Path) -> None:
    """NaN is damage; values have infinity before they are first computed."""
    path = saved(tmp_path / "checkpoint", masters().bfloat16(), masters())
    for value, expected in ((float("inf"), (WHOLE, set())), (float("nan"), (DAMAGED, {"not_finite"}))):
        change(path / "common.pt", lambda own, value=value: own["optimizer"].update(grad_scaler=torch.tensor([value])))  # type: ignore[misc]
        assert found_in(path) == expected


def test_an_index_of_another_program_is_no_checkpoint_of_megatron(tmp_path: Path) -> None:
    path = saved(tmp_path / "checkpoint", masters().bfloat16(), masters())
    (path / "metadata.json").unlink()
    (path / "common.pt").unlink()
    assert found_in(path) == (UNKNOWN, {"not_read"})


# torch.save


class Float8Tensor:
    """A class pickled like Transformer Engine's tensors: by a class method, with codes and their scale."""

    @classmethod
    def made(cls, *args: Any) -> "Float8Tensor":
        return cls()

    def __reduce_ex__(self, protocol: Any) -> Any:
        codes = torch.arange(9, dtype=torch.uint8).view(3, 3)
        return Float8Tensor.made, (codes, torch.tensor([0.5]), torch.bfloat16, codes.shape)


def test_an_object_made_by_a_method_of_its_class_can_be_read(tmp_path: Path) -> None:
    torch.save({"weight": Float8Tensor()}, tmp_path / "state.pt")
    with pytest.raises(torch_file.UnlistedClassError):
        torch_file.read(tmp_path / "state.pt")
    value = torch_file.read(tmp_path / "state.pt", trust=True).value
    assert torch_file.instance(value["weight"], "Float8Tensor.made")
    assert [header.dtype for _, header in torch_file.tensors_in(value)] == ["uint8", "float32"]


@pytest.mark.parametrize(
    "weight",
    [Float8Tensor(), torch.ones(3, 3).to(torch.float8_e4m3fn), torch.ones(9).bfloat16()],
    ids=["Transformer Engine's", "torch's", "of another shape"],
)
def test_a_weight_of_zero_that_was_compared_with_no_master_is_named(weight: Any, tmp_path: Path) -> None:
    path = copied(trained("0.16.2", "stage2")["stage2"], tmp_path)
    change(path / MODEL, lambda value: value["module"].update({"w1.weight": weight}))
    assert found_in(path) == (UNKNOWN, {"not_judged"})
