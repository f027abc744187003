"""The explorer's space for DeepSpeed: a training, a save and a load, as plain data."""

import random
from typing import Any

from explore.damaging import ALTERED, DAMAGES, LOST
from trainers.options import DEEPSPEED as PLAIN
from upstream import numbers

Case = dict[str, Any]

DISTRIBUTION, PROGRAM = "deepspeed", "explore_deepspeed"
LAYOUT = ()  # options of a run that are not plainer on their own
HALFWAY = {"groups": 2, "steps": 3, "experts": 2}  # values between large and plain ones
# The options of a load and of a case before any draw.
PLAIN_LOAD: Case = {
    "kind": "ordinary", "restore": "everything", "tag": "first", "times": 1,
    "trained": False,
    "old": False,  # saved without the fixes
    "by_upstream": False,  # loaded without the fixes
    "stages": 0,  # pipeline stages; 0: as many as in the save
    "tp": 0,  # tensor-parallel ranks; 0: as many as in the save
    "more_groups": 0,  # additional param groups, compared with the saved run
    "latest": False,  # the tracker file selects the tag
    "some_ranks": False,  # only rank 0 has the fixes
    "damage": "",  # the damage to a file after the save
    "file": 0,  # the number of the damaged file
    "repaired": False,  # `repair` repairs the damage with the moments of the first save
    "fingerprint": False,  # the save records fingerprints, and the load compares them
    "both_converters": False,  # the other converter also converts the checkpoint, for comparison
}  # fmt: skip
PLAIN_CASE: Case = {
    "two_saves": False,
    "killed": 0,  # the rank dies when the second save writes this file, counted over ranks
}
OPTIMIZERS = (
    "AdamW", "AdamW", "AdamW", "Adam", "AMSGrad", "Lion", "SGD", "momentum", "Adagrad", "RMSprop", "NAdam",
    "built-in Adam", "built-in AdamW", "Muon",
)  # fmt: skip
RESTORE = ("everything",) * 6 + ("module only", "without optimizer states", "without scheduler")
LOADS = (
    "ordinary", "ordinary", "universal", "universal", "upstream's universal",
)  # fmt: skip
RANKS = (1, 2, 2, 2, 2, 3, 4, 5)


def drawn(seed: str, version: str) -> Case:
    """Draw one case for a release. The same seed gives the same case."""
    generator = random.Random(seed)

    def one_in(count: int) -> bool:
        return generator.randrange(count) == 0

    stage, ranks = generator.choice([0, 1, 1, 2, 2, 3, 3, 3]), generator.choice(RANKS)
    dtype = generator.choice(["bf16", "bf16", "bf16", "fp16", "fp32"])
    run = {
        **PLAIN,
        "stage": stage,
        "dtype": dtype,
        "optimizer": generator.choice(OPTIMIZERS),
        "groups": generator.choice([1, 1, 2, 3, 4]),
        "steps": generator.choice([0, 1, 2, 2, 3, 5]),
        "accumulation": generator.choice([1, 1, 1, 2]),
        "bucket": generator.choice([20, 100, 1000, 1000]),
        "contiguous_gradients": not one_in(4),
        "overlap_comm": one_in(3),
        "round_robin_gradients": stage in (1, 2) and one_in(4),
        "fp32_gradients": stage in (0, 1) and dtype == "bf16" and one_in(3),
        "overflow": dtype == "fp16" and one_in(2),
        "offload": stage > 0 and one_in(6),
    }
    run["parameter_alignment"] = stage in (1, 2) and numbers(version) >= (0, 19, 7) and one_in(4)
    nodes = 2 if ranks == 4 and one_in(2) else 1
    if stage == 3:
        run |= {
            "sub_group_size": generator.choice([0, 0, 50, 300]),
            "writer": generator.choice([None, None, {"type": "python"}, {"type": "python", "decoupled": True}]),
            "persistent": generator.choice([0, 0, 30, 10**5]),
            "hpz": nodes == 2 and one_in(2),
        }
    for name, count in (
        ("single", 4), ("empty_group", 6), ("zero_rate", 5), ("reversed", 4), ("warm_up", 4), ("frozen", 4),
        ("unused", 4), ("tied", 4), ("zero_initialized", 3), ("buffers", 3), ("lora", 8), ("clipping", 4),
    ):  # fmt: skip
        run[name] = one_in(count)
    if stage in (1, 2) and one_in(6):
        run |= {"experts": generator.choice([2, 4, 4, 6]), "lora": False, "contiguous_gradients": True}
    run["sequences"] = stage > 0 and ranks % 2 == 0 and not (run["experts"] or run["hpz"]) and one_in(6)
    if run["optimizer"] == "Muon":  # Muon has its own param groups
        run |= {"groups": 1, "offload": False, "experts": 0, "lora": False, "stage": max(stage, 1)}
        # The momentum of Muon includes the gradients of an overflow and stays NaN afterward.
        run |= dict.fromkeys(("single", "empty_group", "zero_rate", "reversed", "overflow"), False)
        # With sequence parallelism, memory holds fp32 values, and a bf16 layout cannot hold them.
        in_memory = stage == 3 and numbers(version) >= (0, 18, 9) and not run["sequences"]
        run["momentum_in_memory"] = in_memory and one_in(2)
    kind = generator.choice(LOADS if stage else [kind for kind in LOADS if "universal" not in kind])
    other = kind.endswith("universal") and not one_in(3)
    to = generator.choice([1, 2, 3, 4, 5]) if other else ranks
    two_saves = one_in(3)
    load = {
        **PLAIN_LOAD,
        "kind": kind,
        "restore": generator.choice(RESTORE),
        "ranks": to,
        "nodes": nodes if to == ranks else 1,
        "tag": generator.choice(["first", "last"]) if two_saves else "first",
        "times": 2 if one_in(6) else 1,
        "trained": one_in(6),
        "old": one_in(8),
        "more_groups": int(one_in(12) and not run["experts"] and run["optimizer"] != "Muon"),
        "latest": one_in(6),
        "some_ranks": to > 1 and one_in(10),
    }
    killed = generator.randrange(1, 1 + 2 * ranks) if two_saves and one_in(2) else 0
    if not killed and one_in(6):
        # A skipped step changes only counters, and the optimizer's file has no counters.
        damages = DAMAGES if two_saves and not run["overflow"] else DAMAGES[:-1]
        load |= {"damage": generator.choice(damages), "file": generator.randrange(12)}
    load["fingerprint"] = not load["some_ranks"] and one_in(2)
    if load["fingerprint"] and not (killed or load["damage"] or load["old"]) and one_in(6):
        load |= {"damage": generator.choice([ALTERED, *LOST]), "file": generator.randrange(60)}
        load["repaired"] = load["damage"] in LOST and one_in(2)
    load["both_converters"] = kind.endswith("universal") and not load["damage"] and one_in(2)
    if load["latest"] and kind == "ordinary" and two_saves:
        load["tag"] = "last"
    run["ends_at_save"] = not killed and one_in(6)
    if run["stage"] == 0 and one_in(5):
        run |= {"experts": generator.choice([2, 4, 4, 6]), "lora": False}
        load["more_groups"] = 0
    if run["stage"] < 2 and not (run["experts"] or run["sequences"] or run["optimizer"] == "Muon") and one_in(4):
        # Stages with different numbers of groups wait for each other forever.
        run |= {"pipeline": 2 - ranks % 2, "lora": False, "unused": False, "single": False}
        run["groups"] = min(run["groups"], 2)
        if load["ranks"] != ranks or (other and one_in(2)):
            load["stages"] = generator.choice([1, 2 - load["ranks"] % 2])
        run["stage_decay"] = run["pipeline"] > 1 and not run["tied"] and one_in(2)
    of_others = any(run[name] for name in ("experts", "sequences", "hpz", "pipeline", "lora"))
    if ranks % 2 == 0 and not of_others and run["optimizer"] != "Muon" and one_in(5):
        run["tp"] = 2
        if load["damage"] in (ALTERED, *LOST):  # fingerprints do not know a rank's part
            load |= {"damage": "", "repaired": False}
        if load["ranks"] != ranks or (other and one_in(2)):
            load["tp"] = generator.choice([1, 2 - load["ranks"] % 2])
        if run["stage"] == 3 and kind.endswith("universal"):
            load["tp"] = 1  # the load rejects the sizes of slices
    intact = not (killed or load["damage"] or load["old"] or load["some_ranks"])
    load["by_upstream"] = intact and one_in(8)
    case = {"ranks": ranks, "nodes": nodes, "run": run, "two_saves": two_saves, "killed": killed, "load": load}
    return {"package": "deepspeed", **case}


def fixed(load: Case) -> tuple[str, ...]:
    """The options of a load that are not plainer on their own."""
    return ("kind", "restore", "tag")


def smaller(case: Case) -> list[Case]:
    """Let an earlier file kill the save, or use fewer ranks."""
    load = case["load"]
    found: list[Case] = []
    if case["killed"]:
        found += [{"killed": 0}] + [{"killed": 1}] * (case["killed"] > 1)
    if case["nodes"] == 2:
        found.append({"nodes": 1, "run": {"hpz": False}, "load": {"nodes": 1}})
    elif load["nodes"] == 1:
        found += [{"load": {"ranks": case["ranks"]}}] * (load["ranks"] != case["ranks"])
        for fewer in range(max(case["ranks"], load["ranks"]) - 1, 0, -1):
            less = {"ranks": min(load["ranks"], fewer)} | ({"some_ranks": False} if fewer == 1 else {})
            found.append({"ranks": min(case["ranks"], fewer), "load": less})
    return found


def loaded(case: Case) -> str:
    """Name the loaded checkpoint and its loaded parts."""
    load = case["load"]
    return f"{load['kind']}, {load['restore']}".removesuffix(", everything")
