"""Call a proof's function (tests/fixes/) with an empty folder, and print what it returns, as JSON.

    proof.py FILE FUNCTION [RANKS [PIPELINE_STAGES]]

With RANKS it is called with the rank as well, on each of these ranks of megatron-core. Without, it starts ranks itself,
and an error of one of them is what it returns.
"""

import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainers.ranks import RankError


def main() -> None:
    file, function, *layout = sys.argv[1:]
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec
    assert spec.loader
    proof = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(proof)
    with tempfile.TemporaryDirectory() as folder:
        found = call(vars(proof)[function], Path(folder, "checkpoint"), list(map(int, layout)))
    print(json.dumps(found), flush=True)


def call(function: Callable[..., Any], folder: Path, layout: list[int]) -> Any:
    if not layout:
        folder.mkdir()
        try:
            return function(folder)
        except RankError as error:
            return str(error).replace(f"{folder}/", "")
    from trainers import megatron_training as mt

    ranks, *stages = layout
    return mt.results(function, ranks, folder, parallel=(1, stages[0] if stages else 1))


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__" and Path(sys.argv[1]).stem.startswith("test_nvrx"):
    from trainers import nvrx_saving  # noqa: F401  in NVRx's worker, too, the GPU stub must load first
