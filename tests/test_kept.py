"""Plans that are kept between processes: taken up where nothing has changed, and nowhere else."""

import hashlib
import marshal
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies

from ckpt_patches.engine import plan_cache
from ckpt_patches.engine.plan import Outcome, TreePlan, plan_tree
from ckpt_patches.engine.plan_cache import plan_or_kept
from ckpt_patches.engine.registry import CORE
from edits import as_bytes
from small_tree import IS_PATCHED, MODULE, UPSTREAM, make, make_two, python
from upstream import REPOSITORY

NAMES = ["numpy2_product"]


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder for caches, and a process that may write there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path / "caches" / "ckpt-patches"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[TreePlan]:
    """The plans that were made, and not taken from where they are kept."""
    plans: list[TreePlan] = []

    def noted(*arguments: Any) -> TreePlan:
        plans.append(plan_tree(*arguments))
        return plans[-1]

    monkeypatch.setattr(plan_cache, "plan_tree", noted)
    return plans


def files_in(caches: Path) -> list[Path]:
    return sorted(caches.iterdir()) if caches.exists() else []


def test_a_kept_plan_is_the_one_that_was_made(tmp_path: Path, caches: Path, made: list[TreePlan]) -> None:
    make_two(tmp_path / "tree")
    plans = [plan_or_kept(str(tmp_path / "tree"), CORE, NAMES) for _ in range(2)]
    assert len(made) == 1
    assert len(plans[0].files) == 2
    assert as_bytes(plans[0]) == as_bytes(plans[1])


def test_what_a_process_has_kept_the_next_one_runs(tmp_path: Path, caches: Path) -> None:
    path = make(tmp_path / "tree")
    look = f"import ckpt_patches.engine.plan_cache as k; k.plan_tree = None; {IS_PATCHED};"
    look += " print(m.size.__code__.co_filename)"
    assert python("-c", IS_PATCHED, tree=tmp_path / "tree").stdout.split() == ["True"]
    assert python("-c", look, tree=tmp_path / "tree").stdout.split() == ["True", str(path)]


def change_a_text(first: Path, second: Path) -> None:
    first.write_text(UPSTREAM.replace("shape", "sizes"))


def change_a_text_in_its_size_and_time(first: Path, second: Path) -> None:
    before = first.stat()
    first.write_text(UPSTREAM.replace("shape", "SHAPE"))
    os.utime(first, ns=(before.st_atime_ns, before.st_mtime_ns))


def remove_a_file(first: Path, second: Path) -> None:
    second.unlink()


def make_a_file_unreadable(first: Path, second: Path) -> None:
    second.unlink()
    second.mkdir()


@pytest.mark.parametrize(
    "change", [change_a_text, change_a_text_in_its_size_and_time, remove_a_file, make_a_file_unreadable]
)
def test_a_tree_that_has_changed_is_planned_anew(
    change: Callable[[Path, Path], None], tmp_path: Path, caches: Path, made: list[TreePlan]
) -> None:
    first, second = make_two(tmp_path / "tree")
    plan_or_kept(str(tmp_path / "tree"), CORE, NAMES)
    change(first, second)
    again = plan_or_kept(str(tmp_path / "tree"), CORE, NAMES)
    assert len(made) == 2
    assert as_bytes(again) == as_bytes(plan_tree(str(tmp_path / "tree"), CORE, NAMES))
    assert len(files_in(caches)) == 1  # the old one's place is taken


@pytest.mark.parametrize("suffix", ["", "c"])
def test_a_file_that_was_not_there_is_looked_at(
    suffix: str, tmp_path: Path, caches: Path, made: list[TreePlan]
) -> None:
    """Also one with bytecode alone: then the fix does not match."""
    _, second = make_two(tmp_path / "tree")
    second.unlink()
    plan_or_kept(str(tmp_path / "tree"), CORE, NAMES)
    Path(f"{second}{suffix}").write_text(UPSTREAM)
    again = plan_or_kept(str(tmp_path / "tree"), CORE, NAMES)
    assert len(made) == 2
    assert again.results[0].outcome is (Outcome.NO_MATCH if suffix else Outcome.APPLIES)


def test_plans_of_other_code_of_ours_are_not_taken(tmp_path: Path, caches: Path) -> None:
    """An update of this package, of the same size and time as before."""
    ours, root = tmp_path / "ours", tmp_path / "tree"
    for name in ("ckpt_patches", "megatron/patches", "deepspeed_patches"):
        shutil.copytree(REPOSITORY / name, ours / name, ignore=shutil.ignore_patterns("__pycache__"))
    make(root)
    code = f"import sys; sys.path.insert(0, {str(ours)!r}); import ckpt_patches.engine.plan_cache as k\n"
    code += f"print(k.plan_or_kept({str(root)!r}, {CORE!r}, {NAMES!r}).files[{MODULE!r}].patched.count(b'# product'))"
    assert python("-S", "-c", code, tree=ours).stdout.split() == ["0"]
    fix = ours / "megatron/patches/numpy2_product.py"
    before = fix.stat()
    text = fix.read_text()
    assert "product" in text
    fix.write_text(text.replace("product", "Product", 1))  # in its first words
    os.utime(fix, ns=(before.st_atime_ns, before.st_mtime_ns))
    (file,) = files_in(caches)
    kept_at = file.stat().st_mtime_ns
    assert python("-S", "-c", code, tree=ours).stdout.split() == ["0"]
    assert files_in(caches)[0].stat().st_mtime_ns > kept_at


def test_what_does_not_match_is_not_kept(tmp_path: Path, caches: Path) -> None:
    """Its reason may be gone the next time."""
    make(tmp_path / "tree", "import numpy as np\n\n\ndef size(shape:\n    return np.product(shape)\n")
    assert plan_or_kept(str(tmp_path / "tree"), CORE, NAMES).named(Outcome.NO_MATCH) == NAMES
    assert files_in(caches) == []


@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], max_examples=50)
@hypothesis.given(
    place=strategies.floats(0, 1, exclude_max=True), bit=strategies.integers(0, 7), cut=strategies.booleans()
)
def test_a_file_that_is_not_whole_is_not_run(
    place: float, bit: int, cut: bool, tmp_path: Path, caches: Path, made: list[TreePlan]
) -> None:
    root = tmp_path / "tree"
    if not root.exists():
        make(root)
    wanted = as_bytes(plan_or_kept(str(root), CORE, NAMES))
    (file,) = files_in(caches)
    data = bytearray(file.read_bytes())
    index = int(place * len(data))
    data[index] ^= 1 << bit
    file.write_bytes(data[:index] if cut else data)
    before = len(made)
    assert as_bytes(plan_or_kept(str(root), CORE, NAMES)) == wanted
    assert len(made) == before + 1


@pytest.mark.parametrize("of_all", ["file", "folder"])
def test_what_others_can_write_is_not_run(of_all: str, tmp_path: Path, caches: Path, made: list[TreePlan]) -> None:
    make(tmp_path / "tree")
    plan_or_kept(str(tmp_path / "tree"), CORE, NAMES)
    (file,) = files_in(caches)
    (file if of_all == "file" else caches).chmod(0o777)
    before = file.read_bytes()
    file.write_bytes(before)
    plan_or_kept(str(tmp_path / "tree"), CORE, NAMES)
    assert len(made) == 2
    if of_all == "folder":  # nor is anything put there
        assert [file.read_bytes()] == [path.read_bytes() for path in files_in(caches)]
    else:
        assert files_in(caches)[0].stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_what_belongs_to_another_user_is_not_run(tmp_path: Path, caches: Path, made: list[TreePlan]) -> None:
    make(tmp_path / "tree")
    plan_or_kept(str(tmp_path / "tree"), CORE, NAMES)
    os.chown(files_in(caches)[0], 12345, 12345)
    plan_or_kept(str(tmp_path / "tree"), CORE, NAMES)
    assert len(made) == 2


def test_other_ranks_take_and_do_not_keep(
    tmp_path: Path, caches: Path, made: list[TreePlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of processes that write the same file at once are of no use."""
    make(tmp_path / "tree")
    monkeypatch.setenv("RANK", "3")
    plan_or_kept(str(tmp_path / "tree"), CORE, NAMES)
    assert files_in(caches) == []
    for rank in ("0", "3"):
        monkeypatch.setenv("RANK", rank)
        plan_or_kept(str(tmp_path / "tree"), CORE, NAMES)
    assert len(made) == 2


def test_nothing_is_kept_where_python_writes_no_bytecode(
    tmp_path: Path, caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "tree")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    plan_or_kept(str(tmp_path / "tree"), CORE, NAMES)
    assert files_in(caches) == []


@pytest.mark.parametrize("place", ["/proc/nowhere", "relative", "/dev/null"])
def test_where_nothing_can_be_kept_a_plan_is_made(
    place: str, tmp_path: Path, caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "tree")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", place)
    assert plan_or_kept(str(tmp_path / "tree"), CORE, NAMES).named(Outcome.APPLIES) == NAMES
    assert not (tmp_path / "relative").exists()


def test_a_link_in_the_place_of_the_folder_is_not_followed(tmp_path: Path, caches: Path, made: list[TreePlan]) -> None:
    """It may lead to a folder of root's."""
    make(tmp_path / "tree")
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    caches.parent.mkdir()
    caches.symlink_to(tmp_path / "elsewhere")
    plan_or_kept(str(tmp_path / "tree"), CORE, NAMES)
    assert files_in(tmp_path / "elsewhere") == []


def test_files_of_others_in_the_folder_stay(tmp_path: Path, caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MOST", 1)
    caches.mkdir(parents=True, mode=0o700)
    (caches / "notes.txt").touch()
    (caches / "folder").mkdir()
    for number in range(3):
        make(tmp_path / f"tree{number}")
        plan_or_kept(str(tmp_path / f"tree{number}"), CORE, NAMES)
    assert len(files_in(caches)) == 3
    assert {"notes.txt", "folder"} < {path.name for path in files_in(caches)}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_no_folder_is_made_in_the_home_of_another_user(tmp_path: Path, caches: Path) -> None:
    make(tmp_path / "tree")
    os.chown(tmp_path, 12345, 12345)
    plan_or_kept(str(tmp_path / "tree"), CORE, NAMES)
    assert not caches.parent.exists()


def test_a_process_whose_package_was_updated_keeps_and_takes_nothing(
    tmp_path: Path, caches: Path, made: list[TreePlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs the engine that it has loaded, and not the one on disk."""
    make(tmp_path / "tree")
    with monkeypatch.context() as before:
        before.setattr(plan_cache, "_LOADED", b"of another release")
        plan_or_kept(str(tmp_path / "tree"), CORE, NAMES)
        assert files_in(caches) == []
    for _ in range(2):
        plan_or_kept(str(tmp_path / "tree"), CORE, NAMES)
    assert len(made) == 2


@pytest.mark.parametrize("payload", [b"no marshal", marshal.dumps((1, 2))])
def test_a_file_of_another_layout_is_not_taken(
    payload: bytes, tmp_path: Path, caches: Path, made: list[TreePlan]
) -> None:
    """With the right key and digest."""
    make(tmp_path / "tree")
    plan_or_kept(str(tmp_path / "tree"), CORE, NAMES)
    (file,) = files_in(caches)
    head = file.read_bytes()[: len(plan_cache._MAGIC) + plan_cache._DIGEST]
    file.write_bytes(head + hashlib.blake2b(payload, digest_size=plan_cache._DIGEST).digest() + payload)
    plan_or_kept(str(tmp_path / "tree"), CORE, NAMES)
    assert len(made) == 2


def test_no_more_than_a_few_are_kept(tmp_path: Path, caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MOST", 3)
    for number in range(5):
        root = tmp_path / f"tree{number}"
        make(root)
        plan_or_kept(str(root), CORE, NAMES)
        os.utime(max(files_in(caches), key=lambda path: path.stat().st_mtime_ns), ns=(number, number))
    assert len(files_in(caches)) == 3
    assert min(path.stat().st_mtime_ns for path in files_in(caches)) == 2
