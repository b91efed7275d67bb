"""`rubric`: a judge by a rubric of one's own, written in a YAML file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator, PartialState
from pydantic import Field

from vlmrm.errors import RewardError
from vlmrm.rewards.contract import RewardArguments
from vlmrm.rewards.judges.judge import Judge, Sample, Verdict
from vlmrm.rewards.judges.messages import fence, image_part, text_part
from vlmrm.rewards.judges.replies import Reply
from vlmrm.rewards.judges.rubric_file import Aspect, Rubric, load_rubric
from vlmrm.rewards.judges.scores import NOT_APPLICABLE, read_score, without_thinking
from vlmrm.rewards.judges.settings import JudgeSettings

SYSTEM = "You are a careful, impartial judge. You score what you are shown by a rubric, aspect by aspect."
FORM = """Score these aspects:
{aspects}

Reply with one JSON object that has a key for each aspect, and under it first a short justification, then the score, a
number on that aspect's scale, or "N/A" where the aspect does not apply:
{form}"""


class RubricSettings(JudgeSettings):
    rubric: str = Field(min_length=1)
    """The YAML file."""


class RubricJudge(Judge):
    """The aspects' scores, each moved to [0, 1] by its scale, as one number in [0, 1]: [N].

    `mean`, `weighted` (the mean by the aspects' weights), `min` or `product`, over the aspects that apply. A score
    off its scale, a missing aspect, and a reply in which none applies are failures. The server is asked for JSON of
    this form by `response_format`; a reply in prose is searched for it, and then for lines `aspect: score`.
    """

    Settings = RubricSettings
    settings: RubricSettings
    options = tuple(RubricSettings.model_fields)

    def __init__(self, config: RewardArguments, accelerator: Accelerator | PartialState):
        super().__init__(config, accelerator)
        self.rubric = load_rubric(self.settings.rubric)

    def parameters(self) -> dict[str, Any]:
        schema = {"name": "judgement", "strict": True, "schema": _schema(self.rubric)}
        return {**super().parameters(), "response_format": {"type": "json_schema", "json_schema": schema}}

    def chat(self, sample: Sample) -> tuple[str, list[dict[str, Any]]]:
        sources = [part for source in sample.sources or () for part in (text_part("Made from:"), image_part(source))]
        described = "\n".join(self._described(aspect) for aspect in self.rubric.aspects)
        form = {aspect.name: {"justification": "...", "score": "..."} for aspect in self.rubric.aspects}
        question = self.rubric.question.format(prompt=fence(sample.prompt))
        asked = f"{question}\n\n{FORM.format(aspects=described, form=json.dumps(form))}"
        return SYSTEM, [*sources, *self.media(sample), text_part(asked)]

    def verdict(self, reply: Reply, sample: Sample) -> Verdict:
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
    """One number in [0, 1] of the scores that apply.

    Raises:
        RewardError: when none does.
    """
    parts: list[tuple[float, float]] = []  # moved to [0, 1], with its weight
    for aspect in rubric.aspects:
        score = scores[aspect.name]
        if isinstance(score, float):
            worst, best = rubric.scale_of(aspect)
            parts.append(((score - worst) / (best - worst), aspect.weight))
    if not parts:
        raise RewardError("the reply says of every aspect that it does not apply")
    values = [value for value, _ in parts]
    if rubric.aggregation == "min":
        return min(values)
    if rubric.aggregation == "product":
        return math.prod(values)
    return sum(value * weight for value, weight in parts) / sum(weight for _, weight in parts)


def _schema(rubric: Rubric) -> dict[str, Any]:
    """Of the reply; scales are left to `_score`, since not every server takes bounds of numbers."""
    score = {"anyOf": [{"type": "number"}, {"type": "string", "enum": [NOT_APPLICABLE]}]}
    aspect = _object({"justification": {"type": "string"}, "score": score})
    return _object({each.name: aspect for each in rubric.aspects})


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _json_values(text: str, rubric: Rubric) -> dict[str, Any]:
    """The scores in the last JSON object of `text` that has one of the aspects; `{aspect: 3}` will do too."""
    decoder, found, place = json.JSONDecoder(), {}, 0
    while (place := text.find("{", place)) >= 0:
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            place += 1
            continue
        by_name = {str(key).lower(): each for key, each in value.items()}
        scores = {aspect.name: by_name.get(aspect.name.lower()) for aspect in rubric.aspects}
        if any(each is not None for each in scores.values()):
            found = {name: each.get("score") if isinstance(each, dict) else each for name, each in scores.items()}
    return found


def _line_values(text: str, rubric: Rubric) -> dict[str, str]:
    """The last line `aspect: value` of each, in whatever decoration."""
    found = {}
    for aspect in rubric.aspects:
        heading = re.compile(rf"[\s#*_>\d.)-]*{re.escape(aspect.name)}[\s*_]*(?::|：|=)(.*)", re.IGNORECASE)
        for match in map(heading.match, text.splitlines()):
            if match:
                found[aspect.name] = match[1]
    return found
