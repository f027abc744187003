"""Run DeepSpeed's converter in this process: `module …` as `python -m …`, `script …` as `python …/FILE.py …`."""

import os
import sys

MODULE = "deepspeed.checkpoint.ds_to_universal"


def main() -> None:
    how, *arguments = sys.argv[1:]
    path = os.path.join(*MODULE.split(".")) + ".py"
    (script, *_) = [os.path.join(folder, path) for folder in sys.path if os.path.exists(os.path.join(folder, path))]
    os.execv(sys.executable, [sys.executable, *(["-m", MODULE] if how == "module" else [script]), *arguments])


if __name__ == "__main__":
    main()
