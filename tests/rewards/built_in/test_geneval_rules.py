"""GenEval's rules over objects written down by hand."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest

from vlmrm.errors import RewardError
from vlmrm.rewards.built_in.gen_eval import (
    Detection,
    conditions,
    confident_objects,
    exact_conditions,
    graded,
    requirements,
    strict,
)

LABELS = ["dog", "cat", "apple", "car", "bench"]


def at(x: float, y: float, size: float = 20) -> tuple[float, float, float, float]:
    return (x - size / 2, y - size / 2, x + size / 2, y + size / 2)


@dataclass(frozen=True)
class Seen(Detection):
    color: str = ""


def seen(name: str, x: float = 50, y: float = 50, score: float = 0.95) -> Seen:
    """An object with its colour, if any, in its name: `red dog`."""
    color, _, label = name.rpartition(" ")
    return Seen(label, score, at(x, y), color=color)


def judged(metadata: dict, *found: Detection, judge=conditions):
    asked = requirements(metadata, LABELS)
    return judge(asked, confident_objects(found, asked.tag), lambda found: [each.color for each in found])


def row(tag: str, *include: dict, exclude: tuple = ()) -> dict:
    return {"tag": tag, "include": list(include), "exclude": list(exclude), "prompt": "a photo"}


def some(label: str, count: int = 1, **more) -> dict:
    return {"class": label, "count": count, **more}


DOG = row("single_object", some("dog"))
APPLES = row("counting", some("apple", 3), exclude=(some("apple", 4),))
NO_CATS = row("single_object", some("dog"), exclude=(some("cat", 1),))
ONE_LEFT = row("position", some("dog"), some("cat", position=["left of", 0]), exclude=(some("dog", 2),))
RED = row("colors", some("car", color="red"))
LEFT = row("position", some("dog"), some("cat", position=["left of", 0]))
BOTH = row("color_attr", some("car", color="red"), some("bench", color="blue"))


@pytest.mark.parametrize(
    ("metadata", "found", "verdict", "grade"),
    [
        (DOG, [seen("dog")], 1, 1),
        (DOG, [seen("cat")], 0, 0),
        (DOG, [seen("dog", score=0.3)], 0, 0),
        (DOG, [seen("dog", score=0.31)], 1, 1),
        (APPLES, [seen("apple")] * 3, 1, 1),
        (APPLES, [seen("apple")] * 4, 0, 2 / 3),
        (APPLES, [seen("apple")] * 3 + [seen("apple", score=0.9)], 1, 1),
        (NO_CATS, [seen("dog"), seen("cat")], 0, 1 / 2),
        (ONE_LEFT, [seen("dog", 80), seen("dog", 90), seen("cat", 20)], 0, 2 / 3),
        (RED, [seen("blue car"), seen("red car", score=0.5)], 0, 1 / 2),
        (RED, [seen("red car"), seen("blue car", score=0.5)], 1, 1),
        (LEFT, [seen("dog", 20), seen("cat", 80)], 0, 2 / 3),
        (LEFT, [seen("dog", 80), seen("cat", 90, score=0.5), seen("cat", 20, score=0.9)], 1, 1),
        (BOTH, [seen("red car"), seen("blue bench")], 1, 1),
        (BOTH, [seen("blue car"), seen("red bench")], 0, 1 / 2),
    ],
)
def test_verdicts(metadata, found, verdict, grade):
    result = judged(metadata, *found)
    assert strict(result) == verdict
    assert graded(result) == pytest.approx(grade)


def whereabouts(one: Detection, other: Detection) -> set[str]:
    """GenEval's: centres further apart than a tenth of the sizes, in directions above half of the distance."""
    (x, y, width, height), (u, v, wide, high) = (
        ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2, box[2] - box[0], box[3] - box[1])
        for box in (one.box, other.box)
    )
    away = math.hypot(x - u, y - v)
    names = set()
    for offset, slack, less, more in (
        (x - u, (width + wide) / 10, "left of", "right of"),
        (y - v, (height + high) / 10, "above", "below"),
    ):
        if abs(offset) > slack and (abs(offset) - slack) / away > 0.5:
            names.add(less if offset < 0 else more)
    return names


def flow_grpo(include: list[dict], found: list[Seen]) -> tuple[bool, float]:
    """Its verdict and its graded reward, written anew: those of yifan123/reward-server in 20,000 such scenes."""
    right, grades, groups = True, [], []
    for clause in include:
        own = [each for each in found if each.label == clause["class"]]
        asked, good = clause["count"], len(own) == clause["count"]
        grades.append(1 - abs(asked - len(own)) / asked)
        if not good:
            grades += [0.0] if clause.keys() & {"color", "position"} else []
        if good and "color" in clause:
            coloured = sum(each.color == clause["color"] for each in own)
            grades.append(1 - abs(asked - coloured) / asked)
            good = coloured == asked
        if good and "position" in clause:
            where, number = clause["position"]
            if groups[number] is None:
                grades.append(0.0)
                good = False
            elif all(where in whereabouts(each, other) for each in own for other in groups[number]):
                grades.append(1.0)
            else:
                grades += [0.0, 1.0]
                good = False
        right = right and good
        groups.append(own if good else None)
    return right, sum(grades) / len(grades)


def scene(draw: random.Random) -> tuple[list[dict], list[Seen]]:
    """A random row, and objects that often are what it asks for."""
    include, found = [], []
    for number, label in enumerate(draw.sample(LABELS, draw.randint(1, 3))):
        clause = some(label, draw.choice((1, 1, 2, 3)))
        if draw.random() < 0.4:
            clause["color"] = draw.choice(("red", "blue", "green"))
        if number and draw.random() < 0.6:
            where = draw.choice(("left of", "right of", "above", "below"))
            clause["position"] = [where, draw.randrange(number)]
        include.append(clause)
        for _ in range(max(0, clause["count"] + draw.choice((0, 0, 0, 0, 1, -1, 2)))):
            color = clause.get("color", "red") if draw.random() < 0.8 else draw.choice(("red", "blue"))
            place = at(draw.uniform(0, 200), draw.uniform(0, 200), draw.uniform(5, 120))
            found.append(Seen(label, 0.95, place, color=color))
    return include, found


def test_exact_counts_match_flow_grpo_on_random_scenes():
    draw, verdicts = random.Random(0), []
    for _ in range(5_000):
        include, found = scene(draw)
        wanted, grade = flow_grpo(include, found)
        result = judged(row("color_attr", *include), *found, judge=exact_conditions)
        assert strict(result) == wanted, (include, found)
        assert graded(result) == pytest.approx(grade, abs=1e-12), (include, found)
        verdicts.append(wanted)
    assert 0.1 < sum(verdicts) / len(verdicts) < 0.9


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ("{", "Invalid JSON"),
        (row("colours", some("dog")), "tag: .*it is 'colours'"),
        (row("colors"), "include"),
        (row("colors", some("dgo")), "did you mean dog"),
        (row("colors", some("dog", 0)), "include.0.count"),
        (row("position", some("dog", position=["left of", 0])), "no earlier clause"),
        (row("counting", some("cat"), exclude=(some("cow"),)), r"class 'cow'"),
    ],
)
def test_what_is_no_row_of_geneval_is_refused(metadata, message):
    with pytest.raises(RewardError, match=message):
        requirements(metadata, LABELS)
