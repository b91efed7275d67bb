"""`judge:MODEL@http://host:port/v1`: a model behind an OpenAI-compatible API, asked which of two answers is better.

It is `pairwise_judge` of conversations: asked twice of each two answers, so that each is shown first once. An answer's
score is its mean credit over the other answers and both orders: 1 for a win, a half for a tie, 0.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import combinations, permutations
from typing import Any

from PIL import Image as Pictures

from vlmrm.conversation import Conversation, Image, Message, Text
from vlmrm.data.media import open_image, open_video
from vlmrm.errors import ConfigError, RewardError, RowError
from vlmrm.evaluation.entry import Entry, SweepRun
from vlmrm.evaluation.schema import Origin
from vlmrm.evaluation.scorers.conversations import Compared, ConversationScorer, origin_of
from vlmrm.evaluation.scorers.reward import RewardEntry
from vlmrm.evaluation.scorers.spec import FORMS, Spec
from vlmrm.rewards.contract import RewardArguments
from vlmrm.rewards.judges.client import read_settings
from vlmrm.rewards.judges.judge import fence, image_part, spaced, text_part
from vlmrm.rewards.judges.pairwise import Pair, PairwiseJudge, PairwiseSettings
from vlmrm.rewards.judges.replies import Question

logger = logging.getLogger("vlmrm")

# Settings that the specification gives or must not hold, and those of samples in a tournament.
FIXED = ("api_base_url", "api_key", "vlm_model", "request_file", "rounds")


class JudgeEntry(RewardEntry):
    """A judge by its model's name and its address; the model behind it may change unnoticed."""

    def __init__(self, spec: Spec):
        model, at, url = spec.body.partition("@http")
        if not at or not model:
            raise ConfigError(f"scorer {spec.text} lacks a model or an address: write {FORMS['judge']}.")
        spec.take([name for name in PairwiseSettings.model_fields if name not in FIXED])
        extra = {**spec.typed(), "vlm_model": model, "api_base_url": f"http{url}"}
        self.arguments = RewardArguments(spec.text, "pairwise_judge", device="cpu", extra_kwargs=extra)
        read_settings(PairwiseSettings, self.arguments)
        host = url.partition("//")[2].partition("/")[0]
        Entry.__init__(self, f"judge:{host}", model + spec.suffix, spec.text)

    def open(self, run: SweepRun) -> _Judge:  # ty: ignore[incompatible-method-override]
        return _Judge(self, run)


class _Judge(ConversationScorer):
    compares = True

    def __init__(self, entry: JudgeEntry, run: SweepRun):
        super().__init__(entry.path, run)
        self.entry = entry
        self.judge = PairwiseJudge(entry.arguments, None)

    def score_groups(self, groups: Sequence[Sequence[Conversation]]) -> list[Compared | RowError]:
        # By group, the credit of answer i where it is shown first and j second.
        credits: list[dict[Pair, float | RowError]] = [{} for _ in groups]
        questions: dict[tuple[int, Pair], Question] = {}
        for number, group in enumerate(groups):
            for i, j in permutations(range(len(group)), 2):
                try:
                    questions[number, (i, j)] = self._question(group[i], group[j])
                except RowError as error:
                    credits[number][i, j] = error
        asked = self.judge.credits(list(questions.values()))
        for (number, order), credit in zip(questions, asked, strict=True):
            credits[number][order] = RowError(str(credit)) if isinstance(credit, RewardError) else credit
        return [_compared(len(group), of_group) for group, of_group in zip(groups, credits, strict=True)]

    def _question(self, first: Conversation, second: Conversation) -> Question:
        # Two prompts, as of answers to differently worded ones.
        prompts = [first.prompt, *([second.prompt] if second.prompt != first.prompt else [])]
        prompt = [
            part
            for messages in prompts
            for part in (
                text_part("The prompt:"),
                *(part for turn in messages for part in (text_part(f"{turn.role}:"), *self._parts(turn))),
            )
        ]
        return self.judge.asked(prompt, self._parts(first.answer), self._parts(second.answer))

    def _parts(self, message: Message) -> list[dict[str, Any]]:
        """Return the content of a message as the API takes it: texts fenced, images and frames as data URIs."""
        parts: list[dict[str, Any]] = []
        for part in message.content:
            if isinstance(part, Text):
                parts.append(text_part(fence(part.text)))
            elif isinstance(part, Image):
                parts.append(image_part(open_image(part.reference)))
            else:
                frames, _ = open_video(part, self.reading.video_fps, self.reading.video_max_frames)
                pictures = [Pictures.fromarray(frame.permute(1, 2, 0).numpy()) for frame in frames]
                parts += map(image_part, spaced(pictures, self.judge.settings.max_frames))
        return parts

    def close(self) -> None:
        usage = self.judge.client.usage
        tokens = f"{usage['prompt_tokens']:,} prompt and {usage['completion_tokens']:,} completion tokens"
        logger.info("%s: %d calls, %s", self.name, usage["calls"], tokens)

    def origin(self) -> Origin:
        settings, usage = self.judge.settings, self.judge.client.usage
        details = {"model": settings.vlm_model, "url": settings.api_base_url}
        details |= {name: str(usage[name]) for name in ("calls", "prompt_tokens", "completion_tokens")}
        return origin_of(self.entry.digest(), **details)


def _compared(count: int, credits: Mapping[Pair, float | RowError]) -> Compared | RowError:
    """Return the mean credit of each of `count` answers, and the verdicts.

    `credits[i, j]` is what answer i got where it was shown first, and j second.
    """
    failure = next((credit for credit in credits.values() if isinstance(credit, RowError)), None)
    if failure is not None or count < 2:
        return failure or RowError("it has one answer alone, and a judge of pairs compares two")
    first = {pair: float(credit) for pair, credit in credits.items() if not isinstance(credit, RowError)}
    totals = [sum(first[i, j] + 1 - first[j, i] for j in range(count) if j != i) for i in range(count)]
    scores = [total / (2 * (count - 1)) for total in totals]
    return Compared(scores, {(i, j): (first[i, j], 1 - first[j, i]) for i, j in combinations(range(count), 2)})
