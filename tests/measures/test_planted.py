"""The audit of planted scorers: the guilty are found, nobody is accused or acquitted without proof."""

from __future__ import annotations

import numpy as np
import pytest

from tests.measures.planted import GUILTY, INNOCENT, Planted, trial, truth_of
from tests.pair_frames import pair_frame
from vlmrm.measures.analysis import Finding, audit, holm

SEEDS = 8
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def truths() -> dict[str, dict[str, float]]:
    return {scorer.name: truth_of(scorer) for scorer in (*GUILTY, *INNOCENT)}


@pytest.mark.parametrize("n", [30, 300])
def test_few_audits_err_and_most_guilty_are_found(n: int, truths):
    for group in (GUILTY, INNOCENT):
        trials = [trial(s, truths[s.name], n, [n, i, seed]) for i, s in enumerate(group) for seed in range(SEEDS)]
        wrong = np.mean([bool(names) for names, _ in trials])
        assert wrong <= 0.05, [names for names, _ in trials if names]
        if n >= 300:
            deserved = np.repeat([bool(scorer.guilt) for scorer in group], SEEDS)
            answered = np.array([hit for _, hit in trials])
            assert answered[deserved].mean() >= (0.85 if group is INNOCENT else 0.9)


def found(scorer: Planted, n: int = 300) -> list[Finding]:
    return audit(scorer.frame(n, np.random.default_rng(3)))


def of(findings: list[Finding], name: str) -> Finding:
    return next(finding for finding in findings if finding.name == name)


def named(name: str) -> Planted:
    return next(each for each in (*GUILTY, *INNOCENT) if each.name == name)


def test_grey_images_alone_decide_for_image_answers():
    margins = np.random.default_rng(0).normal(0.583, 1, 300)
    images = {"chosen_length": 0, "rejected_length": 0, "chosen_pixels": 3136, "rejected_pixels": 3136}
    grey = pair_frame(margins, blank_image_chosen=0.0, blank_image_rejected=0.0, **images)
    assert of(audit(grey), "blank_image").state == "reliant"
    assert of(audit(grey.assign(blank_image_chosen=margins)), "blank_image").state == "not reliant"


def test_pairs_as_they_are_accuse_nobody():
    """The longer answers come first and are the better ones, and those are easier to tell."""
    easy = RNG.random(300) < 0.6
    frame = pair_frame(RNG.normal(np.where(easy, 1.5, 0.2), 1), chosen_length=np.where(easy, 300, 100))
    assert audit(frame.assign(rejected_length=200)) == []


def test_data_of_one_question_cannot_tell():
    same = {f"no_question_{side}": value for side, value in (("chosen", 1.0), ("rejected", 0.0))}
    frame = pair_frame(np.ones(300), **same)
    assert of(audit(frame.assign(prompt_text=frame["cluster"])), "no_question").state == "not reliant"
    finding = of(audit(frame.assign(prompt_text="Which digit?")), "no_question")
    assert finding.state == "undecided" and "cannot tell" in finding.reason


def test_position_is_what_both_orders_differ_by():
    always_first = pair_frame(RNG.normal(1, 1, 300), credit_first=1.0, credit_second=0.0)
    finding = of(audit(always_first), "reversed_answers")
    assert (finding.state, finding.loss.value, finding.left.value) == ("reliant", 1.0, 0.0)
    assert of(audit(always_first.assign(credit_second=1.0)), "reversed_answers").state == "not reliant"


def test_punished_decorations_are_no_finding():
    assert of(found(named("punishes markdown")), "added_markdown").state == "not reliant"


def test_a_finding_has_its_numbers():
    findings = found(named("looks alone"))
    finding = of(findings, "swapped_image")
    frame = named("looks alone").frame(300, np.random.default_rng(3))
    right = (frame["chosen_score"] > 0).to_numpy(float)
    same = (frame["same_image_chosen"] > frame["same_image_rejected"]).to_numpy(float)
    kept = [
        (frame[f"{name}_chosen"] > frame[f"{name}_rejected"]).to_numpy(float)
        for name in ("swapped_image", "swapped_image_again")
    ]
    assert finding.loss.value == pytest.approx(np.mean((right + same) / 2 - np.mean(kept, axis=0))), (
        "each a mean of two"
    )
    assert (finding.loss.n, finding.loss.clusters, finding.margin) == (300, 300, 0.05)
    assert finding.left.value == pytest.approx(np.mean(kept))
    assert finding.p_value < 0.05 and 0.05 < finding.detectable < 0.25


def test_few_pairs_without_change_prove_nothing():
    def blind(n: int) -> Finding:
        same = {f"swapped_image_{side}": value for side, value in (("chosen", 1.0), ("rejected", 0.0))}
        return of(audit(pair_frame(np.ones(n), **same)), "swapped_image")

    assert blind(30).state == "undecided" and blind(300).state == "not reliant"
    assert "12 clusters are too few" in blind(12).reason


def test_sight_in_one_category_of_five_is_said():
    frame = named("looks and asks").frame(1000, np.random.default_rng(3))
    kinds = np.arange(1000) % 5
    for name in ("swapped_image", "swapped_image_again", "same_image"):
        for side in ("chosen", "rejected"):
            frame[f"{name}_{side}"] = frame[f"{name}_{side}"].where(kinds == 0, frame[f"{side}_score"])
    findings = audit(frame.assign(category=[f"kind {kind}" for kind in kinds]))
    states = {finding.category: finding.state for finding in findings if finding.name == "swapped_image"}
    assert [*states] == ["", *(f"kind {kind}" for kind in range(5))]
    assert states["kind 0"] == "reliant" and {states[f"kind {kind}"] for kind in range(1, 5)} == {"not reliant"}


def test_prompts_an_intervention_never_touched_are_no_evidence():
    """Of four hundred prompts four have a picture, whose hundred pairs each all rest on it."""
    prompts = [f"prompt-{i}" for i in range(396)] + [f"picture-{i % 4}" for i in range(400)]
    changed = np.where(np.arange(796) < 396, np.nan, RNG.normal(0, 1, 796))
    frame = pair_frame(np.ones(796), swapped_image_chosen=changed, cluster=prompts)
    frame["swapped_image_rejected"] = np.where(np.isnan(changed), np.nan, 0.0)
    finding = of(audit(frame), "swapped_image")
    assert finding.state == "undecided" and "4 clusters are too few" in finding.reason


def test_holm_is_the_loop_over_its_definition():
    p = RNG.uniform(0, 0.2, 8)
    order, largest = np.argsort(p), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min((len(p) - rank) * p[index], 1.0))
        assert holm(list(p))[index] == pytest.approx(largest)
    assert holm([0.02, 0.03], [4, 1]) == pytest.approx([0.025, 0.03]), "weighted, the first is 5 / 4 of itself"
