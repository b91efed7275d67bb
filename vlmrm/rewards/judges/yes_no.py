"""`vllm_evaluate`: one question to be answered by Yes or No, and the judge's probability of Yes."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from pydantic import Field

from vlmrm.errors import RewardError
from vlmrm.rewards.contract import Verdict
from vlmrm.rewards.judges.judge import Judge, JudgeSample, SampleSettings, fence, text_part
from vlmrm.rewards.judges.replies import Reply

QUALITY = (
    "Consider whether it looks natural, is free of artifacts, pleases the eye, shows fine detail, and hangs together "
    "as a whole{matches}. Is this of high quality? Answer Yes or No."
)
MATCHES = ", and whether it shows what the description above asks for"


class YesNoSettings(SampleSettings):
    vlm_model: str = "Qwen3-VL"
    max_concurrent: int = Field(100, ge=1)
    max_retries: int = Field(10, ge=0)
    malformed_retries: int = Field(0, ge=0)  # the probabilities of a first token are the same again
    timeout: float = Field(60.0, gt=0)
    max_tokens: int = Field(1, ge=1)
    """The answer is the first token."""
    top_logprobs: int = Field(20, ge=2)
    """Number of likeliest first tokens that the server returns."""
    canonicalize: bool = False
    """Sum the tokens that are Yes or No in any case and with spaces, not only `Yes` and `No`."""
    question: str | None = None
    """A question to be answered by Yes or No; default: about five aspects of quality."""
    send_prompt: bool = False
    """Send the prompt, fenced, before the question."""


class YesNo(Judge):
    """P(Yes) / (P(Yes) + P(No)) of the first token of the reply: [N] in [0, 1].

    With l the log-probabilities that the server returns: σ(l(Yes) - l(No)); where one of the two is not among the
    likeliest tokens, 1 or 0. A reply without either, or without log-probabilities, is a failure. The formula is
    Flow-Factory's; the score is VQAScore's (Lin et al. 2024), normalised over the two answers.
    """

    Settings = YesNoSettings
    settings: YesNoSettings
    cut_off: ClassVar[tuple[str, ...]] = ("content_filter",)

    def parameters(self) -> dict[str, Any]:
        return {"logprobs": True, "top_logprobs": self.settings.top_logprobs}

    def chat(self, sample: JudgeSample) -> tuple[str, list[dict[str, Any]]]:
        parts = self.media(sample)
        if self.settings.send_prompt:
            parts.append(text_part(f"It was made for this description:\n{fence(sample.prompt)}"))
        question = self.settings.question or QUALITY.format(matches=MATCHES if self.settings.send_prompt else "")
        return "You judge generated pictures and videos.", [*parts, text_part(question)]

    def verdict(self, reply: Reply, sample: JudgeSample) -> Verdict:
        if reply.top_logprobs is None:
            raise RewardError("the server sent no log-probabilities: it must support logprobs and top_logprobs")
        yes, no = (self._probability(reply.top_logprobs, answer) for answer in ("yes", "no"))
        if not yes + no > 0:
            first = ", ".join(repr(token) for token, _ in reply.top_logprobs[:5])
            raise RewardError(f"neither Yes nor No is among its likeliest first tokens ({first}, ...)")
        return Verdict(yes / (yes + no), {"yes": yes, "no": no})

    def _probability(self, tokens: list[tuple[str, float]], answer: str) -> float:
        if self.settings.canonicalize:
            return sum(math.exp(logprob) for token, logprob in tokens if token.strip().lower() == answer)
        return math.exp(dict(tokens).get(answer.capitalize(), -math.inf))
