"""Models that cheat, each in a known way, are found out; honest ones are not accused."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import spearmanr

from tests.pair_frames import pair_frame
from vlmrm.errors import DataError
from vlmrm.measures.intervals import Estimate
from vlmrm.measures.metrics import METRICS
from vlmrm.measures.pairs import PairArrays

COUNT = 600
RNG = np.random.default_rng(0)  # of this module's columns; tests draw from seeds of their own, in any order
# What the merits say, and the text alone; the chosen answer is usually the better one.
MERIT = RNG.normal(1.0, 1.0, COUNT)
TEXT = RNG.normal(0.7, 1.0, COUNT)
LENGTHS = RNG.integers(10, 200, (COUNT, 2))


def scored(margins, **interventions):
    """A frame whose interventions have the given margins."""
    columns = {"chosen_length": LENGTHS[:, 0], "rejected_length": LENGTHS[:, 1]}
    for name, values in interventions.items():
        values = np.asarray(values)
        columns |= {f"{name}_chosen": values, f"{name}_rejected": 0.0 * values}
    return pair_frame(margins, **columns)


def shortcuts(frame) -> dict[str, Estimate]:
    """Every metric that needs a column."""
    pairs = PairArrays(frame)
    return {m.name: m.compute(pairs).estimate(pairs.clusters) for m in METRICS.values() if m.needs}


def holds(estimate: Estimate, value: float) -> bool:
    return estimate.low <= value <= estimate.high


def test_a_model_that_prefers_length_is_exposed():
    longer = (LENGTHS[:, 0] - LENGTHS[:, 1]).astype(float)
    found = shortcuts(scored(longer / 50))
    assert found["margin_length_correlation"].value == pytest.approx(1)
    assert found["accuracy_chosen_longer"].value == 1
    assert found["accuracy_chosen_shorter"].value == 0
    fair = shortcuts(scored(MERIT))
    assert holds(fair["margin_length_correlation"], 0)
    assert fair["margin_length_correlation"].value == pytest.approx(spearmanr(MERIT, longer).statistic)
    assert abs(fair["accuracy_chosen_longer"].value - fair["accuracy_chosen_shorter"].value) < 0.1


def test_length_baseline_halves_ties_and_ignores_images():
    frame = pair_frame(np.ones(5), chosen_length=[9, 4, 5, 8, 0], rejected_length=[3, 6, 5, 1, 0])
    assert shortcuts(frame)["length_baseline_accuracy"].value == 2.5 / 4


def test_keeping_preference_under_other_prompts_shows_no_reliance():
    found = shortcuts(scored(MERIT, swapped_prompt=MERIT))
    assert found["prompt_reliance"] == pytest.approx((0, 0, 0, 0, len(MERIT), len(MERIT)))
    assert found["swapped_prompt_margin"].value == pytest.approx(MERIT.mean())
    found = shortcuts(scored(MERIT, swapped_prompt=np.random.default_rng(1).normal(0, 0.1, COUNT)))
    assert holds(found["prompt_reliance"], 1.0) and holds(found["swapped_prompt_margin"], 0.0)


def test_reliance_compares_the_same_pairs():
    """Where only some pairs have images, the others' accuracy does not count on either side."""
    found = shortcuts(scored([1.0, 1.0, -1.0, -1.0] * 150, blank_image=[1.0, -1.0, np.nan, np.nan] * 150))
    assert found["blank_image_accuracy"].value == 0.5
    assert found["image_reliance"].value == 0.5


def test_pairs_that_people_tied_do_not_count():
    tie = np.arange(COUNT) % 3 == 0
    frame = scored(MERIT, blank_image=TEXT, response_only=TEXT)
    found, kept = shortcuts(frame.assign(tie=tie)), shortcuts(frame[~tie])
    assert [e.value for e in found.values()] == pytest.approx([e.value for e in kept.values()], nan_ok=True)


def test_score_correlations_follow_image_size():
    pixels = np.random.default_rng(1).integers(1000, 90_000, (COUNT, 2))
    frame = pair_frame(MERIT, chosen_pixels=pixels[:, 0], rejected_pixels=pixels[:, 1])
    by_area = shortcuts(frame.assign(chosen_score=pixels[:, 0] * 1e-3, rejected_score=pixels[:, 1] * 1e-3))
    assert by_area["score_area_correlation"].value == pytest.approx(1)


def test_a_broken_score_of_an_intervention_is_named():
    frame = scored(MERIT, blank_image=TEXT)
    frame.loc[4, "blank_image_chosen"] = np.nan
    with pytest.raises(DataError, match=r"blank_image score .* comparison row4"):
        shortcuts(frame)
