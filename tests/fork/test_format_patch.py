"""The messages of patches for upstream, for a reviewer of one release."""

import os
from pathlib import Path

import pytest

from ckpt_patches.cli import command_line
from ckpt_patches.engine.fix import load, sentence
from ckpt_patches.engine.format_patch import Message, message_in, message_of, plan_series, trailers
from ckpt_patches.engine.registry import CORE, PACKAGES
from ckpt_patches.errors import UserError
from registered import FIXES
from upstream import newest, tree


def message(text: str, change: str = "+ y") -> Message:
    return message_in(text, "one", change.encode())


def test_paragraphs_are_chosen_by_what_the_patch_changes() -> None:
    text = (
        "# one\n\n## Change: Fix it\nAlways.\n\n<!-- if=added -->\n*Up to 1.0:* If.\n\n"
        "<!-- unless=added -->\nUnless.\n\n## Notes\nNo.\n"
    )
    assert message(text, "+ added") == message(text, "- added") == ("Fix it", "Always.\n\nIf.")
    assert message(text, "  added").body == "Always.\n\nUnless."


def test_a_message_has_lists_and_addresses_on_lines_of_their_own() -> None:
    text = f"## Change: Fix it\n*To 1.0:* It *is* a * b:\n\n- {'one ' * 20}\n- two\n\n<https://example.org/1>\n"
    body = f"It *is* a * b:\n\n- {'one ' * 16}one\n  one one one\n- two\n\nhttps://example.org/1"
    assert message(text).body == body


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# one\n", "## Change: …"),
        ("# one\n\n## Change\nIt.\n", "## Change: …"),
        ("## Change: Fix it\n\n## Notes\nNo.\n", "a paragraph for this patch below 'Fix it'"),
        ("## Change: Fix it\n<!-- if=x -->\nFor others.\n", "a paragraph for this patch below 'Fix it'"),
    ],
)
def test_a_page_without_a_message_for_the_patch_is_an_error(text: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        message(text)


def test_dependencies_come_first_and_are_named_by_their_subjects(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("NAME", "Zoë Å"), ("EMAIL", "zoe@example.org")):
        monkeypatch.setenv(f"GIT_AUTHOR_{name}", value)
    name, other = "hybrid_offload_resume", "torch_adam_step"
    assert other in load(name).depends_on
    files = plan_series(str(tree("megatron-core", newest("megatron-core"))), CORE, [name]).files
    assert list(files) == [f"0001-{other}.patch", f"0002-{name}.patch"]
    subject, last = message_of(other, b"").subject, files[f"0002-{name}.patch"].decode()
    assert f"\n\nDepends on: {subject}\nAffected: megatron-core " in last
    assert "Subject: [PATCH 2/2] " in last


@pytest.mark.parametrize("name", FIXES)
def test_a_message_ends_with_the_releases_a_test_and_every_link(name: str) -> None:
    fix = load(name)
    last = trailers(fix)
    assert last[0].startswith(f"Affected: {PACKAGES[fix.package].distribution} {fix.releases[0][0]}")
    assert (f"Fails without this change: pytest {fix.test}" in last) is bool(fix.test)
    links = [line.partition(": ") for line in last if line.startswith(("Fixes: ", "See: "))]
    assert {link for _, _, link in links} == {*fix.upstream}
    assert all("/issues/" in link for word, _, link in links if word == "Fixes")


@pytest.mark.parametrize("name", [name for name in FIXES if not load(name).test])
def test_what_the_newest_release_does_not_need_is_a_patch_with_the_sentence_of_the_fix(name: str) -> None:
    found = message_of(name, b"diff")
    assert len(found.subject) <= 72
    assert " ".join(found.body.split()) == sentence(name)
    assert not any("Fails without" in line for line in trailers(load(name)))


def test_a_folder_with_another_series_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "0001-old.patch").touch()
    command = [
        "diff",
        "torch_adam_step",
        "--split",
        str(tmp_path),
        "--tree",
        str(tree("megatron-core", newest("megatron-core"))),
    ]
    assert command_line.main(command) == 2
    assert "0001-old.patch" in capsys.readouterr().err


def test_a_diff_has_what_its_fix_depends_on(capfd: pytest.CaptureFixture[str]) -> None:
    on = ("--tree", str(tree("megatron-core", newest("megatron-core"))))
    assert command_line.main(["diff", "hybrid_offload_resume", *on]) == 0
    alone = capfd.readouterr().out
    assert command_line.main(["diff", "hybrid_offload_resume", "torch_adam_step", *on]) == 0
    assert capfd.readouterr().out == alone


def test_nobody_is_made_the_author(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = tmp_path / "gitconfig"
    config.write_text("[user]\nuseConfigOnly = true\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    for name in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "EMAIL"):
        monkeypatch.delenv(name, raising=False)
    split = ["--split", str(tmp_path / "patches"), "--tree", str(tree("deepspeed", newest("deepspeed")))]
    assert command_line.main(["diff", "zero3_universal_groups", *split]) == 2
    assert "set git's user.name and user.email" in capsys.readouterr().err
    assert not list((tmp_path / "patches").glob("*"))
