"""`pairwise_judge`: each sample's chance to beat another of its group, by a judge that compares two at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from statistics import fmean

import numpy as np
from pydantic import Field

from vlmrm.errors import MediaError, RewardError
from vlmrm.measures.bradley_terry import fit, logistic
from vlmrm.rewards.contract import GroupwiseRewardModel, RewardModelOutput
from vlmrm.rewards.judges.client import check_not_denied
from vlmrm.rewards.judges.judge import (
    JudgeSample,
    Parts,
    SampleJudge,
    SampleSettings,
    check_complete,
    fence,
    image_part,
    text_part,
)
from vlmrm.rewards.judges.replies import Question, Reply, json_objects, without_thinking

SYSTEM = (
    "You are a careful, impartial judge. You are shown a prompt and two answers to it, and decide which one people "
    "would prefer: it does what the prompt asks, is true of every picture shown, and is of the better quality. The "
    "order of the answers and their length mean nothing."
)
FORM = (
    'Reply with one JSON object, first a short justification, then the winner, "Answer 1", "Answer 2", or "tie" where '
    'neither is better: {"justification": "...", "winner": "..."}'
)
WINNER = re.compile(r"\b(?:image|video|answer)\s*([12])\b", re.IGNORECASE)
BETTER = re.compile(r"\b(?:image|video)\s*([12])\s+(?:is|wins)\b(?!\s+(?:not|worse))", re.IGNORECASE)
TIE = re.compile(r"\b(?:tie|both|equal(?:ly)?)\b", re.IGNORECASE)
SCORED = re.compile(r"\b(?:image|video)\s*([12])\b[^:\n]{0,20}[:：]\s*([-+]?\d+(?:\.\d+)?)\b", re.IGNORECASE)
DECIMAL = re.compile(r"[-+]?\d+\.\d+")


class PairwiseSettings(SampleSettings):
    rounds: int = Field(8, ge=1)
    """Rounds of the tournament, in each of which a sample meets one other, in both orders."""


class PairwiseJudge(SampleJudge, GroupwiseRewardModel):
    """The chance to beat another sample of the group, by the strengths of a Bradley-Terry model: [N] in [0, 1].

    In each of `rounds` rounds every sample meets another of about its strength (a Swiss tournament); in a group so
    small that they suffice, all meet. A pair is shown in both orders, and its credit is the mean, so that a judge that
    prefers a place gives a tie. Pairs of which a verdict is missing do not count; a sample without any pair fails. The
    replies of UnifiedReward 2.0, Think, Flex and Edit to pairs are read, asked by their `request_file`.
    """

    Settings = PairwiseSettings
    settings: PairwiseSettings
    shown = ("first", "second")

    def judged(self, samples: Sequence[JudgeSample]) -> RewardModelOutput:
        order = list(range(len(samples)))
        if full_rounds(len(order)) > self.settings.rounds:  # else all meet
            # In an order of their own, so that who meets whom does not depend on that of the group.
            order.sort(key=lambda index: self._key(samples[index]))
        group = _Group([samples[index] for index in order], self)
        credits = play(len(samples), self.settings.rounds, group.compare)
        values = strengths(len(samples), credits)
        met = [sum(place in pair for pair in credits) for place in range(len(samples))]
        rates = win_rates(values).tolist()
        failures = {index: group.reason(place) for place, index in enumerate(order) if not met[place]}
        places = np.argsort(order).tolist()  # of the samples in that order
        rewards = [math.nan if index in failures else rates[place] for index, place in enumerate(places)]
        info = {"strength": [float(values[place]) for place in places], "pairs": [met[place] for place in places]}
        return RewardModelOutput(rewards, info, failures)

    def _key(self, sample: JudgeSample) -> str:
        try:
            return self.question(sample, sample).key
        except (MediaError, RewardError):
            return ""

    def question(self, first: JudgeSample, second: JudgeSample) -> Question:
        """Return the question which of two samples is better; raise RewardError when one of them has no picture."""
        one, other = self.frames(first), self.frames(second)
        sources = first.sources or ()
        if self.request is not None:
            return self.request.question(first.prompt, {"first": one, "second": other, "source": sources})
        prompt = [text_part(f"The prompt:\n{fence(first.prompt)}"), *map(image_part, sources)]
        return self.asked(prompt, [*map(image_part, one)], [*map(image_part, other)])

    def asked(self, prompt: Parts, first: Parts, second: Parts) -> Question:
        """Return the question which of two answers to a prompt is better, each as the parts of a message."""
        answers = [text_part("Answer 1:"), *first, text_part("Answer 2:"), *second]
        return self.chat_question(SYSTEM, [*prompt, *answers, text_part(FORM)])

    def credits(self, questions: Sequence[Question]) -> list[float | RewardError]:
        """Return the credit of the answer that each question shows first, or why there is none.

        It is the mean over the replies of 1, 0, or a half for a tie.
        """
        count = self.settings.replies
        several = [question for question in questions for _ in range(count)]
        read: list[float | RewardError] = [
            reply if isinstance(reply, RewardError) else self._read(reply)
            for reply in self.client.ask(several, lambda _, reply: self._read(reply))
        ]
        credits: list[float | RewardError] = []
        for start in range(0, len(read), count):
            failures = [it for it in read[start : start + count] if isinstance(it, RewardError)]
            numbers = [it for it in read[start : start + count] if not isinstance(it, RewardError)]
            credits.append(failures[0] if failures else fmean(numbers))
        return credits

    def _read(self, reply: Reply) -> float:
        begins = check_complete(reply, self.settings.max_tokens)
        try:
            return self.reward_in(reply.text)
        except RewardError as error:
            raise RewardError(f"{error}; {begins}") from error

    def reward_in(self, reply: str) -> float:
        """Return the credit of the first in the text of a reply; raise RewardError when it names no winner."""
        if (credit := read_winner(reply)) is None:
            raise RewardError("the reply names no winner")
        return credit


class _Group:
    """The samples of a group, the verdicts on its pairs, and why others have none."""

    def __init__(self, samples: Sequence[JudgeSample], judge: PairwiseJudge):
        self.samples = samples
        self.judge = judge
        self.reasons: dict[int, str] = {}

    def compare(self, pairs: Sequence[Pair]) -> Mapping[Pair, float]:
        """Return the credits of the pairs that got verdicts in both orders."""
        questions: dict[Pair, Question] = {}
        for first, second in [order for pair in pairs for order in (pair, pair[::-1])]:
            try:
                questions[first, second] = self.judge.question(self.samples[first], self.samples[second])
            except (MediaError, RewardError) as error:
                self._failed((first, second), error)
        won: dict[Pair, float] = {}
        credits = self.judge.credits(list(questions.values()))
        check_not_denied(credits)
        for order, credit in zip(questions, credits, strict=True):
            if isinstance(credit, RewardError):
                self._failed(order, credit)
            else:
                won[order] = credit
        return {pair: (won[pair] + 1 - won[pair[::-1]]) / 2 for pair in pairs if {pair, pair[::-1]} <= won.keys()}

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


Pair = tuple[int, int]
Credits = dict[Pair, float]  # of the first of each pair, 0 to 1

PRIOR = 0.1  # weight of the prior by which strengths are finite, beside one comparison each


def play(count: int, rounds: int, compare: Callable[[Sequence[Pair]], Mapping[Pair, float]]) -> Credits:
    """Return the credits of a Swiss tournament of `rounds` rounds, or of all pairs where as many rounds hold them.

    In each round everyone meets someone of about the same strength whom he has not met, but for a few left over.
    `compare` returns the credits of pairs that could be compared.
    """
    if full_rounds(count) <= rounds:
        return dict(compare(list(combinations(range(count), 2))))
    credits: Credits = {}
    met: set[Pair] = set()
    for _ in range(rounds):
        pairs = _next_pairs(strengths(count, credits), met)
        met.update(pairs)
        credits.update(compare(pairs))
    return credits


def full_rounds(count: int) -> int:
    """Return the rounds of a tournament in which all meet."""
    return count - 1 + count % 2


def _next_pairs(values: np.ndarray, met: set[Pair]) -> list[Pair]:
    """Return new pairs of neighbours in strength, each in the order of the group.

    Of an odd number one of those who met most rests, the weakest of them. Some, at the end, may find nobody new.
    """
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if len(order) % 2:
        meetings = np.bincount(np.array(sorted(met), dtype=int).reshape(-1), minlength=len(order))
        order.remove(max(reversed(order), key=lambda i: meetings[i]))
    pairs: list[Pair] = []
    while order:
        first = order.pop(0)
        if (second := next((other for other in order if _pair(first, other) not in met), None)) is not None:
            order.remove(second)
            pairs.append(_pair(first, second))
    return pairs


def _pair(first: int, second: int) -> Pair:
    return (first, second) if first < second else (second, first)


def strengths(count: int, credits: Mapping[Pair, float]) -> np.ndarray:
    """Return the strengths θ[count] of the Bradley-Terry model P(i beats j) = σ(θi - θj)."""
    rows = [np.eye(count)[first] - np.eye(count)[second] for first, second in credits]
    return fit(np.array(rows).reshape(-1, count), np.array(list(credits.values())), np.full(count, PRIOR))[0]


def win_rates(values: np.ndarray) -> np.ndarray:
    """Return the chance of each to beat another of the group: [N] in [0, 1]."""
    return (logistic(values[:, None] - values[None, :]).sum(axis=1) - 0.5) / max(1, len(values) - 1)
