"""The commands of README.md print what it shows, and no link of a page leads nowhere.

A block of README.md that is a fence of ```console run is executed unchanged. A line that starts with `$ ` is a command;
the lines after it are its output. In the output, `…` matches any text, and a line with only `…` matches any lines. A
command without output may print anything. Each command must exit with 0, or with 1 if it shows a damaged checkpoint.
Its variables are

    REPO         a git URL of this repository, with the files of the working tree
    CHECKPOINTS  the folder of a torch run with two checkpoints, of which the newest is damaged
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

import installs
from ckpt_patches.engine.fix import every_fix, load
from ckpt_patches.engine.registry import CORE as CORE_PACKAGE
from ckpt_patches.engine.registry import DEEPSPEED, NVRX, TORCH
from old_checkpoints import flattened, settings
from registered import FIXES
from upstream import REPOSITORY, TIMEOUT, newest, tree
from zero_checkpoints import trained

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
RUN = re.compile(r"^```console run\n(.*?)^```$", re.MULTILINE | re.DOTALL)
IN_A_TABLE = re.compile(r"\[`(ckpt-patches \S+? .+?)`\]\(")
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)")
CORE = "0.16.1"
UPSTREAM = {CORE_PACKAGE: "Megatron-LM", DEEPSPEED: "DeepSpeed", NVRX: "NVRx", "apex": "apex", TORCH: "torch"}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The variables of the commands. As in a container: the tests' torch and NumPy, DeepSpeed and megatron-core."""
    source = installs.copy_working_tree(tmp_path / "source")
    identity = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.invalid")
    for command in ("init --quiet", "add --all --force", "commit --quiet --message Begin"):
        subprocess.run(["git", "-C", str(source), *identity, *command.split()], check=True)
    run = tmp_path / "checkpoints" / "run1"
    program = "import sys; from pathlib import Path; from plain_runs import save; run = Path(sys.argv[1]); "
    program += "save(run, 200); save(run, 300, damaged=True)"
    subprocess.run([sys.executable, "-W", "ignore", "-c", program, run], cwd=REPOSITORY / "tests/tools", check=True)
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    (site_packages,) = venv.glob("lib/python*/site-packages")
    trees = [tree("megatron-core", CORE), tree("deepspeed", newest("deepspeed"))]
    (site_packages / "container.pth").write_text("\n".join([sysconfig.get_path("purelib"), *map(str, trees)]) + "\n")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "CKPT_PATCHES", "GIT_"))}
    return {
        **kept,
        "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "REPO": f"file://{source}",
        "CHECKPOINTS": str(run),
        "NO_COLOR": "1",
    }


def test_the_readme_counts_the_fixes() -> None:
    every = every_fix().values()
    silent = sum(fix.silent for fix in every)
    text = README
    assert f" {len(every)} fixes for checkpoint bugs" in text
    assert f"\n{silent} of the {len(every)} bugs leave a wrong training state" in text


def test_the_commands_of_the_readme_print_what_it_shows(environment: dict[str, str], tmp_path: Path) -> None:
    found = list(commands(README))
    assert len(found) == 6
    for command, shown in found:
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            cwd=tmp_path,
            env=environment,
            text=True,
            capture_output=True,
            timeout=TIMEOUT,
        )
        printed = (done.stdout + done.stderr).replace(environment["CHECKPOINTS"], "/checkpoints/run1")
        assert done.returncode == int("DAMAGED" in shown), f"{command}\n{printed}"
        assert not shown or matches(shown, printed), f"{command}\nshown:\n{shown}\nprinted:\n{printed}"


@pytest.mark.slow
def test_the_commands_of_the_readmes_table(environment: dict[str, str], tmp_path: Path) -> None:
    """Each is run as it is, in a folder that has what it names."""
    own = tmp_path / "own"
    shutil.copytree(environment["CHECKPOINTS"], own / "RUN")
    shutil.copytree(trained("0.19.8", "stage1")["stage1"], own / "RUN" / "global_step10")
    flattened(own / "OLD/iter_0001000", {"layer.weight": (6, 4)}, {"layer.weight": (1, 2)}, ranks=3)[0].write(
        settings()
    )
    for name, save in (("ONE", "global_step10"), ("OTHER", "universal")):
        (own / name).symlink_to(own / "RUN" / save)
    shutil.copytree(tree("megatron-core", CORE), own / "Megatron-LM")
    for command in ("init --quiet", "config user.name nobody", "config user.email nobody@example.invalid"):
        subprocess.run(["git", "-C", str(own / "Megatron-LM"), *command.split()], check=True)
    subprocess.run(["pip", "install", "--quiet", "--no-deps", environment["REPO"][7:]], check=True, env=environment)
    results = {"repair": "NEW", "to-universal": "RUN/universal", "migrate": "NEW/iter_0001000", "diff": "DIR"}
    found = IN_A_TABLE.findall(README)
    assert {command.split()[1] for command in found} == {*results, "compare"}
    for command in found:
        home = {**environment, "HOME": str(own)}
        done = subprocess.run(
            ["bash", "-c", command], cwd=own, env=home, text=True, capture_output=True, timeout=TIMEOUT
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        assert (own / results.get(command.split()[1], "RUN")).is_dir(), command


def commands(page: str) -> Iterator[tuple[str, str]]:
    """Each command with its output as on the page; the output is empty if the page shows none."""
    for block in RUN.findall(page):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            text, _, output = part.partition("\n")
            yield text, output.strip("\n")


def matches(shown: str, printed: str) -> bool:
    lines = [".*" if line == "…" else ".*".join(map(re.escape, line.rstrip().split("…"))) for line in shown.split("\n")]
    pattern = "\n".join(f"(?s:{line})" if line == ".*" else line for line in lines)
    return bool(re.fullmatch(pattern, "\n".join(line.rstrip() for line in printed.strip("\n").split("\n"))))


@pytest.mark.parametrize("name", FIXES)
def test_the_page_of_a_fix_begins_with_what_is_seen_and_how_to_get_the_fix(name: str) -> None:
    fix = load(name)
    page = (REPOSITORY / "docs/fixes" / f"{name}.md").read_text(encoding="utf-8")
    title, first = (" ".join(part.split()) for part in page.split("\n\n")[:2])
    assert title == f"# {UPSTREAM[fix.package]}: {fix.symptom}"
    assert ("active by default" in first) is not fix.is_for_upstream_alone
    for begin, end in fix.releases if fix.package != "apex" else ():
        assert (begin if begin == end else f"{begin} to {end}") in first
    assert re.search(r"Upstream: .*\]\(https://.*\)\. Without this package: .+\.$", first)


def test_no_link_leads_nowhere() -> None:
    """Links between files of the repository, and to headings of pages."""
    pages = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]
    links = [(page, *link) for page in pages for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8")))]
    assert len(links) > 100
    assert [f"{page}: {path}#{anchor}" for page, path, anchor in links if not leads(page, path, anchor)] == []


def leads(page: Path, path: str, anchor: str) -> bool:
    target = page.parent / path if path else page
    if not target.exists() or not anchor:
        return target.exists()
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", target.read_text(encoding="utf-8")), re.MULTILINE)
    return anchor in [re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings]
