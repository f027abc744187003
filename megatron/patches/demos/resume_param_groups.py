"""resume with another learning rate"""

from pathlib import Path

from ckpt_patches.demo import megatron_training as mt
from ckpt_patches.demo import show

FORMAT = "fully_reshardable"


def run(folder: Path) -> str:
    return str(mt.results(resume, 1, folder / "checkpoint")[0])


def resume(rank: int, checkpoint: Path) -> str:
    mt.use_inner_optimizer("fused")
    model, optimizer = mt.build(settings={"lr": 1e-3, "min_lr": 1e-4})
    mt.step(model, optimizer, 0)
    mt.save(FORMAT, model, optimizer, checkpoint)
    resumed, of_resumed = mt.build(settings={"lr": 5e-4, "min_lr": 1e-5})
    mt.load(FORMAT, resumed, of_resumed, checkpoint)
    same = mt.equal(mt.everything(model, optimizer), mt.everything(resumed, of_resumed))
    return "" if same else "other states after the load"


if __name__ == "__main__":
    show(run, "the states of each group load", raises="KeyError")
