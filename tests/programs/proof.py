"""Call a proof's function (tests/fixes/) on ranks, with the rank and an empty folder; print what each returns, as JSON.

proof.py FILE FUNCTION RANKS [PIPELINE_STAGES]
"""

import importlib.util
import json
import sys
import tempfile
from pathlib import Path

from ckpt_patches.demo import megatron_training as mt


def main() -> None:
    file, function, ranks, *stages = sys.argv[1:]
    sys.path.append(str(Path(__file__).parents[1]))  # what a proof imports for pytest
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec
    assert spec.loader
    proof = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(proof)
    with tempfile.TemporaryDirectory() as folder:
        parallel = (1, int(stages[0]) if stages else 1)
        found = mt.results(vars(proof)[function], int(ranks), Path(folder, "checkpoint"), parallel=parallel)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
