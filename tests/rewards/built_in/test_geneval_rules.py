"""GenEval's rules over objects written down by hand."""

from __future__ import annotations

import json
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
    relations,
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
TWO = row("two_object", some("dog"), some("cat"))
APPLES = row("counting", some("apple", 3), exclude=(some("apple", 4),))
NO_CATS = row("single_object", some("dog"), exclude=(some("cat", 1),))
UP_TO_THREE = row("two_object", some("dog"), exclude=(some("dog", 4),))
ONE_LEFT = row("position", some("dog"), some("cat", position=["left of", 0]), exclude=(some("dog", 2),))
RED = row("colors", some("car", color="red"))
LEFT = row("position", some("dog"), some("cat", position=["left of", 0]))
BOTH = row("color_attr", some("car", color="red"), some("bench", color="blue"))


@pytest.mark.parametrize(
    ("metadata", "found", "verdict", "grade"),
    [
        (DOG, [seen("dog")], 1, 1),
        (DOG, [seen("dog"), seen("dog"), seen("cat")], 1, 1),
        (DOG, [seen("cat")], 0, 0),
        (DOG, [], 0, 0),
        (DOG, [seen("dog", score=0.3)], 0, 0),
        (DOG, [seen("dog", score=0.31)], 1, 1),
        (TWO, [seen("dog"), seen("cat")], 1, 1),
        (TWO, [seen("cat")], 0, 1 / 2),
        (APPLES, [seen("apple")] * 3, 1, 1),
        (APPLES, [seen("apple")] * 2, 0, 2 / 3),
        (APPLES, [seen("apple")] * 4, 0, 2 / 3),
        (APPLES, [seen("apple")] * 5, 0, 1 / 3),
        (APPLES, [seen("apple")] * 9, 0, 0),
        (APPLES, [seen("apple")] * 3 + [seen("apple", score=0.9)], 1, 1),
        (APPLES, [seen("apple", score=0.8)] * 3, 0, 0),
        (APPLES, [], 0, 0),
        (NO_CATS, [seen("dog")], 1, 1),
        (NO_CATS, [seen("dog"), seen("cat")], 0, 1 / 2),
        (UP_TO_THREE, [seen("dog")] * 3, 1, 1),
        (UP_TO_THREE, [seen("dog")] * 4, 0, 1 / 2),
        (ONE_LEFT, [seen("dog", 80), seen("cat", 20)], 1, 1),
        (ONE_LEFT, [seen("dog", 80), seen("dog", 90), seen("cat", 20)], 0, 2 / 3),
        (RED, [seen("red car")], 1, 1),
        (RED, [seen("blue car")], 0, 1 / 2),
        (RED, [seen("blue car"), seen("red car", score=0.5)], 0, 1 / 2),
        (RED, [seen("red car"), seen("blue car", score=0.5)], 1, 1),
        (RED, [], 0, 0),
        (LEFT, [seen("dog", 80), seen("cat", 20)], 1, 1),
        (LEFT, [seen("dog", 20), seen("cat", 80)], 0, 2 / 3),
        (LEFT, [seen("cat", 20)], 0, 1 / 3),
        (LEFT, [seen("dog", 80)], 0, 1 / 3),
        (LEFT, [seen("dog", 80), seen("cat", 90, score=0.5), seen("cat", 20, score=0.9)], 1, 1),
        (BOTH, [seen("red car"), seen("blue bench")], 1, 1),
        (BOTH, [seen("blue car"), seen("red bench")], 0, 1 / 2),
        (BOTH, [seen("red car")], 0, 1 / 2),
    ],
)
def test_verdicts(metadata, found, verdict, grade):
    result = judged(metadata, *found)
    assert strict(result) == verdict
    assert graded(result) == pytest.approx(grade)


@pytest.mark.parametrize(
    ("metadata", "found", "verdict", "grade"),
    [
        (DOG, [seen("dog")], 1, 1),
        (DOG, [seen("dog"), seen("cat")], 1, 1),
        (DOG, [seen("dog")] * 2, 0, 0),
        (DOG, [seen("dog")] * 3, 0, -1),
        (DOG, [], 0, 0),
        (TWO, [seen("dog"), seen("cat"), seen("cat")], 0, 1 / 2),
        (APPLES, [seen("apple")] * 4, 0, 2 / 3),
        (APPLES, [seen("apple")] * 9, 0, -1),
        (NO_CATS, [seen("dog"), seen("cat")], 0, 1 / 2),
        (UP_TO_THREE, [seen("dog")] * 3, 0, -1),
        (RED, [seen("red car")], 1, 1),
        (RED, [seen("blue car")], 0, 1 / 2),
        (RED, [seen("red car"), seen("blue car")], 0, 0),
        (LEFT, [seen("dog", 80), seen("cat", 20)], 1, 1),
        (LEFT, [seen("dog", 20), seen("cat", 80)], 0, 3 / 4),
        (LEFT, [seen("cat", 20)], 0, 1 / 3),
        (LEFT, [seen("dog", 80)], 0, 1 / 3),
    ],
)
def test_exact_counts_are_flow_grpo_s(metadata, found, verdict, grade):
    result = judged(metadata, *found, judge=exact_conditions)
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


def test_exact_counts_are_flow_grpo_s_in_random_scenes():
    draw, verdicts = random.Random(0), []
    for _ in range(5_000):
        include, found = scene(draw)
        wanted, grade = flow_grpo(include, found)
        result = judged(row("color_attr", *include), *found, judge=exact_conditions)
        assert strict(result) == wanted, (include, found)
        assert graded(result) == pytest.approx(grade, abs=1e-12), (include, found)
        verdicts.append(wanted)
    assert 0.1 < sum(verdicts) / len(verdicts) < 0.9


def test_a_position_needs_the_colour_of_what_it_is_seen_from():
    metadata = row("position", some("dog", color="red"), some("cat", position=["left of", 0]))
    result = judged(metadata, seen("blue dog", 80), seen("cat", 20))
    assert [(each.text, each.met) for each in result] == [
        ("1 dog", 1),
        ("red dog", 0),
        ("1 cat", 1),
        ("cat left of dog", 0),
    ]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (at(10, 50), at(90, 50), {"left of"}),
        (at(90, 50), at(10, 50), {"right of"}),
        (at(50, 10), at(50, 90), {"above"}),
        (at(50, 90), at(50, 10), {"below"}),
        (at(10, 10), at(90, 90), {"left of", "above"}),
        (at(10, 40), at(90, 60), {"left of"}),
        (at(48, 50), at(52, 50), set()),  # centres 4 apart, 0.1 of the sizes
        (at(46, 50), at(54.1, 50), {"left of"}),  # (8.1 - 4) / 8.1 is above a half
        (at(46, 50), at(53.9, 50), set()),
        (at(50, 50), at(50, 50), set()),
        (at(40, 50, 100), at(60, 50, 100), set()),
    ],
)
def test_where_one_box_is_from_another(one, other, expected):
    assert relations(Detection("a", 1, one), Detection("b", 1, other)) == expected


def test_at_most_sixteen_objects_of_a_class_count():
    objects = confident_objects([seen("dog", score=0.5 + n / 100) for n in range(20)], "two_object")
    assert len(objects["dog"]) == 16
    assert objects["dog"][0].score == pytest.approx(0.69)
    assert objects["dog"][-1].score == pytest.approx(0.54)


def test_a_row_may_be_json_text():
    assert requirements(json.dumps(LEFT), LABELS) == requirements(LEFT, LABELS)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ("{", "its metadata: Invalid JSON"),
        (None, "its metadata: Input should be a valid dictionary"),
        ({"include": [some("dog")]}, "its metadata: tag is missing"),
        (row("colours", some("dog")), "tag: Input should be 'single_object', .*it is 'colours'"),
        (row("colors"), "include: Tuple should have at least 1 item"),
        (row("colors", "dog"), r"include.0: Input should be a valid dictionary .*it is 'dog'"),
        (row("colors", some("dog", size=3)), r"unknown key include.0.size"),
        (row("colors", some("dgo")), r"the class 'dgo', which the detector has not: did you mean dog?"),
        (row("colors", some("zebra")), r"class 'zebra', which the detector has not: choose from apple, bench"),
        (row("colors", some("dog", 0)), r"include.0.count: Input should be greater than or equal to 1 \(it is 0\)"),
        (row("colors", some("dog", color="rde")), "color: Input should be 'red', .*it is 'rde'"),
        (row("position", some("dog", position=["left of", 0])), "position of include.0 .* of no earlier clause"),
        (row("position", some("cat"), some("dog", position=["left", 0])), "position.0: Input should be 'left of'"),
        (row("position", some("cat"), some("dog", position="left of")), "position: Input should be a valid tuple"),
        (row("counting", some("cat"), exclude=(some("cow"),)), r"class 'cow'"),
    ],
)
def test_what_is_no_row_of_geneval_is_refused(metadata, message):
    with pytest.raises(RewardError, match=message):
        requirements(metadata, LABELS)
