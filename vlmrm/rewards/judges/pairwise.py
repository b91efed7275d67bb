"""`pairwise_judge`: each sample's chance to beat another of its group, by a judge that compares two at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from PIL import Image
from pydantic import Field

from vlmrm.errors import MediaError, RewardError
from vlmrm.rewards.contract import GroupwiseRewardModel, RewardArguments, RewardModelOutput
from vlmrm.rewards.judges.client import JudgeClient, not_denied
from vlmrm.rewards.judges.judge import (
    FENCED,
    JudgeSample,
    SampleSettings,
    check_complete,
    fence,
    image_part,
    read_sample_settings,
    shown_frames,
    text_part,
    usage_counters,
)
from vlmrm.rewards.judges.replies import Question, Reply, json_objects, without_thinking
from vlmrm.rewards.judges.tournament import Pair, play, strengths, win_rates

if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState

SYSTEM = "You are a careful, impartial judge of generated pictures. Their order means nothing."
QUESTION = (
    "Both were made for the text. Which one shows better what it asks for, and is of the better quality? Reply with "
    'one JSON object: {"justification": "...", "winner": "Image 1"}, with the winner "Image 1", "Image 2" or "tie".'
)
WINNER = re.compile(r"\b(?:image|video|answer)\s*([12])\b", re.IGNORECASE)
BETTER = re.compile(r"\b(?:image|video)\s*([12])\s+(?:is|wins)\b(?!\s+(?:not|worse))", re.IGNORECASE)
TIE = re.compile(r"\b(?:tie|both|equal(?:ly)?)\b", re.IGNORECASE)
SCORED = re.compile(r"\b(?:image|video)\s*([12])\b[^:\n]{0,20}[:：]\s*([-+]?\d+(?:\.\d+)?)\b", re.IGNORECASE)
DECIMAL = re.compile(r"[-+]?\d+\.\d+")


class PairwiseSettings(SampleSettings):
    rounds: int = Field(8, ge=1)
    """Rounds of the tournament, in each of which a sample meets one other, in both orders."""


class PairwiseJudge(GroupwiseRewardModel):
    """The chance to beat another sample of the group, by the strengths of a Bradley-Terry model: [N] in [0, 1].

    In each of `rounds` rounds every sample meets another of about its strength (a Swiss tournament); in a group so
    small that they suffice, all meet. A pair is shown in both orders, and its credit is the mean, so that a judge that
    prefers a place gives a tie. Pairs of which a verdict is missing do not count; a sample without any pair fails. The
    replies of UnifiedReward 2.0, Think, Flex and Edit to pairs are read, asked by their `request_file`.
    """

    required_fields = ("prompt",)
    text_prompts = True
    options = tuple(PairwiseSettings.model_fields)

    def __init__(self, config: RewardArguments, accelerator: Accelerator | PartialState | None):
        super().__init__(config, accelerator)
        self.settings, self.request = read_sample_settings(PairwiseSettings, config, ("first", "second"))
        self.deterministic = self.settings.temperature == 0
        self.client = JudgeClient(self.settings)

    def __call__(  # ty: ignore[incompatible-method-override]
        self,
        prompt: list[str],
        image: list[Image.Image] | None = None,
        video: list[list[Image.Image]] | None = None,
        condition_images: list[list[Image.Image]] | None = None,
    ) -> RewardModelOutput:
        none = [None] * len(prompt)
        columns = zip(prompt, image or none, video or none, condition_images or none, strict=True)
        group = _Group([JudgeSample(*values) for values in columns], self)
        credits = play(len(group.samples), self.settings.rounds, group.compare)
        values = strengths(len(group.samples), credits)
        met = [sum(index in pair for pair in credits) for index in range(len(group.samples))]
        failures = {index: group.reason(index) for index, count in enumerate(met) if not count}
        rewards = [math.nan if index in failures else rate for index, rate in enumerate(win_rates(values).tolist())]
        consistent = [group.consistent(index) for index in range(len(group.samples))]
        info = {"strength": values.tolist(), "pairs": met, "consistent": consistent}
        return RewardModelOutput(rewards, info, failures)

    def question(self, first: JudgeSample, second: JudgeSample) -> Question:
        """Return the question which of two samples is better.

        Raises:
            RewardError: when one of them has no picture.
        """
        one, other = (shown_frames(sample, self.settings.max_frames) for sample in (first, second))
        sources = first.sources or ()
        if self.request is not None:
            return self.request.question(first.prompt, {"first": one, "second": other, "source": sources})
        shown: list[dict[str, Any]] = []
        for title, pictures in (("Made from:", sources), ("Image 1:", one), ("Image 2:", other)):
            shown += [text_part(title), *map(image_part, pictures)] if pictures else []
        parts = [text_part(f"The text:\n{fence(first.prompt)}"), *shown, text_part(QUESTION)]
        messages = [{"role": "system", "content": f"{SYSTEM}\n{FENCED}"}, {"role": "user", "content": parts}]
        parameters = {"temperature": self.settings.temperature, "max_completion_tokens": self.settings.max_tokens}
        return Question.of(self.settings.vlm_model, messages, parameters)

    def read(self, reply: Reply) -> float:
        """Return the credit of the sample that was shown first: 1, 0, or a half for a tie.

        Raises:
            RewardError: when the reply has no verdict.
        """
        begins = check_complete(reply, self.settings.max_tokens)
        if (credit := read_winner(reply.text)) is None:
            raise RewardError(f"the reply names no winner; {begins}")
        return credit

    def counters(self) -> dict[str, float]:
        return usage_counters(self.client.usage)


class _Group:
    """The samples of a group, the verdicts on its pairs, and why others have none."""

    def __init__(self, samples: Sequence[JudgeSample], judge: PairwiseJudge):
        self.samples = samples
        self.judge = judge
        self.verdicts: dict[Pair, tuple[float, float]] = {}  # the credit of the first in both orders
        self.reasons: dict[int, str] = {}

    def compare(self, pairs: Sequence[Pair]) -> Mapping[Pair, float]:
        """Return the credits of the pairs that got verdicts in both orders."""
        questions: dict[Pair, Question] = {}
        for first, second in [order for pair in pairs for order in (pair, pair[::-1])]:
            try:
                questions[first, second] = self.judge.question(self.samples[first], self.samples[second])
            except (MediaError, RewardError) as error:
                self._failed((first, second), error)
        count, client = self.judge.settings.replies, self.judge.client
        asked = [(order, question) for order, question in questions.items() for _ in range(count)]
        replies = not_denied(client.ask([question for _, question in asked], lambda _, reply: self.judge.read(reply)))
        credits: dict[Pair, list[float]] = {order: [] for order in questions}
        for (order, question), reply in zip(asked, replies, strict=True):
            if isinstance(reply, RewardError):
                self._failed(order, reply)
            else:
                credits[order].append(self.judge.read(reply))
                client.keep(question, reply)
        won = {order: sum(values) / count for order, values in credits.items() if len(values) == count}
        for first, second in pairs:
            if (first, second) in won and (second, first) in won:
                self.verdicts[first, second] = won[first, second], 1 - won[second, first]
        return {pair: sum(self.verdicts[pair]) / 2 for pair in pairs if pair in self.verdicts}

    def consistent(self, index: int) -> float | None:
        """Return the share of a sample's pairs with the same verdict in both orders."""
        both = [first == second for pair, (first, second) in self.verdicts.items() if index in pair]
        return sum(both) / len(both) if both else None

    def reason(self, index: int) -> str:
        return self.reasons.get(index, "its group has no other sample: a judge of pairs compares two")

    def _failed(self, order: Pair, error: Exception) -> None:
        for index in order:
            self.reasons[index] = f"no pair of it could be compared: {error}"


def read_winner(text: str) -> float | None:
    """Return the credit of the first: 1 where it wins, 0 where the second does, a half for a tie, None without one.

    Read are JSON with a `winner`, `<answer>`, the scores of each by aspect, `Image 1 is better`, and two decimals.
    """
    answers = re.findall(r"<answer>(.{0,200}?)</answer>", text, re.DOTALL)
    text = without_thinking(text)
    winners = [str(value["winner"]) for value in json_objects(text) if "winner" in value]
    # JSON that was cut in the middle of its reasons, or that holds an unescaped quote.
    winners = winners or re.findall(r'"winner"\s*:\s*"([^"\n]{0,40})"', text)
    said = (winners or answers)[-1:]
    if said:
        return _named(said[0])
    scores = {"1": 0.0, "2": 0.0}
    counts = {"1": 0, "2": 0}
    for match in SCORED.finditer(text):
        scores[match[1]] += float(match[2])
        counts[match[1]] += 1
    if counts["1"] == counts["2"] > 0:
        return _higher(scores["1"], scores["2"])
    if better := BETTER.findall(text):
        return 1.0 if better[-1] == "1" else 0.0
    numbers = [float(number) for number in DECIMAL.findall(text)]
    return _higher(*numbers) if len(numbers) == 2 else None


def _named(said: str) -> float | None:
    named = set(WINNER.findall(said))
    if len(named) == 1:
        return 1.0 if "1" in named else 0.0
    return 0.5 if TIE.search(said) else None


def _higher(first: float, second: float) -> float:
    return 0.5 if first == second else float(first > second)
