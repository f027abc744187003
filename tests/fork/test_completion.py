"""`ckpt-patches completion` in real shells."""

import shutil
import subprocess

import pytest

from ckpt_patches.cli import command_line
from ckpt_patches.cli.completion import FUNCTION, SHELLS
from registered import FIXES


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> str:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed here")
    return str(request.param)


def completed(shell: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The shell's completions of the last of these words."""
    assert command_line.main(["completion", shell]) == 0
    line = " ".join(f"'{word}'" for word in ["ckpt-patches", *words])
    given = f"COMP_WORDS=({line}); COMP_CWORD={len(words)}"
    ask, start = f"{given}; {FUNCTION}; printf '%s\n' \"${{COMPREPLY[@]}}\"", ["bash", "--norc", "-c"]
    if shell == "zsh":  # as its own completion calls functions written for bash
        begin = "autoload -U compinit; compinit -D"
        ask, start = f"words=({line}); {given}; compgen -F {FUNCTION} -- '{words[-1]}'", ["zsh", "-f", "-c"]
        program = f"{begin}\n{capsys.readouterr().out}\nask() {{ {ask}; }}; ask"
    else:
        program = f"{capsys.readouterr().out}\n{ask}"
    done = subprocess.run([*start, program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    offered = set(done.stdout.split())
    return {word for word in offered if word.startswith(words[-1])} if shell == "zsh" else offered  # as zsh itself does


def test_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert completed(shell, ["s"], capsys) == {"status"}
    assert {"to-universal", "audit", "migrate", "completion"} <= completed(shell, [""], capsys)


def test_options_and_fixes(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert completed(shell, ["diff", "--"], capsys) == {"--with-test", "--split", "--module", "--tree", "--help"}
    assert completed(shell, ["apply", "numpy2_product", "zarr_"], capsys) == {n for n in FIXES if n.startswith("zarr_")}
    assert completed(shell, ["list", "--"], capsys) == {"--all", "--for", "--tree", "--json", "--help"}
    assert completed(shell, ["status", "--r"], capsys) == {"--require"}
    assert completed(shell, ["resume-from", "--m"], capsys) == {"--max"}
    assert completed(shell, ["explain", "zero3_universal_"], capsys) == {
        name for name in FIXES if name.startswith("zero3_universal_")
    }
    assert "migrate" in completed(shell, ["explain", "m"], capsys)
    assert "--drop-state" in completed(shell, ["to-universal", "--d"], capsys)
    assert completed(shell, ["diff", "megatron.core.optimizer_"], capsys) == {"megatron.core.optimizer_param_scheduler"}
