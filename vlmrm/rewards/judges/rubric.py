"""`rubric`: a judge by a rubric of the user's own, written in a YAML file."""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import Field, ValidationError

from vlmrm.errors import ConfigError, RewardError
from vlmrm.rewards.contract import RewardArguments
from vlmrm.rewards.judges.judge import Judge, JudgeSample, ScoreSettings, Verdict, fence, image_part, text_part
from vlmrm.rewards.judges.replies import NOT_APPLICABLE, Reply, json_objects, read_score, without_thinking
from vlmrm.settings import Strict, describe_errors, first_error, load_file

if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState

SYSTEM = "You are a careful, impartial judge. You score what you are shown by a rubric, aspect by aspect."
FORM = """Score these aspects:
{aspects}

Reply with one JSON object that has a key for each aspect, and under it first a short justification, then the score, a
number on that aspect's scale, or "N/A" where the aspect does not apply:
{form}"""

Scale = list[float]
KeyPath = tuple[str | int, ...]


class RubricSettings(ScoreSettings):
    rubric: str = Field(min_length=1)
    """The YAML file."""


class RubricJudge(Judge):
    """The aspects' scores, each mapped to [0, 1] by its scale and aggregated: [N] in [0, 1].

    The aggregation is `mean`, `weighted` (by the aspects' weights), `min` or `product`, over the aspects that apply. A
    score off its scale, a missing aspect, and a reply in which no aspect applies are failures. The server is asked for
    JSON by `response_format`; a reply in prose is searched for a JSON object, then for lines `aspect: score`.
    """

    Settings = RubricSettings
    settings: RubricSettings
    options = tuple(RubricSettings.model_fields)

    def __init__(self, config: RewardArguments, accelerator: Accelerator | PartialState | None):
        super().__init__(config, accelerator)
        self.rubric = load_rubric(self.settings.rubric)

    def parameters(self) -> dict[str, Any]:
        schema = {"name": "judgement", "strict": True, "schema": _schema(self.rubric)}
        return {**super().parameters(), "response_format": {"type": "json_schema", "json_schema": schema}}

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
    """Return one number in [0, 1] from the scores that apply.

    Raises:
        RewardError: when none does.
    """
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


def _schema(rubric: Rubric) -> dict[str, Any]:
    """Return the reply's JSON schema; `_score` checks the scales, as not every server supports bounds of numbers."""
    score = {"anyOf": [{"type": "number"}, {"type": "string", "enum": [NOT_APPLICABLE]}]}
    aspect = _object({"justification": {"type": "string"}, "score": score})
    return _object({entry.name: aspect for entry in rubric.aspects})


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


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


class Aspect(Strict, frozen=True, strict=True):
    """One scored aspect; `scale` is its worst and best score, by default the rubric's."""

    name: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9_ -]*$")
    description: str = Field(min_length=1)
    weight: float = Field(1.0, gt=0)
    scale: Scale | None = Field(None, min_length=2, max_length=2)


class Rubric(Strict, frozen=True, strict=True):
    """A question, with `{prompt}` for the sample's prompt, its aspects, and the aggregation of their scores."""

    question: str = Field(min_length=1)
    aspects: list[Aspect] = Field(min_length=1)
    scale: Scale = Field([1.0, 5.0], min_length=2, max_length=2)
    aggregation: Literal["mean", "weighted", "min", "product"] = "mean"

    def scale_of(self, aspect: Aspect) -> tuple[float, float]:
        worst, best = aspect.scale or self.scale
        return worst, best


def load_rubric(path: str | Path) -> Rubric:
    """Read and check a rubric.

    Raises:
        ConfigError: naming the file, the line and the key.
    """
    path = Path(path)
    try:
        rubric = Rubric(**load_file(path))
    except ValidationError as error:
        first = first_error(error.errors())
        raise _refused(path, first["loc"], describe_errors([first], Rubric)) from None
    for key_path, reason in _problems(rubric):
        raise _refused(path, key_path, f"{'.'.join(map(str, key_path))}: {reason}")
    return rubric


def _problems(rubric: Rubric) -> Iterator[tuple[KeyPath, str]]:
    """Yield mistakes that involve several fields, with their keys."""
    try:
        fields = {field for _, field, _, _ in string.Formatter().parse(rubric.question) if field is not None}
    except ValueError as error:
        yield ("question",), f"{error}; write {{{{ and }}}} for braces"
        return
    if fields - {"prompt"}:
        yield ("question",), f"there is no {{{min(fields - {'prompt'})}}}; {{prompt}} is all that can be filled in"
    scales: list[tuple[KeyPath, Scale | None]] = [(("scale",), rubric.scale)]
    scales += [(("aspects", number, "scale"), aspect.scale) for number, aspect in enumerate(rubric.aspects)]
    for key_path, scale in scales:
        if scale is not None and not scale[0] < scale[1]:
            yield key_path, "the worst score comes first, then the best, which is greater"
    names: set[str] = set()
    for number, aspect in enumerate(rubric.aspects):
        if aspect.name.lower() in names:
            yield ("aspects", number, "name"), f"there is another aspect {aspect.name}"
        names.add(aspect.name.lower())
        if "weight" in aspect.model_fields_set and rubric.aggregation != "weighted":
            yield ("aspects", number, "weight"), f"aggregation is {rubric.aggregation}, which takes no weights"


def _refused(path: Path, key_path: KeyPath, reason: str) -> ConfigError:
    return ConfigError(f"{path}, line {_line(path, key_path)}: {reason}.")


def _line(path: Path, key_path: KeyPath) -> int:
    """Return the line of a key, or of the nearest enclosing key that is in the file."""
    node: Any = yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader)
    line = node.start_mark.line
    for part in key_path:
        if isinstance(node, yaml.MappingNode):
            entry = next(((key, value) for key, value in node.value if key.value == part), None)
            if entry is None:
                break
            line, node = entry[0].start_mark.line, entry[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line
    return line + 1
