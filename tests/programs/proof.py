"""Call a proof's function (tests/fixes/) on ranks, with the rank and an empty folder; print what each returns, as JSON.

proof.py FILE FUNCTION RANKS [PIPELINE_STAGES]
"""

import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> None:
    file, function, *layout = sys.argv[1:]
    sys.path.append(str(Path(__file__).parents[1]))  # what a proof imports for pytest
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
        return function(folder)
    from trainers import megatron_training as mt

    ranks, *stages = layout
    return mt.results(function, ranks, folder, parallel=(1, stages[0] if stages else 1))


if __name__ == "__main__":
    main()
