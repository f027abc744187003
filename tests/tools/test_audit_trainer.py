"""Folders as Transformers' Trainer and Accelerate save them: which files are missing, or of another save."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_patches.audit.audit import DAMAGED, INCOMPLETE, UNKNOWN, WHOLE, audit
from crafted_files import Change, both, change, found_in, names, without
from dcp_checkpoints import saved
from every_checkpoint import EVERY, in_torch_file, put
from test_audit_safetensors import written

ONE, ADAPTER, STATE = "model.safetensors", "adapter_model.safetensors", "trainer_state.json"
RANDOM = {"python": (3, (1, 2), None), "cpu": torch.get_rng_state()}
Damage = tuple[Change, str, set[str]]


class TrainingArguments:
    """An object as Trainer saves it; old ones have no `fp16`."""

    def __init__(self, fp16: bool | None) -> None:
        if fp16 is not None:
            self.fp16 = fp16


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down_proj = torch.nn.Linear(24, 12)
        self.input_layernorm = torch.nn.LayerNorm(12)
        self.up_proj = torch.nn.Linear(12, 24)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states + self.down_proj(self.up_proj(self.input_layernorm(states)).tanh())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "beta1 of 0": lambda params: torch.optim.AdamW(params, lr=1e-2, betas=(0.0, 0.99)),
}


def run(
    folder: Path,
    *,
    optimizer: str = "AdamW",
    dtype: torch.dtype = torch.float32,
    ranks: int = 1,
    fp16: bool | None = False,
) -> Path:
    """A run of a Trainer with `checkpoint-2` and `checkpoint-4`; returns the latter."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(), Block()).to(dtype)
    own = OPTIMIZERS[optimizer](model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(own, lambda step: 1 / (step + 1))
    for step in range(1, 5):
        model(torch.randn(8, 12, dtype=dtype)).square().mean().backward()
        own.step()
        scheduler.step()
        own.zero_grad()
        if step % 2 == 0:
            path = folder / f"checkpoint-{step}"
            path.mkdir(parents=True)
            written(path / ONE, dict(sorted(model.state_dict().items())))
            torch.save(TrainingArguments(fp16), path / "training_args.bin")
            torch.save(own.state_dict(), path / "optimizer.pt")
            torch.save(scheduler.state_dict(), path / "scheduler.pt")
            for rank in range(ranks):
                torch.save(RANDOM, path / (f"rng_state_{rank}.pth" if ranks > 1 else "rng_state.pth"))
            (path / STATE).write_text(json.dumps({"global_step": step, "epoch": 1.0, "log_history": []}))
    return path


def cut(name: str) -> Change:
    return lambda path: os.truncate(path / name, (path / name).stat().st_size // 2)


def earlier(*files: str) -> Change:
    """Take files from the save before."""
    return lambda path: [shutil.copy(path.with_name("checkpoint-2") / name, path / name) for name in files]


def state(text: str) -> Change:
    return lambda path: (path / STATE).write_text(text)


def zeros(share: float) -> Change:
    """A copy into a preallocated file that did not finish."""

    def make(path: Path) -> None:
        data = (path / ONE).read_bytes()
        (path / ONE).write_bytes(data[: int(len(data) * share)].ljust(len(data), b"\0"))

    return make


def in_optimizer(make: Callable[[Any], object], name: str = "optimizer.pt") -> Change:
    return lambda path: change(path / name, make)


def in_state(key: str, value: float | None) -> Change:
    """Set an element of a state, or half of it to zero."""

    def make(path: Path) -> None:
        place = next(p for p in in_torch_file(path / "optimizer.pt") if p.name == f"state.0.{key}")
        put(place, bytes(place.nbytes // 2) if value is None else torch.tensor(value).numpy().tobytes())

    return make


def of_another_model(value: Any) -> None:
    value["state"][0].update(dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.ones(5, 5)))


def no_state(value: Any) -> None:
    value["state"].clear()


SUSPECT = (UNKNOWN, {"unusual"})
DAMAGES: dict[str, Damage] = {
    "no state of the Trainer": (without(STATE), INCOMPLETE, {"incomplete_save"}),
    "an empty state": (state(""), DAMAGED, {"bad_metadata"}),
    "a state that is cut": (cut(STATE), DAMAGED, {"bad_metadata"}),
    "a state without a step": (state("{}"), DAMAGED, {"bad_metadata"}),
    "a state of a negative step": (state('{"global_step": -1}'), DAMAGED, {"bad_metadata"}),
    "a state that is a list": (state("[4]"), DAMAGED, {"bad_metadata"}),
    "a state of the save before": (earlier(STATE), DAMAGED, {"mixed_steps", "unusual"}),
    "no scheduler": (without("scheduler.pt"), DAMAGED, {"missing_state"}),
    "a scheduler that is cut": (cut("scheduler.pt"), DAMAGED, {"bad_file"}),
    "a scheduler of the save before": (earlier("scheduler.pt"), *SUSPECT),
    "no optimizer": (without("optimizer.pt"), DAMAGED, {"missing_state"}),
    "an optimizer of the save before": (earlier("optimizer.pt"), DAMAGED, {"mixed_steps", "unusual"}),
    "both of the save before": (earlier("optimizer.pt", "scheduler.pt"), *SUSPECT),
    "no random state": (without("rng*"), *SUSPECT),
    "no random state of a rank": (without("rng_state_1.pth"), DAMAGED, {"missing_rank"}),
    "no random state of the first rank": (without("rng_state_0.pth"), *SUSPECT),
    # A run on one rank has a file without a number; the number of ranks is in no file.
    "no random state of the last rank": (without("rng_state_2.pth"), WHOLE, set()),
    "one of three random states": (without("rng_state_[12].pth"), *SUSPECT),
    "no weights": (without(ONE), DAMAGED, {"missing_weight"}),
    "weights of the save before": (earlier(ONE), WHOLE, set()),  # undetectable: docs/reference/findings.md
    "zeros in the second half": (zeros(0.5), DAMAGED, {"bad_file"}),
    "zeros in the last third": (zeros(0.67), DAMAGED, {"bad_file"}),
    "NaN": (in_state("exp_avg", torch.nan), DAMAGED, {"not_finite"}),
    "a negative square": (in_state("exp_avg_sq", -1.0), DAMAGED, {"negative_square"}),
    "lost squares": (in_state("exp_avg_sq", None), DAMAGED, {"lost_moment"}),
    "a state of no group": (
        in_optimizer(lambda value: value["state"].update({99: value["state"][0]})),
        DAMAGED,
        {"contradiction", "unusual"},
    ),
    "no state in the optimizer": (in_optimizer(no_state), DAMAGED, {"mixed_steps"}),
    "states of another model": (in_optimizer(of_another_model), DAMAGED, {"foreign_file", "unusual"}),
    "only the model": (without("optimizer.pt", "scheduler.pt", "rng*"), WHOLE, set()),
    "only the model, no state of the Trainer": (without("optimizer.pt", "scheduler.pt", "rng*", STATE), *SUSPECT),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_missing_files_and_files_of_another_save_are_found(what: str, tmp_path: Path) -> None:
    make, verdict, expected = DAMAGES[what]
    path = run(tmp_path, ranks=3)
    make(path)
    assert found_in(path) == (verdict, expected)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("dtype", "ranks"), [(torch.float32, 2), (torch.bfloat16, 1)])
def test_a_sound_one_is_whole(optimizer: str, dtype: torch.dtype, ranks: int, tmp_path: Path) -> None:
    path = run(tmp_path, optimizer=optimizer, dtype=dtype, ranks=ranks)
    assert found_in(path) == (WHOLE, set())
    earlier("optimizer.pt")(path)  # SGD has no steps: the learning rate is the scheduler's of the save before
    assert found_in(path)[0] != WHOLE


def test_a_save_before_the_first_step_is_whole(tmp_path: Path) -> None:
    path = run(tmp_path / "run")
    in_optimizer(no_state)(path)
    change(path / "scheduler.pt", lambda value: value.update(last_epoch=0))
    state('{"global_step": 0}')(path)
    assert found_in(path.rename(tmp_path / "checkpoint-0")) == (WHOLE, set())


FURTHER: dict[str, Callable[[Any], dict[str, Any]]] = {
    "a matrix for each dimension": lambda own: {f"pre_cond_{n}": torch.ones(s, s) for n, s in enumerate(own.shape)},
    "moments in another basis": lambda own: {"exp_avg": own, "exp_avg_sq": torch.zeros_like(own), "Q": [own]},
    "a second moment of one number": lambda own: {"exp_avg": own, "exp_avg_sq": own.square().mean()},
    "chosen elements": lambda own: {"exp_avg": own.flatten()[::2].clone(), "mask": own > 0},
}


@pytest.mark.parametrize("further", FURTHER.values(), ids=FURTHER)
def test_states_of_other_optimizers_are_no_damage(further: Callable[[Any], dict[str, Any]], tmp_path: Path) -> None:
    """The states of Shampoo, SOAP, Amos and SPAM, and a step that is counted from 1."""
    path = run(tmp_path, optimizer="SGD")
    value = torch.load(path / "optimizer.pt")
    weights = [tensor for _, tensor in Block().named_parameters()] * 2
    value["state"] = {n: {"step": 5, **further(torch.randn(own.shape))} for n, own in enumerate(weights)}
    torch.save(value, path / "optimizer.pt")
    assert found_in(path) == (WHOLE, set())


@pytest.mark.parametrize(("fp16", "verdict"), [(None, WHOLE), (True, WHOLE), (False, UNKNOWN)])
def test_fp16_skips_steps(fp16: bool | None, verdict: str, tmp_path: Path) -> None:
    """In fp16 optimizer and scheduler can be some steps behind the Trainer; in no other type."""
    path = run(tmp_path, fp16=fp16)
    earlier("optimizer.pt", "scheduler.pt")(path)
    assert found_in(path)[0] == verdict


def test_what_is_no_trainers_save(tmp_path: Path) -> None:
    """A scheduler of evaluations counts no steps; an exported model has no state of the Trainer."""
    path = run(tmp_path)
    own = torch.optim.lr_scheduler.ReduceLROnPlateau(OPTIMIZERS["SGD"]([torch.nn.Parameter(torch.ones(1))]))
    own.step(1.0)
    torch.save({**own.state_dict(), "_last_lr": []}, path / "scheduler.pt")
    assert found_in(path)[0] == WHOLE
    without("optimizer.pt", "scheduler.pt", "rng*", STATE)(path)
    assert found_in(path.rename(path.with_name("exported")))[0] == WHOLE


# With DeepSpeed: the optimizer, and often the weights, in a folder below


@pytest.fixture
def of_deepspeed(tmp_path: Path) -> Path:
    path = run(tmp_path, ranks=8)
    (path / "optimizer.pt").unlink()
    shutil.copytree(EVERY["stage 2"].path, path / "global_step4")
    (path / "latest").write_text("global_step4")
    return path


NOT_OUTSIDE = ("optimizer", "save before", "NaN", "square", "states of", "a state of no", "no scheduler", "no weights")
OUTSIDE = {name: own for name, own in DAMAGES.items() if not any(part in name for part in (*NOT_OUTSIDE, "only"))}
OUTSIDE |= {
    "no random state of the last rank": (without("rng_state_7.pth"), DAMAGED, {"missing_rank"}),
    "one of three random states": (without("rng_state_[1-7].pth"), DAMAGED, {"missing_rank"}),
    "a state of another step": (state('{"global_step": 900}'), DAMAGED, {"mixed_steps", "unusual"}),
    "no scheduler, which DeepSpeed can have": (without("scheduler.pt"), WHOLE, set()),
    "weights below": (without(ONE), WHOLE, set()),
}


@pytest.mark.parametrize("what", OUTSIDE)
def test_the_files_beside_deepspeeds_folder_are_judged(of_deepspeed: Path, what: str) -> None:
    make, verdict, expected = OUTSIDE[what]
    make(of_deepspeed)
    assert found_in(of_deepspeed) == (verdict, expected)


# With FSDP: folders of torch.distributed.checkpoint


FSDP: dict[str, tuple[Change, set[str]]] = {
    "sound": (lambda path: None, set()),
    "no state": (without(STATE), {"incomplete_save"}),
    "no scheduler": (without("scheduler.pt"), {"missing_state"}),
    "no random state": (without("rng_state_3.pth"), {"missing_rank"}),
    "another step": (state('{"global_step": 2}'), {"mixed_steps", "unusual"}),
}


@pytest.mark.parametrize("what", FSDP)
def test_the_files_beside_fsdps_folders_are_judged(what: str, tmp_path: Path) -> None:
    path = Path(shutil.copytree(saved() / "folders", tmp_path / "checkpoint-3"))
    torch.save({"last_epoch": 3, "_step_count": 4}, path / "scheduler.pt")
    for rank in range(4):
        torch.save(RANDOM, path / f"rng_state_{rank}.pth")
    state('{"global_step": 3}')(path)
    make, expected = FSDP[what]
    make(path)
    assert names(audit(path)) == expected


# Weights without elements


def lora(sizes: Callable[[int], int] = lambda number: 16) -> dict[str, torch.Tensor]:
    return {
        f"base_model.model.layers.{n}.q_proj.lora_{letter}.weight": torch.randn(4, 16) if sizes(n) else torch.zeros(0)
        for n in range(2)
        for letter in "AB"
    }


@pytest.mark.parametrize("beside", ["alone", "optimizer.pt", "global_step4"])
@pytest.mark.parametrize(
    "tensors", [{}, lora(lambda _: 0), lora(lambda n: n)], ids=["none", "all of [0]", "some of [0]"]
)
def test_weights_without_elements_are_damage(beside: str, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """A placeholder of ZeRO-3 in place of a weight, and a file without any, are damage whatever lies beside them."""
    path = run(tmp_path, ranks=8 if beside == "global_step4" else 1)
    without(ONE)(path)
    if beside == "alone":
        without("*")(path)
    elif beside != "optimizer.pt":
        without("optimizer.pt")(path)
        shutil.copytree(EVERY["stage 2"].path, path / beside)
    written(path / ADAPTER, lora())
    assert beside != "alone" or found_in(path)[0] == WHOLE
    written(path / ADAPTER, tensors)
    verdict, found = found_in(path)
    assert (verdict, found - {"unusual"}) == (DAMAGED, {"missing_weight"})
    torch.save(tensors, path / "adapter_model.bin")
    (path / ADAPTER).unlink()
    assert "missing_weight" in found_in(path)[1]


# Accelerate


def accelerate(path: Path, ranks: int) -> Path:
    folder = run(path.with_name("run"))
    path.mkdir()
    shutil.copy(folder / ONE, path)
    shutil.copy(folder / "optimizer.pt", path / "optimizer.bin")
    torch.save({"last_epoch": 4 * ranks}, path / "scheduler.bin")  # which steps once for each rank
    for rank in range(ranks):
        torch.save({"step": 4, "torch_manual_seed": torch.get_rng_state()}, path / f"random_states_{rank}.pkl")
    return path


def with_weights_of_torch(path: Path) -> None:
    weights = torch.nn.Sequential(Block(), Block()).state_dict()
    torch.save(weights, path / "pytorch_model-00001-of-00001.bin")
    index = {"weight_map": dict.fromkeys(weights, "pytorch_model-00001-of-00001.bin")}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (path / ONE).unlink()


def in_a_folder_of_a_model(path: Path) -> None:
    """Diffusers has a folder for each model, and peft one for each adapter with a name."""
    (path / "unet").mkdir()
    (path / ONE).rename(path / "unet" / "diffusion_pytorch_model.safetensors")
    assert found_in(path / "unet")[0] == WHOLE


OF_ACCELERATE: dict[str, Damage] = {
    "sound": (lambda path: None, WHOLE, set()),
    "no random state of a rank": (without("random_states_1.pkl"), DAMAGED, {"missing_rank"}),
    "no random state": (without("random*"), *SUSPECT),
    "no random state and no scheduler": (without("random*", "scheduler*"), *SUSPECT),
    "no state in the optimizer": (in_optimizer(no_state, "optimizer.bin"), *SUSPECT),
    "no step yet": (
        both(
            in_optimizer(no_state, "optimizer.bin"),
            in_optimizer(lambda value: value.update(last_epoch=0), "scheduler.bin"),
        ),
        WHOLE,
        set(),
    ),
    "another optimizer": (
        lambda path: (path / "optimizer.bin").rename(path / "optimizer_1.bin"),
        DAMAGED,
        {"missing_state"},
    ),
    "no optimizer": (without("optimizer.bin"), DAMAGED, {"missing_state"}),
    "DeepSpeed's": (both(without("optimizer.bin"), lambda path: (path / "pytorch_model").mkdir()), WHOLE, set()),
    "no weights": (without(ONE), DAMAGED, {"missing_weight"}),
    "weights of torch": (with_weights_of_torch, WHOLE, set()),
    "no file of an index": (
        both(with_weights_of_torch, without("pytorch*.bin")),
        DAMAGED,
        {"bad_file"},
    ),
    "weights in folders": (in_a_folder_of_a_model, WHOLE, set()),
}


@pytest.mark.parametrize("what", OF_ACCELERATE)
def test_accelerates_files(what: str, tmp_path: Path) -> None:
    make, verdict, expected = OF_ACCELERATE[what]
    path = accelerate(tmp_path / "state", 3)
    make(path)
    assert found_in(path) == (verdict, expected)


# The real Trainer


def test_the_real_trainer(tmp_path: Path) -> None:
    """What the Trainer saves is WHOLE, and a change of it is found, as in the files that are written here."""
    transformers = pytest.importorskip(
        "transformers", reason="expected transformers and accelerate, which are no requirement"
    )
    pytest.importorskip("accelerate", reason="expected transformers and accelerate, which are no requirement")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes))
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
    options = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True}
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), **options)
    transformers.Trainer(model=model, args=arguments, train_dataset=data).train()
    path = tmp_path / "checkpoint-4"
    assert found_in(path) == (WHOLE, set())
    own = {own.name for own in run(tmp_path / "here").iterdir()}
    assert own <= {own.name for own in path.iterdir()}
    for name in ("no state of the Trainer", "no scheduler", "no optimizer", "an optimizer of the save before"):
        copy = Path(shutil.copytree(path, tmp_path / name / path.name))
        shutil.copytree(tmp_path / "checkpoint-2", tmp_path / name / "checkpoint-2")
        DAMAGES[name][0](copy)
        assert found_in(copy)[0] == DAMAGES[name][1]
