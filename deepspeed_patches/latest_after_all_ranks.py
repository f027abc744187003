"""Write `latest` only after all ranks have written their files.

https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/engine.py#L4960
"""

import ast

from ckpt_patches.engine.agreement import insert_agreement
from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Function, NoMatch, Source

ENGINE = "deepspeed.runtime.engine"

fix = Fix(
    __name__,
    upstream=("https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/engine.py#L4960",),
    symptom="a restart fails: `latest` names a checkpoint that a rank did not finish",
    releases=(("0.15.0", newest("deepspeed")),),
    stacks="ZeRO 1 and 2",
    silent=False,
    test="tests/unit/checkpoint/test_latest_after_all_ranks.py",
)

SAVE = "DeepSpeedEngine.save_checkpoint"
COMMIT_LATER = "DeepSpeedEngine._commit_decoupled_checkpoint"  # since 0.17.1, for writes in the background

BARRIER = "dist.barrier()"
WAIT = f"""# Other ranks may still be writing, and may fail at it.
{BARRIER}"""


@fix.edit(ENGINE)
def wait_for_all_ranks(source: Source) -> None:
    """Upstream waits only after it has written `latest`."""
    saves = functions(source)
    source.skip_if(*(waits(source, function) for function in saves))
    for function in saves:
        source.insert_before(statement_that_names(source, function), WAIT)


@fix.edit(ENGINE, independent=True, ours_alone=True)
def agree_first(source: Source) -> None:
    """A rank without this barrier would wait in another one."""
    saves = functions(source)
    insert_agreement(
        source,
        f"{fix.name}.1",
        by_upstream=all(waits(source, function) for function in saves),
        announce=source.function("DeepSpeedEngine.__init__").body[-1],
        check=saves,
        patience=30,
        before="DeepSpeedEngine",
    )


def functions(source: Source) -> list[Function]:
    """The methods that write `latest`."""
    later = source.function_of(COMMIT_LATER, ("0.17.1", newest("deepspeed")))
    return [source.function(SAVE), *([later] if later else [])]


def statement_that_names(source: Source, function: Function) -> ast.If:
    """The `if` of the rank that writes `latest`. Raises NoMatch."""
    branches = [branch for branch in source.all_of(ast.If, function) if opens_latest(source, branch.body)]
    if len(branches) != 1:
        raise NoMatch(f"expected one `if` that writes `latest` in {function.name}, found {len(branches)}")
    return branches[0]


def opens_latest(source: Source, statements: list[ast.stmt]) -> bool:
    """Whether one of them writes `latest`; by `latest_replaced` it is a call."""
    writes = [statement for statement in statements if isinstance(statement, ast.With | ast.Expr)]
    return any(source.has("os.path.join(..., 'latest')", statement) for statement in writes)


def waits(source: Source, function: Function) -> bool:
    """Whether a barrier is directly before the statement that writes `latest`."""
    statement = statement_that_names(source, function)
    blocks = [function.body, *(branch.body for branch in source.all_of(ast.If, function))]
    return any(source.has(BARRIER, block[block.index(statement) - 1]) for block in blocks if statement in block)
