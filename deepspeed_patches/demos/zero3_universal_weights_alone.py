"""universal load of only the weights, ZeRO-3"""

from pathlib import Path

from ckpt_patches.demo import cases, show
from ckpt_patches.demo import deepspeed_training as dt

RANKS, CASE = (2, 3), "stage3-1"
OPTIONS = ({"load_optimizer_states": False}, {"load_module_only": True})


def run(folder: Path) -> str:
    found = [dt.results(load, ranks, folder / str(ranks), ranks)[0] for ranks in cases(RANKS)]
    return next(filter(None, found), "")


def load(rank: int, folder: Path, ranks: int) -> str:
    """Load only the weights into a new run. Returns wrong weights and unexpected changes, or "" if none."""
    saved, _ = dt.train_and_save(rank, folder, CASE, ranks)
    dt.convert(folder)
    for options in OPTIONS:
        run = dt.engine_of(CASE, ranks, universal=True, seed=1)
        before = dt.settings(run)
        run.load_checkpoint(str(folder), tag=dt.UNIVERSAL, **options)
        weights, masters = dt.weights(run), dt.masters(run)
        wrong = [name for name in weights if not dt.same(weights[name], saved[f"{name}.weight"])]
        wrong += [name for name in masters if not dt.same(masters[name], saved[f"{name}.fp32"])]
        states = dt.on_any_rank([key for own in run.optimizer.optimizer.state.values() for key in own])
        if dt.on_any_rank(wrong) or states or dt.settings(run) != before:
            found = f"{len(wrong)} weights are wrong, states {states}, or settings are not this run's"
            return f"{next(iter(options))}: {found}; no error"
    return ""


if __name__ == "__main__":
    dt.allow_pickles()
    show(run, "weights and masters are loaded, and nothing else")
