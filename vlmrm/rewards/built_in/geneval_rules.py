"""GenEval's rules: what a prompt asks for, and how far the objects found in an image meet it. No model is in here.

Ghosh et al. 2023, GenEval, arXiv:2310.11513; thresholds and geometry as in its published evaluation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlmrm.errors import RewardError
from vlmrm.settings import did_you_mean

TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")

THRESHOLD = 0.3  # a detection counts above it,
COUNTING_THRESHOLD = 0.9  # where objects are counted above this one
MAX_OBJECTS = 16  # of one class, the most certain ones
POSITION_THRESHOLD = 0.1  # share of both sizes by which centres must be apart
DIRECTION = 0.5  # least part of the offset's length that goes in a direction


@dataclass(frozen=True)
class Detection:
    """An object in an image: `box` is left, top, right, bottom in pixels, `mask` [H, W] what of it is the object."""

    label: str
    score: float
    box: tuple[float, float, float, float]
    mask: np.ndarray | None = None


@dataclass(frozen=True)
class Clause:
    """`count` objects of `label`, all of `color`, each in `relation` to each object of the clause number `target`."""

    label: str
    count: int
    color: str | None = None
    relation: str | None = None
    target: int = 0


@dataclass(frozen=True)
class Requirements:
    """What a prompt asks for: all of `include`, and less than the count of each of `exclude`."""

    task: str
    include: tuple[Clause, ...]
    exclude: tuple[Clause, ...]


@dataclass(frozen=True)
class Condition:
    """One thing asked for and how far it is met, from 0 to 1."""

    text: str
    met: float


def requirements(metadata: Any, labels: Iterable[str]) -> Requirements:
    """What a row of GenEval's `evaluation_metadata.jsonl` asks for: a mapping, or its JSON text.

        {"tag": "position", "include": [{"class": "dog", "count": 1},
                                        {"class": "cat", "count": 1, "color": "red", "position": ["left of", 0]}],
         "exclude": [{"class": "dog", "count": 2}]}

    Args:
        labels: the classes that can be found.

    Raises:
        RewardError: when it is no such row, saying where.
    """
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except ValueError as error:
            raise RewardError(f"its metadata is no JSON ({error})") from None
    if not isinstance(metadata, Mapping):
        raise RewardError(f"its metadata is {type(metadata).__name__}: give a mapping with tag and include")
    task = _one_of("tag", metadata.get("tag"), TASKS)
    known = sorted(labels)
    include = _clauses("include", metadata, known)
    if not include:
        raise RewardError("its metadata has no include: say what the image must show")
    return Requirements(task, include, _clauses("exclude", metadata, known))


def objects_that_count(found: Iterable[Detection], task: str) -> dict[str, list[Detection]]:
    """The detections that are certain enough for the task, by class, the most certain first."""
    least = COUNTING_THRESHOLD if task == "counting" else THRESHOLD
    objects: dict[str, list[Detection]] = {}
    for detection in sorted(found, key=lambda each: -each.score):
        if detection.score > least:
            objects.setdefault(detection.label, []).append(detection)
    return {label: of_class[:MAX_OBJECTS] for label, of_class in objects.items()}


def conditions(
    asked: Requirements,
    objects: Mapping[str, Sequence[Detection]],
    colors: Callable[[Sequence[Detection]], Sequence[str]],
) -> list[Condition]:
    """How far each condition is met; the image is right in GenEval's sense where all are met in full.

    A count n is met by the share of the objects that are there. Where n + 1 of the class are excluded it is an exact
    one, met by 1 - |found - n| / n, at least 0: an object too many is as wrong as one too few. A colour is met by the
    share that has it, a position and any other exclusion in full or not at all. Colour and position are of the most
    certain `count` objects; a position needs at least the count of both clauses and their colours.

    Args:
        colors: the colour of each of some objects of one class.
    """
    judged: list[Condition] = []
    matched: list[Sequence[Detection] | None] = []  # of each clause, its objects where it is met in full
    exact = {(clause.label, clause.count - 1) for clause in asked.exclude}
    for clause in asked.include:
        there = objects.get(clause.label, ())
        found = there[: clause.count]
        whole = len(found) == clause.count
        if (clause.label, clause.count) in exact:
            off = abs(len(there) - clause.count)
            judged.append(Condition(f"exactly {clause.count} {clause.label}", max(1 - off / clause.count, 0.0)))
        else:
            judged.append(Condition(f"{clause.count} {clause.label}", len(found) / clause.count))
        if clause.color is not None:
            right = list(colors(found)).count(clause.color) if found else 0
            whole = whole and right == clause.count
            judged.append(Condition(f"{clause.color} {clause.label}", right / clause.count))
        if clause.relation is not None:
            others = matched[clause.target]
            pairs = [(one, other) for one in found for other in others or ()]
            whole = whole and others is not None and all(clause.relation in relations(*pair) for pair in pairs)
            relation = f"{clause.label} {clause.relation} {asked.include[clause.target].label}"
            judged.append(Condition(relation, float(whole)))
        matched.append(found if whole else None)
    counted = {(clause.label, clause.count) for clause in asked.include}
    for clause in asked.exclude:
        if (clause.label, clause.count - 1) in counted:
            continue  # in that clause's exact count
        few = len(objects.get(clause.label, ())) < clause.count
        judged.append(Condition(f"fewer than {clause.count} {clause.label}", float(few)))
    return judged


def strict(judged: Sequence[Condition]) -> float:
    """GenEval's own verdict: 1 where all conditions are met in full, else 0."""
    return float(all(condition.met == 1 for condition in judged))


def graded(judged: Sequence[Condition]) -> float:
    """The mean of how far the conditions are met, in [0, 1]; 1 exactly where `strict` is."""
    return sum(condition.met for condition in judged) / len(judged)


def relations(one: Detection, other: Detection) -> set[str]:
    """Where `one` is as seen from `other`: none, one or two of `RELATIONS`.

    With d the offset of the centres and s the sum of both sizes, along each axis
    max(|d| - POSITION_THRESHOLD s, 0) sign(d) / length of d must be beyond DIRECTION.
    """
    offset, beyond = [], []
    for axis in (0, 1):
        low, high = (one.box[axis], other.box[axis]), (one.box[axis + 2], other.box[axis + 2])
        apart = (low[0] + high[0]) / 2 - (low[1] + high[1]) / 2
        sizes = abs(high[0] - low[0]) + abs(high[1] - low[1])
        offset.append(apart)
        beyond.append(math.copysign(max(abs(apart) - POSITION_THRESHOLD * sizes, 0), apart))
    if max(abs(value) for value in beyond) < 1e-3:
        return set()
    x, y = (value / math.hypot(*offset) for value in beyond)
    holds = {"left of": x < -DIRECTION, "right of": x > DIRECTION, "above": y < -DIRECTION, "below": y > DIRECTION}
    return {relation for relation, true in holds.items() if true}


def _clauses(name: str, metadata: Mapping[str, Any], labels: Sequence[str]) -> tuple[Clause, ...]:
    given = metadata.get(name, [])
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise RewardError(f"its metadata has {name}: {given!r}: write a list")
    return tuple(_clause(f"{name}[{number}]", number, item, labels) for number, item in enumerate(given))


def _clause(where: str, number: int, item: Any, labels: Sequence[str]) -> Clause:
    if not isinstance(item, Mapping) or not set(item) <= {"class", "count", "color", "position"}:
        raise RewardError(f"its metadata has {where}: {item!r}: write class and count, and color and position if any")
    count = item.get("count")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise RewardError(f"its metadata has {where}.count: {count!r}: write a whole number, at least 1")
    label = _one_of(f"{where}.class", item.get("class"), labels, ", which the detector has not")
    color = None if item.get("color") is None else _one_of(f"{where}.color", item["color"], COLORS)
    if item.get("position") is None:
        return Clause(label, count, color)
    try:
        relation, target = item["position"]
    except (TypeError, ValueError):
        relation, target = None, None
    if isinstance(target, bool) or not isinstance(target, int) or not 0 <= target < number:
        raise RewardError(
            f'its metadata has {where}.position: {item["position"]!r}: write ["left of", n] with n an earlier clause'
        )
    return Clause(label, count, color, _one_of(f"{where}.position", relation, RELATIONS), target)


def _one_of(where: str, value: Any, choices: Sequence[str], why: str = "") -> str:
    if value in choices:
        return value
    hint = did_you_mean(value, choices, f": choose from {', '.join(choices)}")
    raise RewardError(f"its metadata has {where}: {value!r}{why}{hint}")
