"""Save each ZeRO-3 rank's model states to its own file, also after a universal load.

https://github.com/deepspeedai/DeepSpeed/issues/7546
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import NoMatch, Source

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/deepspeedai/DeepSpeed/issues/7546",
        "https://github.com/deepspeedai/DeepSpeed/pull/7599",
    ),
    symptom="a resumed run saves checkpoints that neither load nor convert",
    releases=(("0.15.0", "0.17.6"),),
    stacks="universal load, ZeRO 3",
    silent=False,
)

UNIVERSAL = "self.load_universal_checkpoint()"
LOADING = "mp_placeholder is not None"  # only the load passes it, to find the files of all model-parallel ranks
FIRST_FILE = 'filename = "zero_pp_rank_0"'


@fix.edit("deepspeed.runtime.engine")
def name_the_first_file_where_files_are_loaded_alone(source: Source) -> None:
    """All ranks read the first file of a universal checkpoint, because fewer ranks may have saved it."""
    names = source.function("DeepSpeedEngine._get_ckpt_name")
    source.skip_if(f"{LOADING} and {UNIVERSAL}", within=names)
    branch = source.branch(UNIVERSAL, within=names)
    if branch.body != [source.one(FIRST_FILE, within=names)]:
        raise NoMatch(f"expected `{FIRST_FILE}` alone under `if {UNIVERSAL}`")
    source.insert_at(branch.test, f"{LOADING} and ")
