"""The rewards that guard a text policy, against TRL's arithmetic and Python's own regular expressions."""

from __future__ import annotations

import random

import pytest
from trl.rewards import get_repetition_penalty_reward

from vlmrm.errors import ConfigError, RewardError
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward_model": "format"}, "reward guard: pattern is missing"),
        ({"reward_model": "format", "pattern": "(a"}, "pattern: Input should be a valid regular expression"),
        ({"reward_model": "repetition", "ngram_size": 0}, r"ngram_size: Input should be .* or equal to 1 \(it is 0\)"),
        ({"reward_model": "repetition", "max_penalty": 1.0}, "max_penalty: Input should be less than 0"),
        ({"reward_model": "repetition", "ngrams": 3}, "unknown key 'ngrams': repetition takes ngram_size"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        rewards(["a"], **settings)


def test_a_policy_without_texts_is_refused():
    with pytest.raises(RewardError, match="has no response"):
        RewardSet({"name": "guard", "reward_model": "repetition"})(prompt=["a"])
