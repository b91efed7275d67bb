"""Intervals against the jackknife written as a loop over scipy's figures, and against the truth of simulations."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import binomtest, spearmanr, ttest_1samp

from vlmrm.measures.intervals import Correlation, Figure, Interval, Lost, Mean, numbered, spread
from vlmrm.measures.statistics import CalibrationError, Temperature, fitted_temperature, log_losses

RNG = np.random.default_rng(0)
NAMES = np.repeat(np.arange(60), RNG.integers(1, 5, 60))  # prompts of 1 to 4 rows each
COUNT = len(NAMES)
X = RNG.normal(size=60)[NAMES] + 0.5 * RNG.normal(size=COUNT)
Y = (X + RNG.normal(size=COUNT)).round(1)  # with ties
WEIGHTS = np.linspace(0.5, 2, COUNT)
FIRST = RNG.random(COUNT) < 0.5


def wilson(right: int, count: int) -> Interval:
    return Interval(*binomtest(right, count).proportion_ci(method="wilson"))


def jackknifed(figure: Callable[[np.ndarray], float]) -> float:
    """The standard error of a figure of chosen rows, leaving out one prompt at a time."""
    left_out = np.array([figure(np.flatnonzero(i != NAMES)) for i in range(60)])
    return math.sqrt(59 / 60 * ((left_out - left_out.mean()) ** 2).sum())


@pytest.mark.parametrize(
    ("figure", "plain", "tolerance"),
    [
        (Mean(X), lambda i: X[i].mean(), 1e-9),
        (Mean(X, WEIGHTS), lambda i: np.average(X[i], weights=WEIGHTS[i]), 1e-9),
        (Lost(Mean(X), Mean(Y)), lambda i: X[i].mean() - Y[i].mean(), 1e-9),
        (Correlation(X, Y), lambda i: spearmanr(X[i], Y[i]).statistic, 0.03),
        (Temperature(X + 1), lambda i: fitted_temperature(X[i] + 1), 0.05),
    ],
)
def test_figures_and_errors_match_the_jackknife_over_prompts(figure: Figure, plain, tolerance):
    found = figure.estimate(NAMES)
    assert found.value == pytest.approx(plain(np.arange(COUNT)))
    assert found.standard_error == pytest.approx(jackknifed(plain), rel=tolerance)
    assert figure.influence().rows.sum() == pytest.approx(0, abs=1e-9)
    assert found.low < found.value < found.high


def test_prompts_of_one_pair_each_have_wilsons_interval():
    right = np.arange(4000) < 3600
    found = Mean(right, scale="share").estimate(np.arange(4000))
    assert (found.low, found.high) == pytest.approx(wilson(3600, 4000), rel=1e-3)
    alike = Mean(np.repeat(right[::10], 10), scale="share").estimate(np.arange(4000) // 10)
    assert (alike.low, alike.high) == pytest.approx(wilson(360, 400), rel=0.01)


def test_a_mean_of_single_rows_has_students_interval():
    values = np.array([0.3, -1.2, 2.5, 0.9, 4.1])
    of_mean, students = Mean(values).estimate(np.arange(5)), ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert (of_mean.low, of_mean.high) == pytest.approx((students.low, students.high))


def test_lightly_weighted_rows_do_not_narrow_an_interval():
    rng, sets, covered = np.random.default_rng(0), 300, 0
    weights = np.where(np.arange(100) % 4, 0.05, 1.0)
    for _ in range(sets):
        found = Mean(rng.random(100) < 0.8, weights, scale="share").estimate(np.arange(100))
        covered += found.low <= 0.8 <= found.high
    assert 0.91 <= covered / sets <= 0.99
    all_right = Mean(np.ones(130), np.repeat([1.0, 1e-9], [30, 100]), scale="share").estimate(np.arange(130))
    assert all_right.low == pytest.approx(wilson(30, 30).low, abs=0.01)


def test_perfect_figures_leave_room_for_the_unseen():
    none = Mean(np.zeros(30), scale="difference").estimate(np.arange(30))
    assert -0.1 < none.low < -0.05 and 0.05 < none.high < 0.1
    all_right = Mean(np.ones(300), scale="share").estimate(np.arange(300) // 10)
    assert all_right.high == 1 and 0.85 < all_right.low < 0.9, "worth its thirty prompts"


def test_few_heavy_prompts_have_the_freedom_of_few():
    def freedom(sizes: list[int]) -> float:
        names = np.repeat(np.arange(len(sizes)), sizes)
        return spread(Mean(RNG.normal(size=len(names))).influence(), names)[0].freedom

    assert freedom([3] * 50) == pytest.approx(49) and freedom([1000] * 5 + [1] * 45) == pytest.approx(4, abs=0.1)


def test_missing_values_do_not_count():
    y = Y.copy()
    y[5] = np.nan
    found = Correlation(X, y).estimate(NAMES)
    assert found.value == pytest.approx(spearmanr(np.delete(X, 5), np.delete(Y, 5)).statistic)
    assert found.n == COUNT - 1


def test_one_prompt_and_no_rows_give_no_interval():
    names = numbered(["a", "a", "b"])
    mean = Mean(np.array([1.0, 0.0, np.nan])).estimate(names)
    assert (mean.value, mean.n, mean.clusters) == (0.5, 2, 1)
    assert math.isnan(mean.low) and math.isnan(mean.standard_error)
    for figure in (Mean(np.full(3, np.nan)), Correlation(np.ones(3), np.arange(3.0))):
        assert math.isnan(figure.estimate(names).value)


def lists(rng: np.random.Generator, prompts: int, answers: int) -> tuple[np.ndarray, np.ndarray]:
    """Margins of all pairs of a list of answers to each prompt, which share the answers and how hard the prompt is."""
    first, second = np.triu_indices(answers, 1)
    merits = rng.normal(0, 0.6, (prompts, answers))
    margins = 0.8 + rng.normal(0, 0.5, (prompts, 1)) + merits[:, first] - merits[:, second]
    return margins.ravel(), np.repeat(np.arange(prompts), len(first))


def figures(margins: np.ndarray, rng: np.random.Generator) -> dict[str, Figure]:
    other = np.where(rng.random(len(margins)) < 0.3, rng.normal(0, 1, len(margins)), margins)
    noise = 0.5 * margins + rng.normal(0, 1, len(margins))
    return {
        "share": Mean(margins > 0, scale="share"),
        "difference": Mean((margins > 0) - (other > 0.0).astype(float), scale="difference"),
        "mean": Mean(margins),
        "loss": Mean(log_losses(margins), scale="positive"),
        "rho": Correlation(margins, noise),
    }


@pytest.mark.parametrize(("prompts", "answers"), [(10, 9), (20, 4), (50, 2)])
def test_intervals_cover_the_truth_at_their_stated_rate(prompts: int, answers: int):
    rng, sets = np.random.default_rng(prompts + 1), 250
    truth = {name: figure.influence().value for name, figure in figures(lists(rng, 2000, answers)[0], rng).items()}
    covered = dict.fromkeys(truth, 0)
    for _ in range(sets):
        margins, names = lists(rng, prompts, answers)
        for name, figure in figures(margins, rng).items():
            found = figure.estimate(names)
            covered[name] += found.low <= truth[name] <= found.high
    for name, count in covered.items():
        assert 0.91 <= count / sets <= 0.99, name


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_calibration_errors_of_small_sets_are_corrected(temperature: float):
    """What chance adds is no error: the plain figure of a calibrated model is far above zero."""
    rng, covered, above = np.random.default_rng(1), 0, 0

    def margins(prompts: int) -> tuple[np.ndarray, np.ndarray]:
        names = np.repeat(np.arange(prompts), 3)
        size = np.abs(rng.normal(0, 1, prompts)[names] + rng.normal(0, 1.5, len(names)))
        return np.where(rng.random(len(names)) < expit(size / temperature), size, -size), names

    truth = CalibrationError(margins(100_000)[0]).influence().value if temperature > 1 else 0.0
    for _ in range(200):
        drawn, names = margins(50)
        found = CalibrationError(drawn).estimate(names)
        covered += found.low <= truth <= found.high
        above += found.value > truth
    assert 0.91 <= covered / 200 <= 0.995
    assert above > 0.5 * 200
