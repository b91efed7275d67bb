"""`format` and `repetition`: guards beside a learned reward, which may like texts for the wrong reasons."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from vlmrm.conversation import text_of
from vlmrm.errors import ConfigError
from vlmrm.formats.openai import read_messages
from vlmrm.rewards.contract import PointwiseRewardModel, RewardArguments, RewardModelOutput

if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState

NGRAM_SIZE, MAX_PENALTY = 3, -1.0  # as in TRL and Open-R1


class Format(PointwiseRewardModel):
    """1 where the whole `response` matches the regular expression `pattern`, else 0; a dot may be a line end.

    Raises:
        ConfigError: without a `pattern`, or for one that is none.
    """

    required_fields = ("response",)
    options = ("pattern",)

    def __init__(self, config: RewardArguments, accelerator: Accelerator | PartialState):
        super().__init__(config, accelerator)
        pattern = config.extra_kwargs.get("pattern")
        if not isinstance(pattern, str) or not pattern:
            raise ConfigError(f"reward {config.name}: pattern is {pattern!r}: write a regular expression.")
        try:
            self.pattern: re.Pattern[str] = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError(
                f"reward {config.name}: pattern {pattern!r} is no regular expression: {error}."
            ) from None

    def __call__(self, response: list[Any]) -> RewardModelOutput:  # ty: ignore[incompatible-method-override]
        return RewardModelOutput([float(self.pattern.fullmatch(_text(each)) is not None) for each in response])


class Repetition(PointwiseRewardModel):
    """`max_penalty` times the share of the `response`'s n-grams of words that are repetitions of earlier ones.

    With u different ones of t n-grams the reward is (1 - u / t) max_penalty, 0 for less than n words: the penalty of
    Yeo et al. 2025 (arXiv:2502.03373) as Open-R1 computes it. Words are what white space parts, in lower case.

    Raises:
        ConfigError: for an `ngram_size` below 1, or a `max_penalty` that is none.
    """

    required_fields = ("response",)
    options = ("ngram_size", "max_penalty")

    def __init__(self, config: RewardArguments, accelerator: Accelerator | PartialState):
        super().__init__(config, accelerator)
        size = config.extra_kwargs.get("ngram_size", NGRAM_SIZE)
        penalty = config.extra_kwargs.get("max_penalty", MAX_PENALTY)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"reward {config.name}: ngram_size is {size!r}: write a whole number, at least 1.")
        if isinstance(penalty, bool) or not isinstance(penalty, (int, float)) or not -float("inf") < penalty < 0:
            raise ConfigError(f"reward {config.name}: max_penalty is {penalty!r}: write a number below 0.")
        self.size, self.penalty = size, float(penalty)

    def __call__(self, response: list[Any]) -> RewardModelOutput:  # ty: ignore[incompatible-method-override]
        return RewardModelOutput([self.penalty * repeated(_text(each), self.size) for each in response])


def repeated(text: str, size: int) -> float:
    """Return the share of the n-grams of a text that it has had before, in [0, 1)."""
    words = text.lower().split()
    ngrams = [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def _text(response: Any) -> str:
    return response if isinstance(response, str) else text_of(read_messages(response, "assistant"))
