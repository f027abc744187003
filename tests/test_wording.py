"""Each banned phrase is found, in pages, texts, docstrings and comments; the repository contains none."""

from pathlib import Path

import pytest

import wording

pytestmark = pytest.mark.quick

# One sentence per phrase, in the order of the list.
SENTENCES = [
    "a rank dies of it",
    "all ranks are told",
    "the error is said",
    "it gives no word",
    "is held against the record",
    "lays fixes over a release",
    "signs of life",
    "the kept plan",
    "the checkpoint is whole",
    "Who trains.",
    "there is none",
    "twice is as good as once",
    "this mends the file",
    "a stand-in for a GPU",
    "the header says",
    "the files at hand",
    "a turned bit",
    "in the same words",
]


@pytest.mark.parametrize(("pattern", "sentence"), list(zip(wording.BANNED, SENTENCES, strict=True)))
def test_each_phrase_is_found(pattern: str, sentence: str) -> None:
    assert [better for _, _, better in wording.findings(sentence)] == [wording.BANNED[pattern]]
    wrapped = sentence.replace(" ", "\n")
    assert [better for _, _, better in wording.findings(wrapped)] == [wording.BANNED[pattern]]


def test_a_finding_has_its_line() -> None:
    assert list(wording.findings("# Title\n\nA rank\ndies of it.\n")) == [(4, "dies of", "fails with, raises")]


def test_code_in_fences_and_the_verdict_are_left_out() -> None:
    assert list(wording.findings("```text\nthere is none\n```\nWHOLE: a checkpoint that is complete\n")) == []


def test_texts_docstrings_and_comments_of_programs_are_read(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text('"""It dies of it."""\nprint(f"{1} is told")  # a rank is\n# said\n\nx = 1  # one\n\n# two\n')
    texts = ["It dies of it.", " is told", "a rank is\nsaid", "said", "one", "two"]
    assert sorted(text for _, text in wording.texts(path)) == sorted(texts)


def test_no_banned_phrase_is_left() -> None:
    assert wording.complaints() == []
