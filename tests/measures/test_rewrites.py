"""Rewrites keep the meaning: the words, the numbers and the code of a text are still there."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmrm.measures import changes
from vlmrm.measures.changes import Rewrite

ANSWER = (
    "The image shows **two** dogs, a red one and a black one; they weigh 3.5 kg. It isn't clear why!\n\n"
    "```python\nthe_image = [1, 2.]  # NOT TOUCHED.\n```\n\nUse `the.image`, not *that*."
)
ALL: dict[str, Rewrite] = {name: getattr(changes, name) for name in ("padded", "with_markdown", "agreeing")}
texts = st.text(st.sampled_from("aB é.!?,:*_`#-1>\n") | st.characters(codec="utf-8"), max_size=60)


def words(text: str) -> list[str]:
    return re.findall(r"\w+(?:[.']\w+)*", text.lower())


@pytest.mark.parametrize("name", ALL)
def test_code_stays_as_it_is(name):
    rewritten = ALL[name](ANSWER)
    assert re.findall(r"```.*?```|`[^`\n]+`", rewritten, re.DOTALL) == [
        "```python\nthe_image = [1, 2.]  # NOT TOUCHED.\n```",
        "`the.image`",
    ]
    assert "3.5 kg" in rewritten.lower().replace("  ", " ")


@pytest.mark.parametrize("name", ALL)
def test_no_word_is_lost_and_some_are_added(name):
    before, after = Counter(words(ANSWER)), Counter(words(ALL[name](ANSWER)))
    assert before < after


@pytest.mark.parametrize("name", sorted(ALL.keys() - {"padded"}))
@settings(max_examples=30)
@given(text=texts)
def test_a_second_time_changes_nothing(name, text):
    once = ALL[name](text)
    assert ALL[name](once) == once


def test_markdown_is_a_heading_and_a_bold_sentence():
    plain = "The dog is red. It weighs 3.5 kg!"
    assert changes.with_markdown(plain) == "## Answer\n\n**The dog is red.**\n\nIt weighs 3.5 kg!"


def test_padding_doubles_a_text():
    assert 2 * len(ANSWER) <= len(changes.padded(ANSWER)) < 2 * len(ANSWER) + 80
