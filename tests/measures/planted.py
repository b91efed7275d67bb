"""Planted scorers: made-up scored pairs of models whose preference rests on known things."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from tests.pair_frames import pair_frame
from vlmrm.measures.analysis import audit
from vlmrm.measures.interventions import INTERVENTIONS

Rng = np.random.Generator


@dataclass(frozen=True)
class Planted:
    """A scorer whose margin is a sum of what text, question and image say, and of what should not matter.

    `rests` is the weight of text, question and image, each right as far as `skill` goes; `shapes` are how much of an
    image they are. `falls_for` is what a decoration of the rejected answer adds to its score, by name. `shaken`
    is the noise that another change brings, `shaking` that of every picture, the row's own too. `lost` are neutral
    pictures or questions so strange to it that it answers at random. `guilt` is the finding that it deserves.
    """

    name: str
    rests: tuple[float, float, float] = (0.5, 1.0, 1.0)
    skill: float = 0.8
    length: float = 0.0
    judges: bool = False  # is shown both answers, in both orders
    position: float = 0.0
    falls_for: dict[str, float] = field(default_factory=dict)
    shaken: dict[str, float] = field(default_factory=dict)
    shaking: float = 0.0
    shapes: float = 1.0
    lost: tuple[str, ...] = ()
    pairs_of_prompt: int = 1
    guilt: tuple[str, str] | None = None

    def frame(self, n: int, rng: Rng) -> pd.DataFrame:
        """Return n scored pairs under every intervention of the test-bed."""
        prompts = np.arange(n) // self.pairs_of_prompt
        shared = rng.normal(0, 1, (int(prompts.max()) + 1, 3))[prompts]
        alone = rng.normal(0, 1, (n, 3))
        within = 0.6 if self.pairs_of_prompt > 1 else 0.0
        parts = self.skill + np.sqrt(within) * shared + np.sqrt(1 - within) * alone
        text, question, image = np.asarray(self.rests)[:, None] * parts.T
        longer = rng.choice([-1, 1], n)
        extra = self.length * longer

        def other(weight: float) -> np.ndarray:
            """What another row's part says: nothing about these answers."""
            return weight * rng.normal(0, 1, n)

        steady = text + question + image + extra
        margin = steady + other(self.shaking)
        _, of_question, of_image = self.rests
        altered = {
            "blank_image": steady - image + other(self.shaking),
            "swapped_image": steady - image + other(of_image) + other(self.shaking),
            "swapped_image_again": steady - image + other(of_image) + other(self.shaking),
            "swapped_question": margin - question + other(of_question),
            "no_question": margin - question,
            "swapped_prompt": text + extra + sum(map(other, (of_question, of_image, self.shaking))),
            "response_only": text + extra,
            "added_markdown": margin,
            "padded_answers": margin - self.length * (longer + 1),
            "agreeing_answers": margin,
            "same_image": steady + other(self.shaking),
            "scattered_image": steady - self.shapes * image + other(self.shaking),
        }
        columns: dict[str, object] = {"cluster": prompts, "chosen_length": 200 + 50 * longer, "rejected_length": 200}
        if self.judges:
            columns |= {"credit_first": margin + self.position > 0, "credit_second": margin - self.position > 0}
        for name, values in altered.items():
            changed = values + (0.03 + self.shaken.get(name, 0.0)) * rng.normal(0, 1, n)
            changed = rng.normal(0, 1, n) if name in self.lost else changed
            # An attack changes the rejected answer alone, and its margin is over the chosen one as it is.
            columns |= {f"{name}_chosen": margin, f"{name}_rejected": margin - changed + self.falls_for.get(name, 0.0)}
        return pair_frame(margin, **columns)


BLIND, DEAF = ("swapped_image", "not reliant"), ("swapped_question", "not reliant")
STRANGE = ("blank_image", "no_question")
MARKDOWN, ORDER = ("added_markdown", "reliant"), ("reversed_answers", "reliant")

GUILTY = [
    Planted("reads texts alone", (1, 0, 0), 1.0, guilt=BLIND),
    Planted("reads texts alone, lost on grey", (1, 0, 0), 1.0, lost=("blank_image",), guilt=BLIND),
    Planted("reads texts alone, lost on all", (1, 0, 0), 1.0, lost=STRANGE, guilt=BLIND),
    Planted("reads texts alone, well", (1, 0, 0), 1.6, guilt=BLIND),
    Planted("reads texts alone, hardly", (1, 0, 0), 0.8, guilt=BLIND),
    Planted("reads question and texts", (1, 1, 0), 0.7, guilt=BLIND),
    Planted("reads question and texts, well", (1, 1, 0), 1.2, guilt=BLIND),
    Planted("reads question and texts, lost on grey", (1, 1, 0), 1.0, lost=("blank_image",), guilt=BLIND),
    Planted("reads texts of prompts with four pairs", (1, 0, 0), 1.4, pairs_of_prompt=4, guilt=BLIND),
    Planted("reads texts, glances at images", (1, 0.5, 0.05), 1.0, guilt=BLIND),
    Planted("looks and reads answers", (0.7, 0, 1), 0.9, guilt=DEAF),
    Planted("looks alone", (0, 0, 1), 1.0, guilt=DEAF),
    Planted("looks alone, well", (0, 0, 1), 1.5, guilt=DEAF),
    Planted("looks, lost without a question", (0.3, 0, 1), 1.0, lost=("no_question",), guilt=DEAF),
    Planted("looks in prompts with two pairs", (0.3, 0, 1), 1.2, pairs_of_prompt=2, guilt=DEAF),
    Planted("likes markdown", falls_for={"added_markdown": 1.0}, guilt=MARKDOWN),
    Planted("loves markdown", falls_for={"added_markdown": 3.0}, guilt=MARKDOWN),
    Planted("likes padding", falls_for={"padded_answers": 1.0}, guilt=("padded_answers", "reliant")),
    Planted("loves padding", falls_for={"padded_answers": 2.0}, guilt=("padded_answers", "reliant")),
    Planted("likes flattery", falls_for={"agreeing_answers": 1.0}, guilt=("agreeing_answers", "reliant")),
    Planted("loves flattery", falls_for={"agreeing_answers": 2.0}, guilt=("agreeing_answers", "reliant")),
    Planted("loves length", length=1.3, guilt=("padded_answers", "reliant")),
    Planted("loves the first", judges=True, position=1.5, guilt=ORDER),
    Planted("loves the last", judges=True, position=-1.5, guilt=ORDER),
    Planted("says always the first", (0, 0, 0), judges=True, position=1.0, guilt=ORDER),
    Planted("knows files by their names", shaken={"same_image": 4.0}, guilt=("same_image", "reliant")),
    Planted("looks at colours alone", (0.5, 0.5, 1), 1.0, shapes=0.0, guilt=("scattered_image", "not reliant")),
    Planted("reads texts, shaken by any change of image", (1, 0, 0), 1.2, shaking=0.4, guilt=BLIND),
    Planted("reads question and texts, shaken as well", (1, 1, 0), 0.9, shaking=0.5, guilt=BLIND),
]
SEES = ("swapped_image", "reliant")
INNOCENT = [
    Planted("looks, right in 72 %", (0, 0.3, 1), 0.47, guilt=SEES),
    Planted("looks and asks", (0, 1, 1), 0.8, guilt=SEES),
    Planted("half by the texts", (1, 0.5, 1), 0.8, guilt=SEES),
    Planted("looks very well", (0, 1, 1), 1.6, guilt=SEES),
    Planted("looks for the worse", (0, 0.3, 1), -0.6, guilt=SEES),
    Planted("guesses", (0, 1, 1), 0.0),
    Planted("hardly better than chance", (0.5, 1, 1), 0.1),
    Planted("looks in prompts with four pairs", (0, 0.5, 1), 1.0, pairs_of_prompt=4, guilt=SEES),
    Planted("looks in prompts with twelve pairs", (0, 0.5, 1), 1.0, pairs_of_prompt=12),
    Planted("weighs all alike", (1, 1, 1), 0.7, guilt=SEES),
    Planted("punishes markdown", (0.3, 0.7, 0.7), 0.5, falls_for={"added_markdown": -3.0}),
    Planted("judges both orders alike", judges=True, guilt=("reversed_answers", "not reliant")),
]


def truth_of(scorer: Planted, count: int = 10_000) -> dict[str, float]:
    """Return what each change really costs, of as many pairs, in units of the margin from which on it counts."""
    found = audit(scorer.frame(count, np.random.default_rng(99)))
    attacks = {name for name, intervention in INTERVENTIONS.items() if intervention.attack}
    return {it.name: (it.loss.value if it.name in attacks else abs(it.loss.value)) / it.margin for it in found}


def trial(scorer: Planted, truth: dict[str, float], n: int, seed: list[int]) -> tuple[list[str], bool]:
    """Return the questions that an audit of n pairs answers wrongly, and whether it answers as the scorer deserves."""
    states = {finding.name: finding.state for finding in audit(scorer.frame(n, np.random.default_rng(seed)))}
    claims = {
        "reliant": lambda size: size <= 1,
        "not reliant": lambda size: size >= 1,
        "undecided": lambda size: False,
    }
    wrong = [name for name, state in states.items() if claims[state](truth[name])]
    return wrong, scorer.guilt is not None and states[scorer.guilt[0]] == scorer.guilt[1]
