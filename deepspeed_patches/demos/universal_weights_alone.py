"""universal load of only the weights"""

from pathlib import Path

from ckpt_patches.demo import cases, show
from ckpt_patches.demo import deepspeed_training as dt

RANKS, CASES = (2, 3), ("stage1-2", "stage2-2")
OPTIONS = ({"load_optimizer_states": False}, {"load_module_only": True})


def run(folder: Path) -> str:
    found = [
        dt.results(load, ranks, folder / case / str(ranks), case, ranks)[0]
        for ranks in cases(RANKS)
        for case in cases(CASES)
    ]
    return next(filter(None, found), "")


def load(rank: int, folder: Path, case: str, ranks: int) -> str:
    """Load only the weights into a new run. Returns wrong weights and unexpected changes, or "" if none."""
    saved, _ = dt.train_and_save(rank, folder, case, ranks)
    dt.convert(folder)
    for options in OPTIONS:
        run = dt.engine_of(case, ranks, universal=True, seed=1)
        before = dt.settings(run)
        run.load_checkpoint(str(folder), tag=dt.UNIVERSAL, **options)
        found = dt.snapshot(run)
        weights = [name for name in saved if name.endswith((".weight", ".fp32"))]
        wrong = dt.on_any_rank([name for name in weights if not dt.same(found[name], saved[name])])
        states = dt.on_any_rank([key for own in run.optimizer.optimizer.state.values() for key in own])
        if wrong or states or dt.settings(run) != before:
            return f"{next(iter(options))}: weights {wrong}, states {states} or settings are not as asked for; no error"
    return ""


if __name__ == "__main__":
    dt.allow_pickles()
    show(run, "weights and masters are loaded, and nothing else")
