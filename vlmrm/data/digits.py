"""The bundled demo: 1,797 real handwritten digits as three kinds of comparison, from which text alone teaches nothing.

- `answers`: "Which digit is this?", the right answer over a wrong one.
- `images`: "Draw the digit seven.", a picture of it over a picture of another digit.
- `ranked`: four answers about a picture: right, hedged ("It is three or eight."), and two wrong ones that tie.

Comparisons are made for groups of pictures of different digits in such a way that for any two answers, each is
preferred to the other equally often; likewise for any two pictures. Without looking, every score is a coin toss.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
QUESTION = "Which digit is this?"
SIDE = 56  # pixels: four merged patches of the Qwen-VL family
EVAL_SHARE = 0.2
# Each round pairs every picture with another one; each group of three pictures makes twelve ranked lists.
ROUNDS = {"train": 3, "eval": 1}
TRIPLES = {"train": 120, "eval": 30}


def write_digits(folder: Path, seed: int = 0) -> dict[str, Path]:
    """Writes the pictures and `{train,eval}_{answers,images,ranked}.jsonl`; no picture is in both splits.

    Returns:
        The jsonl files by name: `train_answers`, `train_images`, ..., `eval_ranked`.
    """
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for number, picture in enumerate(pixels.reshape(-1, 8, 8)):
        grey = Image.fromarray((picture / 16 * 255).round().astype(np.uint8))
        grey.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(folder / _image(number))

    rng = np.random.default_rng(seed)
    order = rng.permutation(len(labels))
    held_out = round(EVAL_SHARE * len(labels))
    files = {}
    for split, members in (("train", order[held_out:]), ("eval", order[:held_out])):
        couples = [couple for _ in range(ROUNDS[split]) for couple in _groups(members, labels, 2, rng)]
        triples = _groups(members, labels, 3, rng)[: TRIPLES[split]]
        rows = {
            "answers": [row for couple in couples for row in _answers(couple, labels)],
            "images": [row for couple in couples for row in _images(couple, labels)],
            "ranked": [row for triple in triples for row in _ranked(triple, labels)],
        }
        for kind, some in rows.items():
            files[f"{split}_{kind}"] = folder / f"{split}_{kind}.jsonl"
            lines = (json.dumps({"id": f"{split}-{kind}-{i}", **row, "category": kind}) for i, row in enumerate(some))
            files[f"{split}_{kind}"].write_text("\n".join(lines) + "\n")
    return files


def _groups(members: np.ndarray, labels: np.ndarray, size: int, rng: np.random.Generator) -> list[tuple[int, ...]]:
    """Random disjoint groups of `size` pictures of different digits; what fits in no group is left out."""
    groups, rest = [], [int(member) for member in rng.permutation(members)]
    while rest:
        group: list[int] = []
        for member in rest:
            if len(group) < size and all(labels[member] != labels[other] for other in group):
                group.append(member)
        if len(group) < size:
            break
        groups.append(tuple(group))
        rest = [member for member in rest if member not in group]
    return groups


def _answers(couple: Sequence[int], labels: np.ndarray) -> Iterator[dict[str, Any]]:
    for right, wrong in permutations(couple):
        chosen, rejected = _say(labels[right]), _say(labels[wrong])
        yield {"image": _image(right), "prompt": QUESTION, "chosen": chosen, "rejected": rejected}


def _images(couple: Sequence[int], labels: np.ndarray) -> Iterator[dict[str, Any]]:
    for right, wrong in permutations(couple):
        prompt = f"Draw the digit {WORDS[labels[right]]}."
        yield {"prompt": prompt, "chosen_image": _image(right), "rejected_image": _image(wrong)}


def _ranked(triple: Sequence[int], labels: np.ndarray) -> Iterator[dict[str, Any]]:
    """Twelve lists: in each order of the digits (a, b, c), about the picture of a, two that balance each other.

    In the first, "a or b" beats "c"; in the second, "a" beats "b or c": all orders together, a hedge and a third
    digit win equally often.
    """
    for first, second, third in permutations(triple):
        a, b, c = labels[first], labels[second], labels[third]
        for wrong in (_say(c), _say(b, c)):
            yield {
                "image": _image(first),
                "prompt": QUESTION,
                "responses": [_say(a), _say(a, b), _say(b), wrong],
                "scores": [2, 1, 0, 0],
            }


def _say(*digits: int) -> str:
    return f"It is {' or '.join(WORDS[digit] for digit in sorted(digits))}."


def _image(number: int) -> str:
    return f"images/{number:04d}.png"
