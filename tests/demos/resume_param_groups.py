"""resume with a new rate, and with a decoupled one"""

from pathlib import Path
from typing import Any

from trainers import megatron_training as mt

FORMAT = "fully_reshardable"
PLAIN = {"lr": 1e-3, "min_lr": 1e-4}
DECOUPLED = {**PLAIN, "decoupled_lr": 5e-4, "decoupled_min_lr": 5e-5}
OTHER = {"lr": 5e-4, "min_lr": 1e-5}


def resumes(rank: int, folder: Path) -> str:
    mt.use_inner_optimizer("fused")
    own = "another group's learning rate after the load" if resumed(DECOUPLED, DECOUPLED, folder / "own") else ""
    return own or ("other states after the load" if "states" in resumed(PLAIN, OTHER, folder / "other") else "")


def resumed(saved: dict[str, float], loaded: dict[str, float], checkpoint: Path) -> list[str]:
    """What differs after the load: "states", "rates" or both."""
    model, optimizer = mt.build(settings=saved, make_model=with_embedding)
    mt.step(model, optimizer, 0)
    mt.save(FORMAT, model, optimizer, checkpoint)
    new, of_new = mt.build(settings=loaded, make_model=with_embedding)
    mt.load(FORMAT, new, of_new, checkpoint)
    same = mt.equal(mt.everything(model, optimizer), mt.everything(new, of_new))
    return ["states"] * (not same) + ["rates"] * (rates(model, optimizer) != rates(new, of_new))


def with_embedding(*args: Any) -> Any:
    model = mt.tiny_model(*args)
    model.a.weight.is_embedding_or_output_parameter = True
    return model


def rates(model: Any, optimizer: Any) -> dict[str, float]:
    """Each parameter's maximum learning rate."""
    places = mt.inner(optimizer).model_param_group_index_map
    return {name: optimizer.param_groups[places[p][0]]["max_lr"] for name, p in model.named_parameters()}


if __name__ == "__main__":
    mt.show_result(resumes, 1, "each group resumes with its own settings", raises="KeyError")
