"""The rewards that guard a text policy, against TRL's arithmetic and Python's own regular expressions."""

from __future__ import annotations

import random

import pytest
from trl.rewards import get_repetition_penalty_reward

from vlmrm.rewards import RewardSet

WORDS = ("a", "The", "the\ncat", "the")
THINK = r"<think>.*</think>\s*<answer>.*</answer>"


def rewards(responses, **settings):
    scored = RewardSet({"name": "guard", **settings})(prompt=["?"] * len(responses), response=responses)
    return scored.rewards["guard"].tolist()


def test_a_response_has_the_format_or_not():
    responses = [
        "<think>\nA cat.\n</think>\n<answer>cat</answer>",
        "<think>A cat.</think><answer>cat</answer> Sure!",
        "cat",
        "",
        [{"role": "assistant", "content": [{"type": "text", "text": "<think></think><answer></answer>"}]}],
    ]
    assert rewards(responses, reward_model="format", pattern=THINK) == [1, 0, 0, 0, 1]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_repetition_is_trl_s_of_the_words(size):
    choose = random.Random(size)
    texts = [" ".join(choose.choices(WORDS, k=choose.randrange(40))) for _ in range(300)]
    words = [text.lower().split() for text in texts]
    numbers = {word: number for number, word in enumerate(sorted({word for row in words for word in row}))}
    theirs = get_repetition_penalty_reward(ngram_size=size, max_penalty=-0.5)
    wanted = theirs(completion_ids=[[numbers[word] for word in row] for row in words])
    assert len(set(wanted)) > 5
    got = rewards(texts, reward_model="repetition", ngram_size=size, max_penalty=-0.5)
    assert got == pytest.approx(wanted, abs=1e-12)
