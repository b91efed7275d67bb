"""`rubric`: a judge by a rubric of the user's own, written in a YAML file."""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from vlmrm.errors import RewardError
from vlmrm.rewards.contract import Processes, RewardArguments, Verdict
from vlmrm.rewards.judges.judge import Judge, JudgeSample, SampleSettings, fence, image_part, text_part
from vlmrm.rewards.judges.replies import Reply, json_objects, read_score, without_thinking
from vlmrm.settings import Strict, load_file, validate

SYSTEM = "You are a careful, impartial judge. You score what you are shown by a rubric, aspect by aspect."
FORM = """Score these aspects:
{aspects}

Reply with one JSON object that has a key for each aspect, and under it first a short justification, then the score, a
number on that aspect's scale, or "N/A" where the aspect does not apply:
{form}"""


class RubricSettings(SampleSettings):
    rubric: str = Field(min_length=1)
    """The YAML file."""


class RubricJudge(Judge):
    """The aspects' scores, each mapped to [0, 1] by its scale and aggregated: [N] in [0, 1].

    The aggregation is `mean`, `weighted` (by the aspects' weights), `min` or `product`, over the aspects that apply. A
    score off its scale, a missing aspect, and a reply in which no aspect applies are failures. A
    reply in prose is searched for a JSON object, then for lines `aspect: score`.
    """

    Settings = RubricSettings
    settings: RubricSettings

    def __init__(self, config: RewardArguments, accelerator: Processes):
        super().__init__(config, accelerator)
        self.rubric = load_rubric(self.settings.rubric)

    def chat(self, sample: JudgeSample) -> tuple[str, list[dict[str, Any]]]:
        sources = [part for source in sample.sources or () for part in (text_part("Made from:"), image_part(source))]
        described = "\n".join(self._described(aspect) for aspect in self.rubric.aspects)
        form = {aspect.name: {"justification": "...", "score": "..."} for aspect in self.rubric.aspects}
        question = self.rubric.question.format(prompt=fence(sample.prompt))
        request = f"{question}\n\n{FORM.format(aspects=described, form=json.dumps(form))}"
        return SYSTEM, [*sources, *self.media(sample), text_part(request)]

    def verdict(self, reply: Reply, sample: JudgeSample) -> Verdict:
        text = without_thinking(reply.text)
        values = _json_values(text, self.rubric) or _line_values(text, self.rubric)
        scores = {aspect.name: self._score(aspect, values.get(aspect.name)) for aspect in self.rubric.aspects}
        return Verdict(aggregate(self.rubric, scores), {"aspects": scores})

    def _described(self, aspect: Aspect) -> str:
        worst, best = self.rubric.scale_of(aspect)
        return f"- {aspect.name}, from {worst:g} (worst) to {best:g} (best): {aspect.description}"

    def _score(self, aspect: Aspect, value: Any) -> float | str:
        worst, best = self.rubric.scale_of(aspect)
        score = read_score(str(value), best)
        if value is None or score is None:
            raise RewardError(f"the reply has no score for {aspect.name}")
        if isinstance(score, float) and not worst <= score <= best:
            raise RewardError(f"its score for {aspect.name} is {score:g}, which is not from {worst:g} to {best:g}")
        return score


def aggregate(rubric: Rubric, scores: Mapping[str, float | str]) -> float:
    """Return one number in [0, 1] from the scores that apply; raise RewardError when none does."""
    parts: list[tuple[float, float]] = []  # a score in [0, 1] and its weight
    for aspect in rubric.aspects:
        score = scores[aspect.name]
        if isinstance(score, float):
            worst, best = rubric.scale_of(aspect)
            parts.append(((score - worst) / (best - worst), aspect.weight))
    if not parts:
        raise RewardError("the reply has N/A for every aspect")
    values = [value for value, _ in parts]
    if rubric.aggregation == "min":
        return min(values)
    if rubric.aggregation == "product":
        return math.prod(values)
    return sum(value * weight for value, weight in parts) / sum(weight for _, weight in parts)


def _json_values(text: str, rubric: Rubric) -> dict[str, Any]:
    """Return the scores in the last JSON object of `text` that names an aspect; `{aspect: 3}` counts too."""
    values: dict[str, Any] = {}
    for value in json_objects(text):
        by_name = {str(key).lower(): score for key, score in value.items()}
        scores = {aspect.name: by_name.get(aspect.name.lower()) for aspect in rubric.aspects}
        if any(score is not None for score in scores.values()):
            values = {name: score.get("score") if isinstance(score, dict) else score for name, score in scores.items()}
    return values


def _line_values(text: str, rubric: Rubric) -> dict[str, str]:
    """Return the value of the last line `aspect: value` of each aspect, in any markup."""
    values = {}
    for aspect in rubric.aspects:
        heading = re.compile(rf"[\s#*_>\d.)-]*{re.escape(aspect.name)}[\s*_]*(?::|：|=)(.*)", re.IGNORECASE)
        for match in map(heading.match, text.splitlines()):
            if match:
                values[aspect.name] = match[1]
    return values


def _worst_first(scale: list[float]) -> list[float]:
    if not scale[0] < scale[1]:
        raise ValueError("the worst score comes first, then the best, which is greater")
    return scale


Scale = Annotated[list[float], Field(min_length=2, max_length=2), AfterValidator(_worst_first)]


class Aspect(Strict, frozen=True, strict=True):
    """One scored aspect; `scale` is its worst and best score, by default the rubric's."""

    name: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9_ -]*$")
    description: str = Field(min_length=1)
    weight: float = Field(1.0, gt=0)
    scale: Scale | None = None


class Rubric(Strict, frozen=True, strict=True):
    """A question, with `{prompt}` for the sample's prompt, its aspects, and the aggregation of their scores."""

    question: str = Field(min_length=1)
    aspects: list[Aspect] = Field(min_length=1)
    scale: Scale = Field([1.0, 5.0])
    aggregation: Literal["mean", "weighted", "min", "product"] = "mean"

    @field_validator("question")
    @classmethod
    def _only_the_prompt(cls, question: str) -> str:
        fields = {field for _, field, _, _ in string.Formatter().parse(question) if field is not None}
        if unknown := fields - {"prompt"}:
            raise ValueError(f"there is no {{{min(unknown)}}}; {{prompt}} is all that can be filled in")
        return question

    @model_validator(mode="after")
    def _told_apart(self) -> Rubric:
        names = [aspect.name.lower() for aspect in self.aspects]
        for aspect in self.aspects:
            if names.count(aspect.name.lower()) > 1:
                raise ValueError(f"there is another aspect {aspect.name}")
            if "weight" in aspect.model_fields_set and self.aggregation != "weighted":
                raise ValueError(f"{aspect.name} has a weight, and aggregation is {self.aggregation}")
        return self

    def scale_of(self, aspect: Aspect) -> tuple[float, float]:
        worst, best = aspect.scale or self.scale
        return worst, best


def load_rubric(path: str | Path) -> Rubric:
    """Read and check a rubric; raise ConfigError naming the file and the key."""
    return validate(Rubric, load_file(Path(path)), str(path))
