"""Convert checkpoint folders with DeepSpeed's converter, imported; print what each raised, as JSON.

    convert.py INPUT... [--output FOLDER] [--workers 2] [--start-method fork] [--keep]

INPUT/… becomes FOLDER/<name of INPUT's parent>. A pool worker that raises does so in the program.
"""

import argparse
import inspect
import json
import multiprocessing
import sys
from pathlib import Path

from deepspeed.checkpoint import ds_to_universal


def convert(source: Path, output: Path, workers: int, keep: bool) -> str:
    sys.argv = ["ds_to_universal", "--input_folder", str(source), "--output_folder", str(output)]
    sys.argv += ["--num_extract_workers", str(workers), "--num_merge_workers", str(workers)]
    sys.argv += ["--keep_temp_folder"] if keep else []
    try:
        if inspect.signature(ds_to_universal.main).parameters:
            ds_to_universal.main(ds_to_universal.parse_arguments())
        else:  # up to 0.14 it parses the arguments itself
            ds_to_universal.main()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("inputs", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--start-method", default="fork")
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    multiprocessing.set_start_method(args.start_method, force=True)  # 0.17.1 sets it on import
    outcome = {}
    for source in args.inputs:
        outcome[source.parent.name] = convert(source, args.output / source.parent.name, args.workers, args.keep)
    print("\n" + json.dumps(outcome))


if __name__ == "__main__":
    main()
