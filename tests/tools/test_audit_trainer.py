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
from dcp_checkpoints import saved
from every_checkpoint import EVERY
from test_audit_safetensors import names, written

ONE, ADAPTER, STATE = "model.safetensors", "adapter_model.safetensors", "trainer_state.json"
RANDOM = {"python": (3, (1, 2), None), "cpu": torch.get_rng_state()}
Change = Callable[[Path], object]


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


def remove(name: str) -> Change:
    return lambda path: (path / name).unlink()


def remove_random_states(path: Path) -> None:
    for own in path.glob("rng*"):
        own.unlink()


def cut(name: str) -> Change:
    return lambda path: os.truncate(path / name, (path / name).stat().st_size // 2)


def earlier(*files: str) -> Change:
    """Take files from the save before."""
    return lambda path: [shutil.copy(path.with_name("checkpoint-2") / name, path / name) for name in files]


def state(text: str) -> Change:
    return lambda path: (path / STATE).write_text(text)


def zeros(share: float) -> Change:
    def change(path: Path) -> None:
        data = (path / ONE).read_bytes()
        (path / ONE).write_bytes(data[: int(len(data) * share)].ljust(len(data), b"\0"))

    return change


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sound_one_is_whole(optimizer: str, dtype: torch.dtype, ranks: int, tmp_path: Path) -> None:
    report = audit(run(tmp_path, optimizer=optimizer, dtype=dtype, ranks=ranks))
    assert (report.verdict, names(report)) == (WHOLE, set())


DAMAGES: dict[str, tuple[Change, str, set[str]]] = {
    "no state of the Trainer": (remove(STATE), INCOMPLETE, {"incomplete_save"}),
    "an empty state": (state(""), DAMAGED, {"bad_metadata"}),
    "a state that is cut": (cut(STATE), DAMAGED, {"bad_metadata"}),
    "a state without a step": (state("{}"), DAMAGED, {"bad_metadata"}),
    "a state of a negative step": (state('{"global_step": -1}'), DAMAGED, {"bad_metadata"}),
    "a state that is a list": (state("[4]"), DAMAGED, {"bad_metadata"}),
    "a state of the save before": (earlier(STATE), DAMAGED, {"mixed_steps", "unusual"}),
    "no scheduler": (remove("scheduler.pt"), DAMAGED, {"missing_state"}),
    "a scheduler that is cut": (cut("scheduler.pt"), DAMAGED, {"bad_file"}),
    "a scheduler of the save before": (earlier("scheduler.pt"), UNKNOWN, {"unusual"}),
    "no optimizer": (remove("optimizer.pt"), DAMAGED, {"missing_state"}),
    "an optimizer of the save before": (earlier("optimizer.pt"), DAMAGED, {"mixed_steps", "unusual"}),
    "both of the save before": (earlier("optimizer.pt", "scheduler.pt"), UNKNOWN, {"unusual"}),
    "no random state": (remove_random_states, UNKNOWN, {"unusual"}),
    "no random state of a rank": (remove("rng_state_1.pth"), DAMAGED, {"missing_rank"}),
    "no random state of the first rank": (remove("rng_state_0.pth"), UNKNOWN, {"unusual"}),
    "no weights": (remove(ONE), DAMAGED, {"missing_weight"}),
    "zeros in the second half": (zeros(0.5), DAMAGED, {"bad_file"}),
    "zeros in the last third": (zeros(0.67), DAMAGED, {"bad_file"}),
}


@pytest.mark.parametrize(("change", "verdict", "expected"), DAMAGES.values(), ids=DAMAGES)
def test_missing_files_and_files_of_another_save_are_found(
    change: Change, verdict: str, expected: set[str], tmp_path: Path
) -> None:
    path = run(tmp_path, ranks=3)
    change(path)
    report = audit(path)
    assert (report.verdict, names(report)) == (verdict, expected)


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
    assert (audit(path).verdict, names(audit(path))) == (WHOLE, set())


def test_the_number_of_ranks_is_in_no_file(tmp_path: Path) -> None:
    """A run on one rank has a file without a number; else the highest ranks' files can be missing."""
    path = run(tmp_path, ranks=3)
    remove("rng_state_2.pth")(path)
    assert audit(path).verdict == WHOLE
    remove("rng_state_1.pth")(path)
    assert (audit(path).verdict, names(audit(path))) == (UNKNOWN, {"unusual"})


def test_a_file_of_weights_of_the_save_before_cannot_be_found(tmp_path: Path) -> None:
    """Weights state no step: docs/guides/fsdp.md names this one as undetectable."""
    path = run(tmp_path)
    earlier(ONE)(path)
    assert audit(path).verdict == WHOLE


@pytest.mark.parametrize("optimizer", ["SGD", "Adafactor"])
def test_an_optimizer_without_adams_states_is_of_the_save_before(optimizer: str, tmp_path: Path) -> None:
    """SGD has no steps: the learning rate is the scheduler's of the save before."""
    path = run(tmp_path, optimizer=optimizer)
    earlier("optimizer.pt")(path)
    assert audit(path).verdict != WHOLE


@pytest.mark.parametrize(("fp16", "verdict"), [(None, WHOLE), (True, WHOLE), (False, UNKNOWN)])
def test_fp16_skips_steps(fp16: bool | None, verdict: str, tmp_path: Path) -> None:
    """In fp16 optimizer and scheduler can be some steps behind the Trainer; in no other type."""
    path = run(tmp_path, fp16=fp16)
    earlier("optimizer.pt", "scheduler.pt")(path)
    assert audit(path).verdict == verdict


def test_a_scheduler_of_evaluations_counts_no_steps(tmp_path: Path) -> None:
    path = run(tmp_path)
    own = torch.optim.lr_scheduler.ReduceLROnPlateau(OPTIMIZERS["SGD"]([torch.nn.Parameter(torch.ones(1))]))
    own.step(1.0)
    torch.save({**own.state_dict(), "_last_lr": []}, path / "scheduler.pt")
    assert audit(path).verdict == WHOLE


def test_a_save_of_the_model_alone(tmp_path: Path) -> None:
    path = run(tmp_path)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (path / name).unlink()
    assert audit(path).verdict == WHOLE
    (path / STATE).unlink()
    assert (audit(path).verdict, names(audit(path))) == (UNKNOWN, {"unusual"})
    exported = path.rename(path.with_name("exported"))
    assert audit(exported).verdict == WHOLE


# With DeepSpeed: the optimizer, and often the weights, in a folder below


@pytest.fixture
def of_deepspeed(tmp_path: Path) -> Path:
    path = run(tmp_path, ranks=2)
    (path / "optimizer.pt").unlink()
    inner = EVERY["stage 2"].path
    shutil.copytree(inner, path / "global_step4")
    for rank in range(2, len(list(inner.glob("*optim_states.pt")))):
        shutil.copy(path / "rng_state_0.pth", path / f"rng_state_{rank}.pth")
    (path / "latest").write_text("global_step4")
    return path


OUTSIDE = {name: DAMAGES[name] for name in DAMAGES if "optimizer" not in name and "save before" not in name}
OUTSIDE["no random state of the last rank"] = (remove("rng_state_7.pth"), DAMAGED, {"missing_rank"})
OUTSIDE["a state of another step"] = (state('{"global_step": 900}'), DAMAGED, {"mixed_steps", "unusual"})
del OUTSIDE["no scheduler"]  # which DeepSpeed can have instead
del OUTSIDE["no weights"]  # which are below


@pytest.mark.parametrize("weights", [True, False])
def test_a_sound_one_of_deepspeed_is_whole(of_deepspeed: Path, weights: bool) -> None:
    if not weights:
        (of_deepspeed / ONE).unlink()
    assert (audit(of_deepspeed).verdict, names(audit(of_deepspeed))) == (WHOLE, set())


@pytest.mark.parametrize(("change", "verdict", "expected"), OUTSIDE.values(), ids=OUTSIDE)
def test_the_files_beside_deepspeeds_folder_are_judged(
    of_deepspeed: Path, change: Change, verdict: str, expected: set[str]
) -> None:
    change(of_deepspeed)
    report = audit(of_deepspeed)
    assert (report.verdict, names(report)) == (verdict, expected)


# With FSDP: folders of torch.distributed.checkpoint


@pytest.fixture
def of_fsdp(tmp_path: Path) -> Path:
    path = Path(shutil.copytree(saved() / "folders", tmp_path / "checkpoint-3"))
    torch.save({"last_epoch": 3, "_step_count": 4}, path / "scheduler.pt")
    for rank in range(4):
        torch.save(RANDOM, path / f"rng_state_{rank}.pth")
    (path / STATE).write_text('{"global_step": 3}')
    return path


def test_the_files_beside_fsdps_folders_are_judged(of_fsdp: Path) -> None:
    assert (audit(of_fsdp).verdict, names(audit(of_fsdp))) == (WHOLE, set())
    for name, expected in (
        (STATE, {"incomplete_save"}),
        ("scheduler.pt", {"missing_state"}),
        ("rng_state_3.pth", {"missing_rank"}),
    ):
        kept = (of_fsdp / name).rename(of_fsdp.parent / name)
        assert names(audit(of_fsdp)) == expected
        kept.rename(of_fsdp / name)
    state('{"global_step": 2}')(of_fsdp)
    assert names(audit(of_fsdp)) == {"mixed_steps", "unusual"}


# Weights without elements


def lora(sizes: Callable[[int], int] = lambda number: 16) -> dict[str, torch.Tensor]:
    found = {}
    for number in range(2):
        for letter in "AB":
            name = f"base_model.model.layers.{number}.q_proj.lora_{letter}.weight"
            found[name] = torch.zeros(0) if not sizes(number) else torch.randn(4, 16)
    return found


@pytest.mark.parametrize("beside", ["alone", "optimizer.pt", "global_step4"])
@pytest.mark.parametrize(
    "tensors", [{}, lora(lambda _: 0), lora(lambda n: n)], ids=["none", "all of [0]", "some of [0]"]
)
def test_weights_without_elements_are_damage(beside: str, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """A placeholder of ZeRO-3 in place of a weight, and a file without any, are damage whatever lies beside them."""
    path = run(tmp_path)
    (path / ONE).unlink()
    if beside == "alone":
        shutil.rmtree(path)
        path.mkdir()
    elif beside != "optimizer.pt":
        (path / "optimizer.pt").unlink()
        shutil.copytree(EVERY["stage 2"].path, path / beside)
        for rank in range(8):
            shutil.copy(path / "rng_state.pth", path / f"rng_state_{rank}.pth")
        (path / "rng_state.pth").unlink()
    written(path / ADAPTER, lora())
    assert beside != "alone" or audit(path).verdict == WHOLE
    written(path / ADAPTER, tensors)
    report = audit(path)
    assert (report.verdict, names(report) - {"unusual"}) == (DAMAGED, {"missing_weight"})
    torch.save(tensors, path / "adapter_model.bin")
    (path / ADAPTER).unlink()
    assert "missing_weight" in names(audit(path))


def test_buffers_and_other_zeros_are_no_damage(tmp_path: Path) -> None:
    """Observers have no elements before they see data; a new adapter's last matrix is zeros, as a norm can be."""
    written(tmp_path / ONE, {"a.min_val": torch.zeros(0), "a.weight": torch.ones(4, 4)})
    assert audit(tmp_path).verdict == WHOLE
    written(tmp_path / ONE, {**lora(), "z.lora_B.weight": torch.zeros(8, 8)})
    assert audit(tmp_path).verdict == WHOLE
    written(tmp_path / ONE, {"layers.0.weight": torch.ones(8, 8), "norm.weight": torch.zeros(8)})
    assert audit(tmp_path).verdict == WHOLE
    written(
        tmp_path / ONE, {"a.weight": torch.ones(8, 8), "head.bias": torch.zeros(8), "head.weight": torch.zeros(8, 8)}
    )
    assert (audit(tmp_path).verdict, names(audit(tmp_path))) == (UNKNOWN, {"unusual"})


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


def test_accelerates_files(tmp_path: Path) -> None:
    path = accelerate(tmp_path / "state", 3)
    assert (audit(path).verdict, names(audit(path))) == (WHOLE, set())
    (path / "random_states_1.pkl").rename(tmp_path / "kept")
    assert names(audit(path)) == {"missing_rank"}
    (tmp_path / "kept").rename(path / "random_states_1.pkl")
    (path / "optimizer.bin").rename(path / "optimizer_1.bin")
    assert names(audit(path)) == {"missing_state"}
    (path / "optimizer_1.bin").unlink()
    assert names(audit(path)) == {"missing_state"}
    (path / "pytorch_model").mkdir()  # DeepSpeed's
    assert audit(path).verdict == WHOLE


def test_weights_in_folders_of_models(tmp_path: Path) -> None:
    """Diffusers has a folder for each model, and peft one for each adapter with a name."""
    path = accelerate(tmp_path / "state", 1)
    weights = path / ONE
    weights.rename(tmp_path / ONE)
    assert names(audit(path)) == {"missing_weight"}
    (path / "unet").mkdir()
    (tmp_path / ONE).rename(path / "unet" / "diffusion_pytorch_model.safetensors")
    assert audit(path).verdict == audit(path / "unet").verdict == WHOLE


# Links


def test_links_within_hugging_faces_cache_are_followed(tmp_path: Path) -> None:
    model = tmp_path / "models--org--name"
    snapshot = model / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir()
    written(model / "blobs" / "4567", {"weight": torch.ones(4)})
    (snapshot / ONE).symlink_to("../../blobs/4567")
    assert audit(snapshot).verdict == WHOLE
    (model / "blobs" / "4567").rename(tmp_path / "elsewhere")
    (snapshot / ONE).unlink()
    (snapshot / ONE).symlink_to(tmp_path / "elsewhere")
    assert audit(snapshot).verdict == UNKNOWN


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
    assert (audit(path).verdict, names(audit(path))) == (WHOLE, set())
    own = {own.name for own in run(tmp_path / "here").iterdir()}
    assert own <= {own.name for own in path.iterdir()}
    for name in ("no state of the Trainer", "no scheduler", "no optimizer", "an optimizer of the save before"):
        copy = Path(shutil.copytree(path, tmp_path / name / path.name))
        shutil.copytree(tmp_path / "checkpoint-2", tmp_path / name / "checkpoint-2")
        DAMAGES[name][0](copy)
        assert audit(copy).verdict == DAMAGES[name][1]
