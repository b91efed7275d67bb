"""The YAML file of a rubric: its question, its aspects with their scales, and how they become one number."""

from __future__ import annotations

import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError

from vlmrm.errors import ConfigError
from vlmrm.settings import Strict, first_of, first_wrong, load_file

Scale = list[float]
Place = tuple[str | int, ...]


class Aspect(Strict, frozen=True, strict=True):
    """One thing that is scored; `scale` is the worst and the best score, by default the rubric's."""

    name: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9_ -]*$")
    description: str = Field(min_length=1)
    weight: float = Field(1.0, gt=0)
    scale: Scale | None = Field(None, min_length=2, max_length=2)


class Rubric(Strict, frozen=True, strict=True):
    """What is asked, with `{prompt}` for the sample's prompt, and how the aspects' scores are put together."""

    question: str = Field(min_length=1)
    aspects: list[Aspect] = Field(min_length=1)
    scale: Scale = Field([1.0, 5.0], min_length=2, max_length=2)
    aggregation: Literal["mean", "weighted", "min", "product"] = "mean"

    def scale_of(self, aspect: Aspect) -> tuple[float, float]:
        worst, best = aspect.scale or self.scale
        return worst, best


def load_rubric(path: str | Path) -> Rubric:
    """Reads and checks a rubric.

    Raises:
        ConfigError: naming the file, the line and the key.
    """
    path = Path(path)
    try:
        rubric = Rubric(**load_file(path))
    except ValidationError as error:
        first = first_of(error.errors())
        raise _refused(path, first["loc"], first_wrong([first], Rubric)) from None
    for place, reason in _problems(rubric):
        raise _refused(path, place, f"{'.'.join(map(str, place))}: {reason}")
    return rubric


def _problems(rubric: Rubric) -> Iterator[tuple[Place, str]]:
    """What single fields do not show."""
    try:
        fields = {field for _, field, _, _ in string.Formatter().parse(rubric.question) if field is not None}
    except ValueError as error:
        yield ("question",), f"{error}; write {{{{ and }}}} for braces"
        return
    if fields - {"prompt"}:
        yield ("question",), f"there is no {{{min(fields - {'prompt'})}}}; {{prompt}} is all that can be filled in"
    scales: list[tuple[Place, Scale | None]] = [(("scale",), rubric.scale)]
    scales += [(("aspects", number, "scale"), aspect.scale) for number, aspect in enumerate(rubric.aspects)]
    for place, scale in scales:
        if scale is not None and not scale[0] < scale[1]:
            yield place, "the worst score comes first, then the best, which is greater"
    names: set[str] = set()
    for number, aspect in enumerate(rubric.aspects):
        if aspect.name.lower() in names:
            yield ("aspects", number, "name"), f"there is another aspect {aspect.name}"
        names.add(aspect.name.lower())
        if "weight" in aspect.model_fields_set and rubric.aggregation != "weighted":
            yield ("aspects", number, "weight"), f"aggregation is {rubric.aggregation}, which takes no weights"


def _refused(path: Path, place: Place, wrong: str) -> ConfigError:
    return ConfigError(f"{path}, line {_line(path, place)}: {wrong}.")


def _line(path: Path, place: Place) -> int:
    """The line of what is at `place`, or of the nearest thing around it that is there."""
    node: Any = yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader)
    line = node.start_mark.line
    for part in place:
        if isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in node.value if key.value == part), None)
            if found is None:
                break
            line, node = found[0].start_mark.line, found[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line
    return line + 1
