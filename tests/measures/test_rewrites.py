"""Rewrites keep the meaning: the words, the numbers and the code of a text are still there."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmrm.measures import rewrites
from vlmrm.measures.rewrites import Rewrite

ANSWER = (
    "The image shows **two** dogs, a red one and a black one; they weigh 3.5 kg. It isn't clear why!\n\n"
    "```python\nthe_image = [1, 2.]  # NOT TOUCHED.\n```\n\nUse `the.image`, not *that*."
)
ALL: dict[str, Rewrite] = {
    name: rewrite
    for name in (
        *("padded", "with_markdown", "without_markdown", "hedged", "agreeing", "greeting", "confident", "disclaiming"),
        *("translated", "lower", "upper", "misspelt", "spaced", "without_punctuation", "quoted", "bulleted"),
        *("numbered", "with_emoji", "paraphrased"),
    )
    for rewrite in [getattr(rewrites, name)]
}
ADDING = ("padded", "hedged", "agreeing", "greeting", "confident", "disclaiming", "quoted")
TWICE = ALL.keys() - {"padded", "misspelt", "paraphrased"}  # the same when applied again
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


@pytest.mark.parametrize("name", sorted(ALL.keys() - {"translated", "misspelt", "paraphrased"}))
def test_no_word_is_lost_and_only_additions_add_some(name):
    before, after = Counter(words(ANSWER)), Counter(words(ALL[name](ANSWER)))
    assert before <= after
    assert name in (*ADDING, "with_markdown") or before == after


@pytest.mark.parametrize("name", sorted(TWICE))
@settings(max_examples=30)
@given(text=texts)
def test_a_second_time_changes_nothing(name, text):
    once = ALL[name](text)
    assert ALL[name](once) == once


@pytest.mark.parametrize("name", ADDING)
def test_what_decorates_keeps_the_text_itself(name):
    assert ANSWER in ALL[name](ANSWER) != ANSWER


def test_markdown_inside_markdown_is_stripped_too():
    assert rewrites.without_markdown("# - **a _b_ c**\n1. # d") == "a b c\nd"


def test_each_rewrite_does_what_its_name_says():
    plain = "The dog is red. It weighs 3.5 kg!"
    expected = {
        "with_markdown": "## Answer\n\n**The dog is red.**\n\nIt weighs 3.5 kg!",
        "translated": "Das Hund ist rot. Es weighs 3.5 kg!",
        "lower": "the dog is red. it weighs 3.5 kg!",
        "upper": "THE DOG IS RED. IT WEIGHS 3.5 KG!",
        "spaced": "The  dog  is  red.  It  weighs  3.5  kg!",
        "without_punctuation": "The dog is red It weighs 3.5 kg",
        "quoted": "\u201cThe dog is red. It weighs 3.5 kg!\u201d",
        "bulleted": "- The dog is red.\n- It weighs 3.5 kg!",
        "numbered": "1. The dog is red.\n2. It weighs 3.5 kg!",
        "with_emoji": f"The dog is red.{rewrites.EMOJI} It weighs 3.5 kg!{rewrites.EMOJI}",
        "without_markdown": plain,
    }
    assert {name: ALL[name](plain) for name in expected} == expected


def test_markdown_is_stripped_where_it_is_markup_and_nowhere_else():
    assert rewrites.without_markdown("# Two\n\n- **one** _a_\n2. *b*\n> c\n---\nx") == "Two\n\none a\nb\nc\nx"
    for text in ("2 * 3 * 4 = 24", "snake_case_name", "5 - 3", "a #1 dog", "**"):
        assert rewrites.without_markdown(text) == text


def test_padding_doubles_a_text_and_matches_a_length():
    assert 2 * len(ANSWER) <= len(rewrites.padded(ANSWER)) < 2 * len(ANSWER) + 80
    assert all(filler.endswith(".") for filler in rewrites.FILLERS)
    for length in range(40, 300):
        matched = rewrites.of_length(length)("It is red.")
        assert length - 12 <= len(matched) <= length and matched.startswith("It is red.")
    assert rewrites.of_length(5)("It is red.") == "It is red."


def test_a_typo_leaves_the_letters_of_a_word_and_its_ends():
    changed = 0
    for before, after in zip(words(ANSWER * 5), words(rewrites.misspelt(ANSWER * 5)), strict=True):
        assert sorted(before) == sorted(after) and (before[0], before[-1]) == (after[0], after[-1])
        changed += before != after
    assert 0 < changed < len(words(ANSWER * 5)) / 4


def test_the_table_of_words_translates_into_words_that_it_does_not_translate_again():
    assert not {word.lower() for word in rewrites.GERMAN.values()} & rewrites.GERMAN.keys()
    assert len(set(rewrites.GERMAN)) > 50


def test_a_question_is_asked_in_other_words():
    assert rewrites.paraphrased("What is shown in the image?") == "What is depicted in the picture?"
    assert rewrites.paraphrased("Why?") == "Please answer the following. Why?"
    assert rewrites.repeating("Why?")("Because.") == "You asked: Why?\n\nBecause."
