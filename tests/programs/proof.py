"""Call a proof's function (tests/fixes/) with a folder, and print what it returns, as JSON.

    proof.py FILE FUNCTION [RANKS [PIPELINE_STAGES [TENSOR_PARALLEL]]] [--folder FOLDER] [--arguments JSON]

Without FOLDER it gets an empty one; the arguments, a list, come after it. With RANKS it is called with the rank before
it, on each of these ranks of megatron-core. Without, it starts ranks itself, and an error of one of them is what it
returns.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainers.ranks import RankError


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("function")
    parser.add_argument("layout", type=int, nargs="*")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--arguments", type=json.loads, default=[])
    args = parser.parse_args()
    spec = importlib.util.spec_from_file_location(args.file.stem, args.file)
    assert spec
    assert spec.loader
    proof = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where pickle looks for its classes
    spec.loader.exec_module(proof)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary, "checkpoint")
        found = call(vars(proof)[args.function], folder, args.layout, args.arguments)
    print("\n" + json.dumps(found), flush=True)


def call(function: Callable[..., Any], folder: Path, layout: list[int], arguments: list[Any]) -> Any:
    if not layout:
        folder.mkdir(exist_ok=True)
        try:
            return function(folder, *arguments)
        except RankError as error:
            return str(error).replace(f"{folder}/", "")
    from trainers import megatron_training as mt

    ranks, stages, tensor = [*layout, 1, 1][:3]
    return mt.results(function, ranks, folder, *arguments, parallel=(tensor, stages))


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__" and Path(sys.argv[1]).stem.startswith(("test_async", "test_nvrx")):
    from trainers import nvrx_saving  # noqa: F401  in a worker, too, the GPU stub must load first
