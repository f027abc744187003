"""The complete list of finding kinds. `docs/reference/findings.md` shows it; each kind has a test."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

DAMAGE, INCOMPLETE, SUSPICION, NOTE = "damage", "incomplete", "suspicion", "note"


class FindingKind(NamedTuple):
    """One entry of the list."""

    name: str
    severity: str
    meaning: str
    remedy: str


KINDS: dict[str, FindingKind] = {}


def _kind(name: str, severity: str, meaning: str, remedy: str = "no repair: take another checkpoint") -> FindingKind:
    KINDS[name] = FindingKind(name, severity, meaning, remedy)
    return KINDS[name]


FROM_WEIGHT = "repair takes the model's own weights, which are rounded"
FROM_OLDER = "repair takes the range of an older checkpoint (`--from`), or resets both moments (`--reset-moments`)"
NO_HARM = "nothing to repair"

LOST_MASTER = _kind(
    "lost_master",
    DAMAGE,
    "zeros in the master parameter where the model's own weight is not zero (without weights: where the moments are "
    "not zero)",
    FROM_WEIGHT,
)
LOST_MOMENT = _kind(
    "lost_moment",
    DAMAGE,
    "zeros in one moment where the other is not zero; or in both, over elements that are neither rows nor columns, or "
    "over most of what a rank holds",
    FROM_OLDER,
)
NO_MOMENTS = _kind("no_moments", DAMAGE, "the moments of every parameter are zero, and the optimizer's step is not")
PARAMETER_WITHOUT_MOMENTS = _kind(
    "parameter_without_moments",
    NOTE,
    "both moments of a whole parameter are zero: an expert or a branch that was never used",
    NO_HARM,
)
UNROUNDED_MASTER = _kind(
    "unrounded_master",
    DAMAGE,
    "the master parameter does not round to the model's own weight, as after a reload that did not reach it",
    "no repair: nothing tells which of the two is right; take another checkpoint",
)
OTHER_MASTERS = _kind(
    "other_masters",
    SUSPICION,
    "most master parameters do not round to the model's own weights, and are near to them: a reload did not reach one "
    "of the two, or one is of another step",
    "no repair: nothing tells which of the two is right; take another checkpoint",
)
FEW_BITS = _kind(
    "few_bits",
    NOTE,
    "the model's weights are numbers of few bits, as of fp8, which masters are near to: they were not compared",
    NO_HARM,
)
LOST_WEIGHT = _kind(
    "lost_weight",
    DAMAGE,
    "zeros in the model's own weight where the master parameter does not round to zero, and all others of this "
    "parameter round to its weights",
)
SHIFTED_STATE = _kind(
    "shifted_state",
    DAMAGE,
    "main parameters do not round to the model's weights, as megatron-core 0.15.0 to 0.19.2 leaves them in "
    "`fully_reshardable` with several buckets: shifted into their neighbors, and zeros at the end",
    "load it with fully_reshardable_restore on the ranks and bucket size that saved it: it puts the states back",
)
MIXED_ROWS = _kind(
    "mixed_rows",
    DAMAGE,
    "rows of SwiGLU's W and V are in each other's places, as megatron-core 0.10.0 to 0.18.2 saves them under torch "
    "FSDP2: runs of these releases alone, with as many ranks, load them right",
    "load it with the fix fsdp2_swiglu_rows on as many ranks as saved it, and save it again: rows are then in place",
)
NOT_FINITE = _kind("not_finite", DAMAGE, "NaN or infinity", "repair fills it as a lost range, where it can")
ODD_IN_BUCKET = _kind(
    "odd_in_bucket",
    SUSPICION,
    "NaN, infinity or a negative square in a bucket: damage, or padding, which megatron-core 0.7 leaves uninitialised",
)
NEGATIVE_SQUARE = _kind("negative_square", DAMAGE, "negative elements in exp_avg_sq, a mean of squares", FROM_OLDER)
NO_GRADIENT = _kind(
    "no_gradient", NOTE, "whole rows whose moments are zero: unseen tokens, padding, unused units", NO_HARM
)
MISSING_CHUNK = _kind(
    "missing_chunk", DAMAGE, "a chunk's file is missing", "repair fills it as a lost range, where it can"
)
SHORT_CHUNK = _kind(
    "short_chunk", DAMAGE, "a chunk's file is shorter than the chunk", "repair fills it as a lost range, where it can"
)
LONG_CHUNK = _kind("long_chunk", DAMAGE, "a chunk's file is longer than the chunk: it may be another array's")
STRAY_FILE = _kind("stray_file", SUSPICION, "files of chunks that the array's metadata does not know of")
MISSING_ARRAY = _kind("missing_array", DAMAGE, "an array is missing that the other parameters have")
MISSING_MOMENTS = _kind(
    "missing_moments", SUSPICION, "a parameter has no moments at all, and the other parameters have", NO_HARM
)
NO_OPTIMIZER_STATE = _kind(
    "no_optimizer_state", NOTE, "parameters without any optimizer state, as frozen ones have none", NO_HARM
)
NUMBERED_STATES = _kind(
    "numbered_states",
    NOTE,
    "states under the numbers of their parameters, as `optimizer.state_dict()` has them: they were not compared with "
    "the weights, and torch.distributed.checkpoint loads none of them into an optimizer that has taken no step",
    "save what `get_optimizer_state_dict` returns",
)
LOCK_DIRECTORY = _kind("lock_directory", NOTE, "a lock directory was left behind", "repair leaves it out")
MISSING_RANK = _kind("missing_rank", DAMAGE, "a data-parallel rank's file is missing")
ONE_MODEL_FILE = _kind(
    "one_model_file",
    DAMAGE,
    "all ranks of a ZeRO-3 run have saved their model states into one file, as DeepSpeed 0.14.5 to 0.17.6 does with "
    "`load_universal`: it can be neither resumed nor converted",
    "copy it for the other ranks, under their names: ckpt-patches explain zero3_universal_save",
)
MIXED_RANKS = _kind("mixed_ranks", DAMAGE, "a rank's file is of a save with another number of data-parallel ranks")
MIXED_STEPS = _kind("mixed_steps", DAMAGE, "the ranks' files are of different steps")
LARGE_PADDING = _kind(
    "large_padding",
    NOTE,
    "a padding is larger than its partition: the state is complete, and upstream's converter fails with it",
    "convert with `ckpt-patches to-universal`, or with upstream's converter and the fix universal_tensor_paddings",
)
FRAGMENTS = _kind(
    "fragments", DAMAGE, "the fragments of a parameter overlap, leave holes, or do not lie in their partition"
)
ELEMENT_COUNT = _kind(
    "element_count",
    DAMAGE,
    "an array has another number of elements than the model's shape, as after a ZeRO-3 conversion of DeepSpeed 0.14.5 "
    "to 0.19.2",
    "convert the ZeRO checkpoint again with `ckpt-patches to-universal`",
)
INTERRUPTED = _kind("interrupted", INCOMPLETE, "the conversion did not finish", "convert the ZeRO checkpoint again")
INCOMPLETE_SAVE = _kind(
    "incomplete_save",
    INCOMPLETE,
    "the save did not finish, or what a tracker names is not there",
    "take an older checkpoint",
)
MISSING_WEIGHT = _kind("missing_weight", DAMAGE, "a weight, or a rank's part of a frozen one, is in no file")
FOREIGN_FILE = _kind("foreign_file", DAMAGE, "a rank's file is another rank's, a copy of one, or no rank's of the save")
CONTRADICTION = _kind(
    "contradiction",
    DAMAGE,
    "files of one save state different settings, steps or shapes, or a value that no optimizer takes",
)
UNUSUAL = _kind("unusual", SUSPICION, "a run can save this, and rarely does", "compare it with an older checkpoint")
SPARSE_MOMENT = _kind(
    "sparse_moment",
    NOTE,
    "zeros in one moment where the other is not zero, in more places than ranks lose slices: as of 8 bits",
    NO_HARM,
)
CODED_STATE = _kind(
    "coded_state",
    NOTE,
    "a state of codes and scales, as of 8-bit optimizers: only its checksums, NaN and scales of zeros are judged",
    NO_HARM,
)
RARE = _kind("rare", NOTE, "a run can save this, and rarely does", NO_HARM)
MISSING_STATE = _kind("missing_state", DAMAGE, "an optimizer state is missing that the files promise, or is too short")
REPAIRED = _kind(
    "repaired", NOTE, "elements that `ckpt-patches repair` has repaired, by the list in the checkpoint", NO_HARM
)
STALE_LIST = _kind(
    "stale_list", NOTE, "a list of repaired elements that is not of these files: nothing is taken from it", "remove it"
)
BAD_METADATA = _kind("bad_metadata", DAMAGE, "a file of metadata is missing or cannot be read")
NOT_AS_RECORDED = _kind(
    "not_as_recorded",
    DAMAGE,
    "a state is not what the run that saved it has recorded (`CKPT_PATCHES_FINGERPRINT`): the save has changed it, or "
    "something since",
)
RECORDED = _kind(
    "recorded", NOTE, "how many states were compared with what the run that saved has recorded of them", NO_HARM
)
NOT_READ = _kind(
    "not_read",
    SUSPICION,
    "a file in a format, or elements of a type, that is not read here; it may be sound",
    "load it with the framework that saved it",
)
UNREADABLE = _kind(
    "unreadable",
    SUSPICION,
    "the checkpoint could not be read to its end: it has gone, or its disk fails, or the audit has a defect",
    "look at the reason, and audit it again",
)
NOT_JUDGED = _kind(
    "not_judged",
    SUSPICION,
    "a tensor, or a part of one, that the files hold and the audit did not judge",
    "check it with the framework that saved it",
)
BAD_FILE = _kind("bad_file", DAMAGE, "a file is missing, truncated, or fails its checksums")


@dataclass(frozen=True)
class Finding:
    """One finding and its location."""

    kind: FindingKind
    array: str  # or a file's name
    detail: str = ""
    shard: str = ""
    begin: int | None = None  # first element, relative to the shard
    end: int | None = None  # one past the last element


def labelled(findings: Iterable[Finding], shard: str) -> list[Finding]:
    """The findings, of this shard."""
    return [replace(finding, shard=shard) for finding in findings]
