"""The explorer's space for Megatron: a training, a save and a load, as plain data."""

import random
from typing import Any

from explore.damaging import ALTERED, DAMAGES, LOST, OTHER_STEP
from trainers.options import MEGATRON as PLAIN
from upstream import numbers, runnable

Case = dict[str, Any]

# The numbers of tensor-, pipeline- and data-parallel ranks.
LAYOUTS = (
    (1, 1, 1), (1, 1, 2), (1, 1, 2), (1, 1, 2), (1, 1, 3), (1, 1, 4), (2, 1, 1), (1, 2, 1), (1, 2, 2), (2, 1, 2),
    (2, 2, 1),
)  # fmt: skip
FROZEN = ("self_attention.linear_qkv", "norm")  # parts of parameter names
ZARR_ALONE = "fully_sharded_bucket_space"  # torch_dist cannot write its padding
RESHARDABLE = ("fully_reshardable", "fully_sharded_model_space")  # other model-parallel layouts can load these
PLAIN_LOAD: Case = {
    "restore": "everything", "tag": "first", "times": 1, "tp": 1, "pp": 1, "ep": 0, "cp": 1,
    "trained": False,
    "old": False,  # saved without the fixes
    "by_upstream": False,  # loaded without the fixes
    "override": False,  # the run overrides the learning rates of the checkpoint
    "offload": "same",
    "saved_by": "",  # another release that saves the checkpoint
    "some_ranks": False,  # only rank 0 has the fixes
    "damage": "",  # the damage to a file after the save
    "file": 0,  # the number of the damaged file
    "repaired": False,  # `repair` repairs the damage with the moments of the first save
    "fingerprint": False,  # the save records fingerprints, and the load compares them
    "migrated": False,  # the load uses a checkpoint migrated from a format of another release
    "format": "same",  # the format that the run requests
    "ckpt_step": False,  # `--ckpt-step` names the checkpoint, of a run whose tracker names the last one
}  # fmt: skip
PLAIN_CASE: Case = {"two_saves": False}
LAYOUT = ("tp", "pp", "ep", "cp")
HALFWAY = {"steps": 3}  # values between large and plain ones
DISTRIBUTION, PROGRAM = "megatron-core", "explore_megatron"


def formats(version: str) -> list[str]:
    """The formats of the optimizer's state in a release."""
    model_space = ["fully_sharded_model_space"] * (numbers(version) < (0, 16))
    model_space += [ZARR_ALONE] * (numbers(version) < (0, 15))
    newer = ["dp_reshardable", "fully_reshardable", "fully_reshardable"] * (numbers(version) >= (0, 15))
    return [*model_space, *newer, "dp_zero_gather_scatter", "torch"]


def earlier(version: str) -> list[str]:
    """The newest release of each earlier minor version that has the same formats."""
    own = numbers(version)
    last = {numbers(one)[:2]: one for one in sorted(runnable("megatron-core"), key=numbers)}
    return [one for minor, one in last.items() if (0, 12) <= minor < own[:2] and formats(one) == formats(version)]


def drawn(seed: str, version: str) -> Case:
    """Draw one case for a release. The same seed gives the same case."""
    generator = random.Random(seed)

    def one_in(count: int) -> bool:
        return generator.randrange(count) == 0

    tp, pp, dp = generator.choice(LAYOUTS)
    ranks = tp * pp * dp
    hybrid, adam = one_in(3), not one_in(16)
    optimizer = "whole" if not hybrid and (one_in(6) or not adam) else "distributed"
    dtype = generator.choice(["bf16", "bf16", "bf16", "fp16", "fp32"])
    if hybrid:
        dtype = "bf16"
    run = {
        **PLAIN,
        "tp": tp,
        "pp": pp,
        "ep": generator.choice([0, 0, 0, 1, 2 if dp % 2 == 0 else 1]),
        "instances": 2 if dp == 4 and optimizer == "distributed" and one_in(3) else 1,
        "dtype": dtype,
        "optimizer": optimizer,
        "inner": generator.choice(["fused", "fused", "torch"]),
        "algorithm": "adam" if adam or hybrid else "sgd",
        "offload": generator.choice([0.0, 0.5, 1.0]) if hybrid else None,
        "format": generator.choice(formats(version)),
        "steps": generator.choice([0, 1, 2, 2, 3, 5]),
        "bucket": generator.choice([0, 0, 300, 2000]),
        "overlap": hybrid and one_in(2),
        "overflow": dtype == "fp16" and one_in(2),
    }
    run["precision_aware"] = optimizer == "distributed" and dtype == "bf16" and adam and one_in(4)
    if run["precision_aware"] and not hybrid:
        run["inner"] = "fused"
    if run["format"] == "torch":
        run["ep"] = min(1, run["ep"])  # otherwise Megatron-LM's own code selects the rank that writes experts
    if tp > 1:
        run["ep"] = 0  # experts need sequence parallelism, and torch's norms lack it
    run["mup"] = numbers(version) >= (0, 18) and one_in(6)
    for name, count in (
        ("decoupled_rate", 4), ("fp32_norms", 4), ("gated", 2), ("untied", 2), ("biases", 2), ("frozen", 4),
        ("zero_initialized", 4), ("scheduler", 2), ("asynchronous", 4), ("clipping", 4),
        ("learned_positions", 6),
    ):  # fmt: skip
        run[name] = one_in(count)
    if dp % 2 == 0 and run["ep"] < 2 and run["instances"] == 1 and one_in(4):
        # Each rank has all tokens, because attention across ranks needs Transformer Engine.
        # Context parallelism would slice rotary embeddings.
        run |= {"cp": 2, "learned_positions": True}
    run["fp32_norms"] &= not hybrid  # torch's optimizers do not accept views of a parameter
    if run["offload"] == 0.5 and pp > 1:
        run["untied"] = True  # otherwise only one copy of the embedding is on the CPU and rounds differently
    run["biases"] &= not run["ep"]
    run["asynchronous"] &= run["format"] != "torch"
    run["persistent"] = run["asynchronous"] and one_in(2)
    two_saves, restore = one_in(3), generator.choice(["everything"] * 5 + ["weights", "without scheduler"])
    load = {
        **PLAIN_LOAD,
        **{name: run[name] for name in LAYOUT},
        "ranks": ranks,
        "restore": restore,
        "tag": generator.choice(["first", "last"]) if two_saves else "first",
        "times": 2 if one_in(8) else 1,
        "trained": one_in(5),
        "old": one_in(8),
        "override": run["scheduler"] and restore == "everything" and one_in(3),
        "offload": generator.choice([0.0, 0.5, 1.0]) if hybrid and one_in(3) else "same",
        "saved_by": generator.choice(earlier(version) or [""]) if one_in(6) and not run["mup"] else "",
    }
    load["some_ranks"] = load["ranks"] > 1 and one_in(10)
    if one_in(8):
        damages = DAMAGES if two_saves else DAMAGES[:-1]
        load |= {"damage": generator.choice(damages), "file": generator.randrange(12)}
    load["fingerprint"] = not load["some_ranks"] and one_in(2)
    if load["damage"] == OTHER_STEP:  # in torch_dist only fingerprints reveal another step
        load |= {"fingerprint": True, "some_ranks": False, "old": False}
    if load["fingerprint"] and not (load["damage"] or load["old"] or run["asynchronous"]) and one_in(6):
        load |= {"damage": generator.choice([ALTERED, *LOST]), "file": generator.randrange(60)}
        load["repaired"] = load["damage"] in LOST and one_in(2)
    if run["format"] == "torch":  # this format has no fingerprints, which alone notice an altered element
        load["fingerprint"] &= run["optimizer"] != "whole"
        load["damage"] = "" if load["damage"] == ALTERED else load["damage"]
    if one_in(8) and not run["mup"] and run["optimizer"] == "distributed" and numbers(version) >= (0, 16):
        _migrate(generator, run, load)
    if one_in(2) and run["format"] in RESHARDABLE:
        load["tp"], load["pp"], other = generator.choice([one for one in LAYOUTS if one[0] == 1 or not run["ep"]])
        load["ranks"] = load["tp"] * load["pp"] * other
        load |= {"ep": min(load["ep"], 2 - other % 2), "cp": min(load["cp"], 2 - other % 2)}
    elif one_in(2):
        others = [1, 2, 3, 4] if load["ep"] < 2 and load["cp"] == 1 else [2, 4]
        load["ranks"] = tp * pp * generator.choice([other for other in others if tp * pp * other <= 4])
    load["some_ranks"] &= load["ranks"] > 1
    if _has_trainer(version, run, load) and one_in(4):  # megatron.training saves and loads
        run |= {"trainer": True, "parallel_load": run["format"] != "torch" and one_in(2)}
        load["restore"] = "everything" if load["restore"] == "without scheduler" else load["restore"]
        if two_saves and load["restore"] == "everything" and run["steps"]:  # `--ckpt-step 0` names none
            # Megatron-LM loads a newer non-persistent checkpoint unless `--ckpt-step` names another one.
            run["non_persistent"] = run["format"] != "torch" and one_in(3)
            load["ckpt_step"] = (run["non_persistent"] and load["tag"] == "first") or one_in(2)
    if _has_zarr(load["saved_by"] or version, run) and (run["format"] == ZARR_ALONE or one_in(2)):
        run |= {"backend": "zarr", "asynchronous": False, "persistent": False}
    load["by_upstream"] = not (load["damage"] or load["old"] or load["some_ranks"]) and one_in(8)
    if _has_fsdp2(version, run, load) and one_in(3):  # Megatron-LM shards over all ranks
        run |= {"fsdp2": True, "dtype": "fp32", "bucket": 0, "overflow": False, "inner": "torch", "untied": True}
    return {"package": "megatron", "ranks": ranks, "run": run, "two_saves": two_saves, "load": load}


def _has_fsdp2(version: str, run: Case, load: Case) -> bool:
    """Whether a case is one of torch FSDP2: data parallelism alone, without the distributed optimizer."""
    is_alone = all(one[name] == PLAIN_LOAD[name] for one in (run, load) for name in LAYOUT)
    is_plain = run["optimizer"] == "whole" and run["algorithm"] == "adam" and run["backend"] == "torch_dist"
    is_there = not (run["trainer"] or load["saved_by"] or run["format"] == "torch")
    return is_alone and is_plain and is_there


def _has_zarr(version: str, run: Case) -> bool:
    return numbers(version) < (0, 16) and run["format"] not in ("torch", "dp_reshardable")


def _has_trainer(version: str, run: Case, load: Case) -> bool:
    """Whether megatron.training is in the release and supports the case. It has no option for one of the formats."""
    is_its_own = not (load["saved_by"] or run["asynchronous"]) and run["format"] != "dp_zero_gather_scatter"
    return numbers(version) >= (0, 17) and is_its_own


def _migrate(generator: random.Random, run: Case, load: Case) -> None:
    """Let an earlier release save a format that this release cannot read, and load the migrated checkpoint."""
    last = {numbers(one)[:2]: one for one in sorted(runnable("megatron-core"), key=numbers)}
    load["saved_by"] = generator.choice([one for minor, one in last.items() if (0, 12) <= minor < (0, 16)])
    load |= {"migrated": True, "format": "fully_reshardable"}
    run["format"] = "fully_sharded_model_space"


def fixed(load: Case) -> tuple[str, ...]:
    """The options of a load that are not plainer on their own."""
    named = ("ckpt_step",) if load["tag"] == "first" else ()
    return (*LAYOUT, "tag", "restore", *named, *(("migrated", "format", "saved_by") if load["migrated"] else ()))


def smaller(case: Case) -> list[Case]:
    """Load in the same layout, or drop tensor, pipeline or expert parallelism, or use fewer ranks."""
    run, load, ranks = case["run"], case["load"], case["ranks"]
    found: list[Case] = []
    same = {"ranks": ranks, **{name: run[name] for name in LAYOUT}}
    if any(load[name] != value for name, value in same.items()):
        fewer = [{"load": {"ranks": load["ranks"] // load[name], name: 1}} for name in LAYOUT[:2] if load[name] > 1]
        return [{"load": same}, *fewer]

    def layout(count: int, **changed: int) -> None:
        found.append({"ranks": count, "run": changed, "load": {**changed, "ranks": count}})

    for name in ("tp", "pp"):
        if run[name] > 1:
            layout(ranks // run[name], **{name: 1})
    if run["ep"]:
        layout(ranks, ep=run["ep"] - 1)
    if run["cp"] > 1:
        layout(ranks, cp=1)
    model, expert = run["tp"] * run["pp"], max(run["cp"], run["ep"]) * run["instances"]
    for dp in range(ranks // model - 1, 0, -1):
        if dp % expert == 0:
            layout(dp * model)
    return found


def loaded(case: Case) -> str:
    """Name the loaded checkpoint and its loaded parts."""
    return f"{case['run']['format']}, {case['load']['restore']}".removesuffix(", everything")
