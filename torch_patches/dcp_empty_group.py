"""Load the settings of a param group that has no parameters.

https://github.com/pytorch/pytorch/issues/143828
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Source

fix = Fix(
    __name__,
    upstream=("https://github.com/pytorch/pytorch/issues/143828",),
    symptom="`KeyError: 'betas'` in the first step after `set_state_dict`",
    releases=(("2.7.1", newest("torch")),),
    stacks="`set_state_dict` or `set_optimizer_state_dict`; a param group without parameters",
    silent=False,
    test="test/distributed/checkpoint/test_dcp_empty_group.py",
)

EMPTY = "pg_mapping[id(ret[0])] = len(return_osd[_PG]) - 1"


@fix.edit("torch.distributed.checkpoint.state_dict")
def find_the_empty_group(source: Source) -> None:
    """The loop over the loaded groups ends at the last one, whether that is the empty one or not."""
    split = source.function("_split_optim_state_dict")
    source.skip_if(EMPTY, within=split)
    empty = source.branch("len(param_group[_PARAMS]) == 0", within=split)
    source.replace(
        source.one("pg_mapping[id(loaded_param_group)] = len(return_osd[_PG]) - 1", within=empty),
        EMPTY,
    )
