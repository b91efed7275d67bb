"""What is said of planted models: who does not look is not acquitted, who looks is not accused, in any sample."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from pair_frames import pair_frame

from vlmrm.evaluation.report.verdict import SightVerdict, verdict
from vlmrm.measures.metrics import METRIC, METRICS, PairArrays

Rng = np.random.Generator
SEEDS = range(40)


def planted(margins, *, swapped=None, blank=None, **columns) -> pd.DataFrame:
    """Pairs of a model with these margins, and these under another row's image and under grey."""
    margins = np.asarray(margins)
    columns = {"chosen_length": 10, "rejected_length": 12, **columns}
    for name, changed in (("swapped_image", swapped), ("blank_image", blank)):
        if changed is not None:
            columns |= {f"{name}_chosen": changed, f"{name}_rejected": 0.0}
    return pair_frame(margins, **columns)


def of(frame: pd.DataFrame) -> SightVerdict:
    pairs = PairArrays(frame)
    named = ("accuracy_half_ties", "length_baseline_accuracy", "score_area_correlation")
    used = [m for m in METRICS if m.name in named or (m.needs or "").startswith(("swapped_image", "blank_image"))]
    estimates = {m.name: m.compute(pairs).estimate(pairs.prompts) for m in used}
    figures = {name: estimate._asdict() for name, estimate in estimates.items()}
    return verdict({**figures, "prompt_count": frame["prompt_id"].nunique()})


def verdicts(model: Callable[[int, Rng], pd.DataFrame], count: int) -> list[SightVerdict]:
    return [of(model(count, np.random.default_rng([seed, count]))) for seed in SEEDS]


def share(found: list[SightVerdict], looks: bool | None) -> float:
    return float(np.mean([one.looks is looks for one in found]))


def lost_on_grey(n: int, rng: Rng) -> pd.DataFrame:
    """Reads the texts alone, and answers at random when every picture is grey, of which it has seen none."""
    text = rng.normal(1.04, 1, n)
    return planted(text, swapped=text + rng.normal(0, 0.05, n), blank=rng.normal(0, 1, n))


def reads_texts(n: int, rng: Rng) -> pd.DataFrame:
    text = rng.normal(1.04, 1, n)
    return planted(text, swapped=text + rng.normal(0, 0.05, n), blank=text + rng.normal(0, 0.05, n))


def looks_alone(n: int, rng: Rng) -> pd.DataFrame:
    """Right in 72 % by the image alone."""
    return planted(rng.normal(0.583, 1, n), swapped=rng.normal(0, 1, n), blank=rng.normal(0, 1, n))


def looks_and_reads(n: int, rng: Rng) -> pd.DataFrame:
    """Half by the image, half by the texts, which alone are right in 69 %."""
    text = rng.normal(0.7, 1, n)
    return planted(
        text + rng.normal(0.7, 1, n), swapped=text + rng.normal(0, 1, n), blank=text + rng.normal(0, 0.1, n)
    )


def looks_for_the_worse(n: int, rng: Rng) -> pd.DataFrame:
    return planted(rng.normal(-0.583, 1, n), swapped=rng.normal(0, 1, n), blank=rng.normal(0, 1, n))


def guesses(n: int, rng: Rng) -> pd.DataFrame:
    """Right as often as chance, by the image: that images take nothing away says nothing."""
    return planted(rng.normal(0, 1, n), swapped=rng.normal(0, 1, n), blank=rng.normal(0, 1, n))


def reads_prompts_of_many_pairs(n: int, rng: Rng) -> pd.DataFrame:
    """Reads the texts; each prompt has twelve pairs, all of which another image turns over in one prompt of seven."""
    prompts = np.arange(n) // 12
    turned = np.where(rng.random(prompts.max() + 1) < 0.15, rng.choice([-1, 1], prompts.max() + 1), 0)[prompts]
    text = rng.normal(1.04, 1, n)
    swapped = np.where(turned == 0, text, turned * np.abs(text))
    right = np.where(turned == 0, text, np.where(rng.random(n) < 0.5, 1, -1) * np.abs(text))
    return planted(right, swapped=swapped, blank=text, prompt_id=[f"prompt-{p}" for p in prompts])


@pytest.mark.parametrize("count", [30, 60, 300])
def test_a_model_that_reads_alone_is_not_acquitted_because_grey_is_strange_to_it(count):
    assert share(verdicts(lost_on_grey, count), True) <= 0.05


@pytest.mark.parametrize("count", [30, 60, 120, 300])
def test_a_model_that_looks_is_not_accused(count):
    for model in (looks_alone, looks_and_reads, looks_for_the_worse, guesses):
        assert share(verdicts(model, count), False) <= 0.05, model.__name__


def test_enough_pairs_decide():
    assert share(verdicts(looks_alone, 300), True) >= 0.9
    assert share(verdicts(reads_texts, 300), False) >= 0.9
    assert share(verdicts(looks_and_reads, 600), True) >= 0.9


@pytest.mark.parametrize("count", [30, 300])
def test_a_model_that_reads_alone_is_never_said_to_look(count):
    assert share(verdicts(reads_texts, count), True) <= 0.05


def test_pairs_of_one_prompt_are_no_witnesses_of_each_other():
    assert share(verdicts(reads_prompts_of_many_pairs, 360), True) <= 0.05


@pytest.mark.parametrize("count", [60, 120, 300])
def test_what_it_has_from_the_texts_is_denied_only_where_the_interval_says_so(count):
    denied = [one.sentence for one in verdicts(looks_and_reads, count) if "no lead over chance" in one.sentence]
    assert len(denied) <= 0.05 * len(SEEDS)


def test_a_picture_that_speaks_for_the_other_answer_hides_nothing_that_comes_from_the_texts():
    """As where all rows ask the same and answer yes or no: grey shows what another row's image outweighs."""
    rng = np.random.default_rng(0)
    text = rng.normal(1.0, 1, 600)
    sentence = of(planted(text + rng.normal(1, 1, 600), swapped=text - 1.5, blank=text)).sentence
    assert sentence.startswith("It looks at the image, but not only: ")
    assert f"At best {np.mean(text > 0):.1%}" in sentence and "from the texts" in sentence


def test_the_sentence_has_the_numbers_and_their_intervals():
    rng = np.random.default_rng(0)
    frame = looks_alone(300, rng)
    pairs, reliances = PairArrays(frame), ("image_reliance", "swapped_image_reliance")
    found = {name: METRIC[name].compute(pairs).estimate(pairs.prompts) for name in reliances}
    sentence = of(frame).sentence
    assert sentence.startswith("It looks at the image: ")
    for name in ("swapped_image_reliance", "image_reliance"):
        value, low, high = (f"{100 * end:.1f}" for end in found[name][:3])
        assert f"{value} points of accuracy ({low} to {high})" in sentence
    assert of(reads_texts(300, rng)).sentence.startswith("There is no sign that it looks at the image: ")
    grey = of(lost_on_grey(300, rng)).sentence
    assert grey.startswith("Whether it looks at the image is undecided: ") and "may only be strange to it" in grey
    few = of(looks_alone(12, rng)).sentence
    assert "is undecided" in few and "12 prompts are too few" in few
    assert "not above chance" in of(guesses(300, rng)).sentence


def test_no_pair_that_changes_is_no_proof_among_few():
    """In every draw of thirty pairs that another image leaves as they are, it leaves them as they are."""
    same = np.ones(30)
    assert of(planted(same, swapped=same, blank=same)).looks is None
    assert of(planted(np.ones(300), swapped=np.ones(300), blank=np.ones(300))).looks is False


def test_prompts_that_an_intervention_never_touched_are_no_witnesses():
    """Of four hundred prompts four have a picture, whose hundred pairs each all rest on it."""
    prompts = [f"prompt-{i}" for i in range(396)] + [f"picture-{i % 4}" for i in range(400)]
    rng = np.random.default_rng(0)
    changed = np.where(np.arange(796) < 396, np.nan, rng.normal(0, 1, 796))
    frame = planted(np.ones(796), swapped=changed, blank=changed, prompt_id=prompts)
    frame["blank_image_rejected"] = frame["swapped_image_rejected"] = np.where(np.isnan(changed), np.nan, 0.0)
    found = of(frame)
    assert found.looks is None and "4 prompts with an image are too few" in found.sentence


def test_grey_alone_decides_only_where_the_answers_are_nothing_but_images():
    rng = np.random.default_rng(0)
    margins = rng.normal(0.583, 1, 300)
    frame = planted(margins, blank=np.zeros(300))
    assert of(frame).looks is None and "evaluate with the intervention swapped_image" in of(frame).sentence
    images = {"chosen_length": 0, "rejected_length": 0, "chosen_pixels": 3136, "rejected_pixels": 3136}
    assert of(frame.assign(**images)).looks is True
    assert of(planted(margins, blank=margins, **images)).looks is False


def test_another_row_s_image_alone_acquits_and_does_not_accuse():
    rng = np.random.default_rng(0)
    looking, reading = looks_alone(300, rng), reads_texts(300, rng)
    grey = ["blank_image_chosen", "blank_image_rejected"]
    assert of(looking.drop(columns=grey)).looks is True
    left = of(reading.drop(columns=grey))
    assert left.looks is None and "evaluate with the intervention blank_image" in left.sentence
    assert "was not measured" in of(planted(rng.normal(0.5, 1, 300))).sentence
