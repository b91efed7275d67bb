"""The losses against their shortest formulas."""

from __future__ import annotations

import math

import pytest
import torch

from vlmrm.batching.collator import PAIR_TYPES
from vlmrm.training.losses import Objective, bradley_terry_tie, judged_weights


def pairs_of(rows: list[tuple]) -> dict[str, torch.Tensor]:
    """rows of (chosen, rejected, margin, weight, tie, irrelevant), and of an output and a target where they differ"""
    names = ("chosen", "rejected", "margin", "weight", "tie", "irrelevant", "output", "target")
    columns = zip(*((*row, 0, math.nan)[: len(names)] if len(row) < len(names) else row for row in rows), strict=True)
    return {name: torch.tensor(column, dtype=PAIR_TYPES[name]) for name, column in zip(names, columns, strict=True)}


SCORES = torch.tensor([[1.5], [-0.5], [0.25], [2.0]], dtype=torch.float64)


def total(loss: Objective, scores: torch.Tensor, pairs: dict[str, torch.Tensor]) -> float:
    return sum(loss(scores, pairs, judged_weights(pairs)).values()).item()


def softplus(value: float) -> float:
    return math.log1p(math.exp(value))


def of_tie(difference: float) -> float:
    return (softplus(difference) + softplus(-difference)) / 2


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(0, 1, 0, 1, 0, 0), (2, 3, 0, 1, 0, 0)], (softplus(-2.0) + softplus(1.75)) / 2),
        ([(0, 1, 0, 3, 0, 0), (2, 3, 0, 1, 0, 0)], (3 * softplus(-2.0) + softplus(1.75)) / 4),
        ([(0, 1, 0, 1, 1, 0)], of_tie(2.0)),
        ([(0, 1, 0, 1, 1, 1), (2, 3, 0, 3, 1, 1)], (of_tie(2.0) + 3 * of_tie(1.75)) / 4),
    ],
    ids=["-log σ(d)", "weights", "ties are half wins", "irrelevant pairs"],
)
def test_the_loss_is_the_weighted_mean_of_its_formula(rows, expected):
    assert total(Objective(), SCORES, pairs_of(rows)) == pytest.approx(expected, rel=1e-6)


def test_a_margin_is_subtracted_from_the_difference():
    pairs = pairs_of([(0, 1, 0.75, 1, 0, 0)])
    assert total(Objective(), SCORES, pairs) == pytest.approx(softplus(-1.25), rel=1e-6)


def test_irrelevant_loss_is_weighted_and_least_at_ties():
    least, more = bradley_terry_tie(torch.tensor([0.0, 1.0])).tolist()
    assert least == pytest.approx(math.log(2)) and more > least
    preference = (0, 1, 0, 1, 0, 0)
    pairs = pairs_of([preference, (2, 3, 0, 1, 1, 1)])
    parts = Objective(irrelevant_weight=0.3)(SCORES, pairs, judged_weights(pairs))
    assert parts["irrelevant"].item() == pytest.approx(0.3 * of_tie(1.75), rel=1e-6)
    assert parts["preference"].item() == pytest.approx(total(Objective(), SCORES, pairs_of([preference])))


def test_scores_of_half_precision_are_compared_in_float32():
    pairs = pairs_of([(0, 1, 0.1, 1, 0, 0), (2, 3, 0, 1, 1, 1)])
    loss = Objective(center_coefficient=0.01)
    assert total(loss, SCORES.bfloat16(), pairs) == total(loss, SCORES.float(), pairs)


def test_centring_adds_the_square_of_the_sum():
    pairs = pairs_of([(0, 1, 0, 1, 0, 0)])
    parts = Objective(center_coefficient=0.01)(SCORES, pairs, judged_weights(pairs))
    assert parts["center"].item() == pytest.approx(0.01 * 1.0**2, rel=1e-6)


def test_the_loss_ignores_how_steps_are_split():
    rows = [(0, 1, 0, 1, 0, 0), (0, 2, 0.5, 2, 0, 0), (1, 2, 0, 1, 1, 0), (3, 2, 0, 1, 1, 1)]
    unsplit = pairs_of(rows)
    loss = Objective(irrelevant_weight=0.5, center_coefficient=0.01)
    parts = [pairs_of(rows[:1]), pairs_of(rows[1:])]
    totals = judged_weights(unsplit)
    split = sum(sum(loss(SCORES, part, totals).values()).item() for part in parts)
    assert split == pytest.approx(total(loss, SCORES, unsplit), rel=1e-6)


def test_batches_without_pairs_have_zero_loss_and_gradient():
    scores = torch.tensor([[3.0]], requires_grad=True)
    empty = {name: tensor[:0] for name, tensor in pairs_of([(0, 0, 0, 1, 0, 0)]).items()}
    parts = Objective(center_coefficient=0.1)(scores, empty, torch.tensor([0.0, 0.0]))
    value = sum(parts.values())
    value.backward()
    assert value.item() == 0.0
    assert scores.grad is not None and scores.grad.item() == 0.0
