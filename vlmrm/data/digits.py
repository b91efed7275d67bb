"""The data of the demo: 1,797 handwritten digits (scikit-learn's) as three kinds of comparison.

- `answers`: "Which digit is this?", the right answer over a wrong one.
- `images`: "Draw the digit seven on page 1203.", an image of it over an image of another digit. The page is the number
  of the image, so that held-out prompts are not those of the training.
- `ranked`: four answers about an image: right, hedged ("It is three or eight."), and two wrong ones that tie.

Text alone teaches nothing: of any two answers each is preferred equally often, and so of any two images, because all
comparisons of a group of images of different digits are made. A model that ignores the images is at chance.
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
# Each round pairs every image with another one; each triple makes twelve ranked lists.
ROUNDS = {"train": 3, "eval": 1}
TRIPLES = {"train": 120, "eval": 10}


def write_digits(folder: Path, seed: int = 0) -> dict[str, Path]:
    """Write the images and `{train,eval}_{answers,images,ranked}.jsonl`, and return these files by name.

    No image and no prompt is in both splits.
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
        for kind, content in rows.items():
            name = f"{split}_{kind}"
            lines = (json.dumps({"id": f"{split}-{kind}-{i}", **r, "category": kind}) for i, r in enumerate(content))
            files[name] = folder / f"{name}.jsonl"
            files[name].write_text("\n".join(lines) + "\n")
    return files


def _groups(members: np.ndarray, labels: np.ndarray, size: int, rng: np.random.Generator) -> list[tuple[int, ...]]:
    """Return random disjoint groups of `size` images of different digits; images that fit in no group are left out."""
    groups, remaining = [], [int(member) for member in rng.permutation(members)]
    while remaining:
        group: list[int] = []
        for member in remaining:
            if len(group) < size and labels[member] not in labels[group]:
                group.append(member)
        if len(group) < size:
            break
        groups.append(tuple(group))
        remaining = [member for member in remaining if member not in group]
    return groups


def _answers(couple: Sequence[int], labels: np.ndarray) -> Iterator[dict[str, Any]]:
    for right, wrong in permutations(couple):
        chosen, rejected = _say(labels[right]), _say(labels[wrong])
        yield {"image": _image(right), "prompt": QUESTION, "chosen": chosen, "rejected": rejected}


def _images(couple: Sequence[int], labels: np.ndarray) -> Iterator[dict[str, Any]]:
    for right, wrong in permutations(couple):
        prompt = f"Draw the digit {WORDS[labels[right]]} on page {right}."
        yield {"prompt": prompt, "chosen_image": _image(right), "rejected_image": _image(wrong)}


def _ranked(triple: Sequence[int], labels: np.ndarray) -> Iterator[dict[str, Any]]:
    """Yield twelve lists: for each order (a, b, c) of the digits two about the image of a, which balance each other.

    In the first, "a or b" beats "c"; in the second, "a" beats "b or c". Over all orders, a hedge and a third digit
    win equally often.
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
