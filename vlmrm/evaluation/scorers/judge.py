"""`judge:MODEL@http://host:port/v1`: a model behind an OpenAI-compatible API, asked which of two answers is better.

Of each two answers a pairwise judge is asked twice, so that each is shown first once. An answer's score is its mean
credit over the other answers and both orders: 1 for a win, a half for a tie, 0. `?mode=pointwise` asks for a score of
each answer alone, from 1 to 10. The other options are those of every judge (`JudgeSettings`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from PIL import Image as Pictures

from vlmrm.conversation import Conversation, Image, Messages, Text
from vlmrm.data.media import open_image, open_video
from vlmrm.errors import ConfigError, RewardError, RowError
from vlmrm.evaluation.entry import Entry, SweepRun
from vlmrm.evaluation.schema import Origin
from vlmrm.evaluation.scorers.conversations import Compared, ConversationScorer, origin_of
from vlmrm.evaluation.scorers.spec import FORMS, Spec
from vlmrm.rewards.contract import RewardArguments
from vlmrm.rewards.judges.client import JudgeClient, JudgeSettings, read_settings
from vlmrm.rewards.judges.judge import FENCED, check_complete, fence, frame_parts, image_part, text_part
from vlmrm.rewards.judges.replies import Question, Reply, json_objects, read_score, without_thinking
from vlmrm.settings import did_you_mean

logger = logging.getLogger("vlmrm")

MODES = ("pairwise", "pointwise")
FIXED = ("api_base_url", "api_key", "vlm_model")  # settings that the specification gives, or must not hold
BEST = 10
CREDITS = {"a": 1.0, "b": 0.0, "tie": 0.5}

PAIRWISE = (
    "You are a careful, impartial judge. You are shown a prompt and two answers to it, A and B, and decide which one "
    "people would prefer: it does what the prompt asks, is true of every picture shown, and helps more. The order of "
    "the answers and their length mean nothing."
)
PAIRWISE_FORM = (
    'Reply with one JSON object, first a short justification, then the verdict, "A", "B", or "tie" where neither is '
    'better: {"justification": "...", "verdict": "..."}'
)
POINTWISE = (
    "You are a careful, impartial judge. You are shown a prompt and an answer to it, and score how much people would "
    "like it: whether it does what the prompt asks, is true of every picture shown, and helps. Length by itself means "
    "nothing."
)
POINTWISE_FORM = (
    f"Reply with one JSON object, first a short justification, then the score, a number from 1 (worst) to {BEST} "
    '(best): {"justification": "...", "score": ...}'
)


class JudgeEntry(Entry):
    """A judge by its model's name and its address."""

    def __init__(self, spec: Spec):
        model, at, url = spec.body.partition("@http")
        if not at or not model:
            raise ConfigError(f"scorer {spec.text} lacks a model or an address: write {FORMS['judge']}.")
        names = ("mode", *(name for name in JudgeSettings.model_fields if name not in FIXED))
        spec.take(names)
        options = spec.typed()
        self.mode = options.pop("mode", MODES[0])
        if self.mode not in MODES:
            choose = f": choose from {', '.join(MODES)}."
            raise ConfigError(
                f"scorer {spec.text}: there is no mode {self.mode}{did_you_mean(self.mode, MODES, choose)}"
            )
        extra = {**options, "vlm_model": model, "api_base_url": f"http{url}"}
        self.settings = read_settings(JudgeSettings, RewardArguments(name=spec.text, extra_kwargs=extra))
        host = url.partition("//")[2].partition("/")[0]
        super().__init__(f"judge:{host}", model + spec.suffix, spec.text)

    def digest(self) -> str:
        """Return the digest of what it is asked and how; the model behind the address may change unnoticed."""
        decides = self.settings.model_dump(mode="json", include={"vlm_model", "api_base_url", *_DECIDING})
        wording = (PAIRWISE, PAIRWISE_FORM) if self.mode == "pairwise" else (POINTWISE, POINTWISE_FORM)
        return hashlib.sha256(json.dumps([self.mode, wording, decides], sort_keys=True).encode()).hexdigest()

    def open(self, run: SweepRun) -> _Judge:
        return (_PairwiseJudge if self.mode == "pairwise" else _Judge)(self, run)


_DECIDING = ("temperature", "max_tokens", "max_frames")


class _Judge(ConversationScorer):
    """A judge that scores each answer alone."""

    def __init__(self, entry: JudgeEntry, run: SweepRun):
        super().__init__(entry.path, run)
        self.entry = entry
        self.client = JudgeClient(entry.settings)

    def score_each(self, conversations: Sequence[Conversation]) -> list[float | RowError]:
        return self._asked([self._pointwise(conversation) for conversation in conversations], _read_score)

    def _pointwise(self, conversation: Conversation) -> Question | RowError:
        try:
            parts = [*self._prompt(conversation.prompt), *self._titled("The answer", conversation)]
        except RowError as error:
            return error
        return self._question(POINTWISE, parts, POINTWISE_FORM, "score", {"type": "number"})

    def _asked(self, questions: Sequence[Question | RowError], read: Any) -> list[float | RowError]:
        """Return what `read` makes of the reply to each question, or why there is none."""
        answerable = [question for question in questions if isinstance(question, Question)]
        max_tokens = self.entry.settings.max_tokens
        replies = iter(self.client.ask(answerable, lambda _, reply: _read(reply, read, max_tokens)))
        results: list[float | RowError] = []
        for question in questions:
            if isinstance(question, RowError):
                results.append(question)
                continue
            reply = next(replies)
            try:
                value = _read(reply, read, max_tokens)
            except RewardError as error:
                results.append(RowError(str(error)))
                continue
            assert isinstance(reply, Reply)
            self.client.keep(question, reply)
            results.append(value)
        return results

    def _question(
        self, system: str, parts: list[dict[str, Any]], form: str, name: str, kind: dict[str, Any]
    ) -> Question:
        settings = self.entry.settings
        properties = {"justification": {"type": "string"}, name: kind}
        schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        messages = [
            {"role": "system", "content": f"{system}\n{FENCED}"},
            {"role": "user", "content": [*parts, text_part(form)]},
        ]
        parameters = {
            "temperature": settings.temperature,
            "max_completion_tokens": settings.max_tokens,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "judgement", "strict": True, "schema": schema},
            },
        }
        return Question.of(settings.vlm_model, messages, parameters)

    def _prompt(self, prompt: Messages) -> list[dict[str, Any]]:
        if not prompt:
            return [text_part("There is no prompt.")]
        return [
            text_part("The prompt:"),
            *(part for m in prompt for part in (text_part(f"{m.role}:"), *self._parts(m))),
        ]

    def _titled(self, title: str, conversation: Conversation) -> list[dict[str, Any]]:
        return [text_part(f"{title}:"), *self._parts(conversation.answer)]

    def _parts(self, message: Any) -> list[dict[str, Any]]:
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
                parts += frame_parts(pictures, self.entry.settings.max_frames)
        return parts

    def close(self) -> None:
        usage = self.client.usage
        tokens = f"{usage.prompt_tokens:,} prompt and {usage.completion_tokens:,} completion tokens"
        logger.info("%s: %d calls, %s, cost %.4f", self.name, usage.calls, tokens, usage.cost)

    def origin(self) -> Origin:
        settings = self.entry.settings
        details = {"model": settings.vlm_model, "url": settings.api_base_url, "mode": self.entry.mode}
        details |= {"calls": str(self.client.usage.calls), "cost": f"{self.client.usage.cost:.4f}"}
        return origin_of(self.entry.digest(), **details)


class _PairwiseJudge(_Judge):
    """A judge that compares each two answers of a comparison, in both orders."""

    compares = True

    def score_groups(self, groups: Sequence[Sequence[Conversation]]) -> list[Compared | RowError]:
        orders = [
            (number, i, j)
            for number, group in enumerate(groups)
            for pair in combinations(range(len(group)), 2)
            for i, j in (pair, pair[::-1])
        ]
        questions = [self._pairwise(groups[number][i], groups[number][j]) for number, i, j in orders]
        # By group, the credit of answer i where it is shown first and j second.
        credits: list[dict[tuple[int, int], float | RowError]] = [{} for _ in groups]
        for (number, i, j), credit in zip(orders, self._asked(questions, _read_verdict), strict=True):
            credits[number][i, j] = credit
        return [_compared(len(group), of_group) for group, of_group in zip(groups, credits, strict=True)]

    def _pairwise(self, first: Conversation, second: Conversation) -> Question | RowError:
        try:
            answers = [*self._titled("Answer A", first), *self._titled("Answer B", second)]
            if first.prompt == second.prompt:
                parts = [*self._prompt(first.prompt), *answers]
            else:  # as of answers to differently worded prompts
                prompts = (conversation.prompt for conversation in (first, second))
                parts = [*(part for prompt in prompts for part in self._prompt(prompt)), *answers]
        except RowError as error:
            return error
        kind = {"type": "string", "enum": ["A", "B", "tie"]}
        return self._question(PAIRWISE, parts, PAIRWISE_FORM, "verdict", kind)


def _compared(count: int, credits: Mapping[tuple[int, int], float | RowError]) -> Compared | RowError:
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


def _read_verdict(text: str) -> float | None:
    verdict = re.sub(r"[^a-z]", "", (_last(text, "verdict") or "").lower()).removeprefix("answer")
    return CREDITS.get(verdict)


def _read_score(text: str) -> float | None:
    score = read_score(_last(text, "score") or "", BEST)
    return score if isinstance(score, float) and 1 <= score <= BEST else None


def _read(reply: Reply | RewardError, read: Any, max_tokens: int) -> float:
    if isinstance(reply, RewardError):
        raise reply
    begins = check_complete(reply, max_tokens)
    value = read(without_thinking(reply.text))
    if value is None:
        raise RewardError(f"the reply has no verdict in the form that was asked for; {begins}")
    return value


def _last(text: str, name: str) -> str | None:
    """Return the value under `name` of the last JSON object in a text, else of the last line `name: value`."""
    values = [str(value[name]) for value in json_objects(text) if name in value]
    values = values or re.findall(rf"(?im)^[\s#*_>-]*{name}[\s*_]*[:=](.*)$", text)
    return values[-1] if values else None
