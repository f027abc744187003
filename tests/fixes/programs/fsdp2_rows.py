"""Save SwiGLU under torch FSDP2, or load the result, on ranks of the real megatron-core.

The training is that of the proof of `fsdp2_swiglu_rows`, which saves in two forms: as the release does, and as
releases up to 0.18 do. A load prints a line of JSON for each form: the number of rows of the weight and the moment that
differ from the live ones of the save, or "refused".

    fsdp2_rows.py save|load FOLDER [--ranks 2] [--tensor-parallel 1] [--without-fsdp2]
"""

import json
import runpy
from pathlib import Path
from typing import Any

from program_arguments import parsed
from trainers import megatron_training as mt

FIXES = Path(__file__).resolve().parents[1]
PROOF = runpy.run_path(str(FIXES / "test_fsdp2_swiglu_rows.py"))
TRUTH = "truth.json"


def main() -> None:
    options = parsed({"what": str, "folder": Path}, ranks=2, tensor_parallel=1, without_fsdp2=False)
    parallel = (options.tensor_parallel, 1)
    if options.what == "save":
        saved = mt.results(PROOF["save"], options.ranks, options.folder, parallel=parallel)
        (options.folder / TRUTH).write_text(json.dumps(saved))
        return
    loaded = mt.results(PROOF["load"], options.ranks, options.folder, not options.without_fsdp2, parallel=parallel)
    saved = json.loads((options.folder / TRUTH).read_text())
    print(json.dumps({form: compared(saved, loaded, form) for form in PROOF["FORMS"]}), flush=True)


def compared(saved: list[dict[str, Any]], loaded: list[dict[str, Any]], form: str) -> int | str:
    """The number of rows that differ."""
    if None in [rank[form] for rank in loaded]:
        return "refused"
    truth, found = (PROOF["whole"]([rank[form] for rank in ranks]) for ranks in (saved, loaded))
    return sum(int((truth[name] != found[name]).any(1).sum()) for name in truth)


if __name__ == "__main__":
    main()
