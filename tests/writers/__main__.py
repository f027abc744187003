"""Write checkpoints with trainers that this project has no fix for, and audit them.

    make writers [WRITER="verl lightning"]

Each trainer is installed into its own environment in .writers/, or in the folder CKPT_PATCHES_WRITERS.
"""

import datetime
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from ckpt_patches.audit.audit import Report, audit
from ckpt_patches.audit.readers.checkpoint import Extent
from ckpt_patches.audit.run_folder import saves
from ckpt_patches.demo.ranks import free_port
from installs import find_python
from writers import record
from writers.rows import WRITERS, Writer

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = Path(os.environ.get("CKPT_PATCHES_WRITERS") or HERE.parents[1] / ".writers").resolve()
TORCH, PYTHON = "2.13.0", "3.12"
TIMEOUT = 600.0  # seconds per save
NAN = b"\0\0\xc0\x7f"  # of float32


def main() -> int:
    asked = os.environ.get("WRITER", "").split() or [*WRITERS]
    if unknown := [name for name in asked if name not in WRITERS]:
        print(f"expected WRITER to be of {', '.join(WRITERS)}, found {unknown[0]}", file=sys.stderr)
        return 2
    for name in asked:
        python = environment(WRITERS[name])
        found = {case: judged(WRITERS[name], python, case) for case in WRITERS[name].cases}
        today = datetime.date.today().isoformat()
        record.add(name, {"date": today, "on": versions(python, WRITERS[name]), "cases": found})
        print(f"{name}: recorded in {record.PATH}", flush=True)
    return 0


def environment(writer: Writer) -> Path:
    """The Python of a writer's environment, which is created if missing.

    Raises:
        subprocess.CalledProcessError: pip could not install it.
    """
    folder = ENVIRONMENTS / writer.name
    python = folder / "bin" / "python"
    if not python.exists():
        ENVIRONMENTS.mkdir(exist_ok=True)
        base = find_python(PYTHON)
        if base is None:
            raise SystemExit(f"expected a Python {PYTHON} on this machine, found none")
        with tempfile.TemporaryDirectory(dir=ENVIRONMENTS, prefix=f".{writer.name}.") as temporary:
            subprocess.run([base, "-m", "venv", temporary], check=True)
            pip = [str(Path(temporary, "bin", "python")), "-m", "pip", "install", "--quiet"]
            subprocess.run([*pip, f"torch=={TORCH}", writer.requirement, "numpy"], check=True)
            os.chmod(temporary, 0o755)
            os.rename(temporary, folder)
            Path(temporary).mkdir()
    return python


def versions(python: Path, writer: Writer) -> dict[str, str]:
    """The installed versions of Python, torch and the writer."""
    names = ["torch", writer.requirement.partition("==")[0]]
    program = (
        "import platform, sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]), platform.python_version())"
    )
    done = subprocess.run([python, "-c", program, *names], check=True, capture_output=True, text=True)
    return dict(zip([*names, "Python"], done.stdout.split(), strict=True))


def judged(writer: Writer, python: Path, case: str) -> record.Case:
    """A save's format and step, and the audit's result as saved, with a NaN, and without a file."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "saved")
        folder.mkdir()
        _save(writer, python, folder, case)
        (path,) = saves(folder)
        sound = audit(path)
        print(f"{writer.name} {case}: {sound.verdict}, {sound.checkpoint.format}", flush=True)
        return {
            "format": sound.checkpoint.format,
            "step": sound.checkpoint.step,
            "as saved": _words(sound),
            record.CHANGES[0]: _changed(sound, _with_nan),
            record.CHANGES[1]: _changed(sound, lambda extent: Path(extent.path).unlink()),
        }


def _save(writer: Writer, python: Path, folder: Path, case: str) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST_", "CKPT_PATCHES"))}
    of_ranks = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    variables = {**kept, **of_ranks, "CUDA_VISIBLE_DEVICES": "", "CKPT_PATCHES": "off", "ACCELERATE_USE_CPU": "1"}
    variables["PYTHONPATH"] = str(HERE.parent)
    program = HERE / f"{writer.name}_saving.py"
    command = [str(python), str(program), str(folder / case), case]
    done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}")


def _changed(sound: Report, change: Callable[[Extent], None]) -> str:
    """The audit's result for a copy with a change in the largest array, in a moment if it has one."""
    folder = sound.checkpoint.path
    shard = max(sound.checkpoint.shards, key=lambda shard: (len(shard.streams), shard.numel))
    extent = [*shard.streams.values()][-1].extents[0]
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(shutil.copytree(folder, Path(temporary, folder.name)))
        change(extent._replace(path=str(path / Path(extent.path).relative_to(folder))))
        return _words(audit(path))


def _with_nan(extent: Extent) -> None:
    with open(extent.path, "r+b") as file:
        file.seek(extent.offset)
        file.write(NAN)


def _words(report: Report) -> str:
    """The verdict, and the kinds of the findings that are not notes."""
    kinds = sorted({finding.kind.name for finding in report.findings if finding.kind.severity != "note"})
    return f"{report.verdict}{': ' if kinds else ''}{', '.join(kinds)}"


if __name__ == "__main__":
    sys.exit(main())
