"""Plans against simulated studies of the size that they ask for, and against a published example."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from pair_frames import pair_frame
from scipy.stats import norm, ttest_1samp

from vlmrm import cli
from vlmrm.errors import ConfigError
from vlmrm.measures.power import Design, design_of

RNG = np.random.default_rng(0)


def test_paired_proportions_are_connors():
    """Connor's formula written with the two kinds of discordant pairs, as textbooks have it."""
    p10, p01 = 0.13, 0.07
    z, z_power = norm.ppf(0.975), norm.ppf(0.8)
    psi, delta = p10 + p01, p10 - p01
    n = (z * math.sqrt(psi) + z_power * math.sqrt(psi - delta**2)) ** 2 / delta**2
    assert Design(discordance=0.2).pairs(delta) == math.ceil(n)
    # Fleiss, Levin and Paik: 0.5 against 0.6 takes 194 for one sample.
    assert Design(threshold=0.5).pairs(0.1) == 194


def test_studies_of_that_size_find_the_difference_in_four_of_five():
    """Of prompts whose pairs share what decides them, and of two models that disagree in a fifth of the pairs."""
    design = Design(discordance=0.2, pairs_per_prompt=4, correlation=0.25)
    prompts = math.ceil(design.pairs(0.05) / 4)
    kinds = np.array([1, -1, 0])
    shares = [0.125, 0.075, 0.8]

    def drawn(*size: int) -> np.ndarray:
        return RNG.choice(kinds, p=shares, size=size)

    # A pair takes what its prompt has with a probability of one half: two of them agree by that in a quarter.
    studies = np.where(RNG.random((400, prompts, 4)) < 0.5, drawn(400, prompts, 1), drawn(400, prompts, 4))
    p = ttest_1samp(studies.mean(axis=2), 0, axis=1).pvalue
    assert np.mean(p < 0.05) == pytest.approx(0.8, abs=0.06)


@pytest.mark.parametrize("design", [Design(), Design(threshold=0.7), Design(pairs_per_prompt=9, correlation=0.4)])
def test_a_detectable_difference_needs_the_pairs_that_detect_it(design: Design):
    for pairs in (300, 5000):
        assert design.pairs(design.detectable(pairs)) == pytest.approx(pairs, abs=1)
    assert math.isnan(design.detectable(3)) and math.isnan(design.detectable(0))


def test_results_tell_their_own_design():
    shared = np.repeat(RNG.normal(size=400), 3)
    frames = [
        pair_frame(
            0.6 + shared + RNG.normal(0, noise, 1200),
            prompt_id=[f"p{i // 3}" for i in range(1200)],
            checkpoint=f"checkpoint-{noise}",
        )
        for noise in (1, 2)
    ]
    right = [(frame["chosen_score"] > 0).to_numpy(float) for frame in frames]
    design, pairs = design_of(frames, Design())
    assert (pairs, design.pairs_per_prompt) == (1200, 3)
    assert design.discordance == pytest.approx(np.mean(right[0] != right[1]))
    alone, _ = design_of(frames[:1], Design(threshold=0.5))
    centred = (right[0] - right[0].mean()).reshape(400, 3)
    between = (centred.sum(axis=1) ** 2).sum() - (centred**2).sum()
    assert alone.correlation == pytest.approx(between / (centred**2).sum() / 2, abs=0.02), "of all couples of a prompt"


def planned(*words: str) -> None:
    cli.run(lambda: cli.app(["power", *words], result_action="return_value"))


def test_the_command_plans(tmp_path, capsys):
    planned("--difference", "0.02")
    assert (
        "A difference of 2.0 points between two models that disagree in 20.0% of pairs needs"
        in capsys.readouterr().out
    )
    frame = pair_frame(RNG.normal(0.5, 1, 300))
    frame.to_parquet(tmp_path / "mine.scores.parquet")
    planned(str(tmp_path / "mine.csv"), "--threshold", "0.5")
    out = capsys.readouterr().out
    assert "300 pairs show a difference of 8.1 points from an accuracy of 50.0%" in out
    assert "300 prompts, 1.0 pairs each" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "there is nothing to plan"),
        (["--difference", "2"], "a difference of 2 is impossible"),
        (["--difference", "0.1", "--pairs", "30"], "give one, and the other follows"),
        (["--pairs", "30", "--discordance", "20"], "discordance is 20: it is a share"),
        (["--pairs", "30", "--correlation", "2"], "correlation is 2"),
        (["absent.csv"], r"there is no absent\.scores\.parquet"),
    ],
)
def test_what_cannot_be_planned_is_refused(words, sentence, capsys):
    with pytest.raises(SystemExit) as refused:
        planned(*words)
    assert refused.value.code == ConfigError.exit_code
    assert re.search(sentence, capsys.readouterr().err)
