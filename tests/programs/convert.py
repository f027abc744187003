"""Convert checkpoint folders with DeepSpeed's converter, imported; print the error of each, as JSON.

    convert.py INPUT... [--output FOLDER] [--start-method fork] [--handed-over]

INPUT/… is converted to FOLDER/<name of INPUT's parent>. Errors of pool workers are raised in this program. With
--handed-over, the fix universal_converter may hand over to ours, as for a user.
"""

import argparse
import json
import multiprocessing
from pathlib import Path

from trainers.deepspeed_training import convert_by_upstream


def convert(source: Path, output: Path, *, handed_over: bool = False) -> str:
    try:
        convert_by_upstream(0, source, output, handed_over=handed_over)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("inputs", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--start-method", default="fork")
    parser.add_argument("--handed-over", action="store_true")
    args = parser.parse_args()
    multiprocessing.set_start_method(args.start_method, force=True)  # 0.17.1 sets it on import
    outcome = {}
    for source in args.inputs:
        output = args.output / source.parent.name
        outcome[source.parent.name] = convert(source, output, handed_over=args.handed_over)
    print("\n" + json.dumps(outcome))


if __name__ == "__main__":
    main()
