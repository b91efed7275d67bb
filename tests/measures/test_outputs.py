"""Figures of several outputs under interventions, of made-up models that rest on known things."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import spearmanr

from tests.conversations import rated
from vlmrm.conversation import Comparison, Judgement, Message
from vlmrm.evaluation.report.audit import state_of_output
from vlmrm.measures.intervals import Estimate
from vlmrm.measures.outputs import judged_outputs, output_changes
from vlmrm.outputs import Outputs

OUTPUTS = Outputs.parse({"better": "preference", "clarity": "rating 0-10", "looks": "rating 0-10"})
QUESTION = [Message.of("user", "What?")]


def planted(count: int = 200) -> tuple[list[Comparison], list, list, dict[str, np.ndarray]]:
    """Return pairs that are rated too: `looks` sees the image and falls for padding, `clarity` does neither."""
    rng = np.random.default_rng(0)
    truth = {name: rng.uniform(2, 8, (count, 2)) for name in ("clarity", "looks")}
    unseen = rng.uniform(2, 8, (count, 2))
    rows, values, altered = [], [], []
    for number in range(count):
        clear, looks = truth["clarity"][number], truth["looks"][number]
        row = rated(str(number), QUESTION, [[Message.of("assistant", it)] for it in "ab"], [1.0, 0.0])
        more = [Judgement((0, 1), tuple(of[number]), "rating", dimension=name) for name, of in truth.items()]
        rows.append(Comparison(row.id, row.prompt, row.answers, (*row.judgements, *more)))
        plain = {"better": [1.0, 0.0], "clarity": [*clear], "looks": [*looks]}
        values.append(plain)
        blank = plain | {"looks": [*unseen[number]], "better": [0.0, 1.0]}
        padded = plain | {"looks": [*(looks + 2)], "better": [3.0, 2.0]}
        altered.append({"blank_image": blank, "padded_answers": padded} if number % 2 else {})
    return rows, values, altered, {**truth, "unseen": unseen}


def test_each_output_shows_what_it_rests_on():
    rows, values, altered, of = planted()

    changes = output_changes(OUTPUTS, judged_outputs(OUTPUTS, rows, values), altered, np.arange(len(rows)))

    found = {
        output: {it: Estimate(**figure["lost"]).value for it, figure in by.items()} for output, by in changes.items()
    }
    seen, unseen = (of[name][1::2].ravel() for name in ("looks", "unseen"))
    assert found["looks"]["blank_image"] == pytest.approx(1 - spearmanr(seen, unseen).statistic)
    assert found["looks"]["padded_answers"] == found["clarity"]["blank_image"] == 0
    assert found["better"] == {"blank_image": 1.0, "padded_answers": 1.0}  # the worse alone is padded
    moved = changes["looks"]["padded_answers"]["moved"]
    assert moved["value"] == pytest.approx(2 / of["looks"].std()) and moved["n"] == 200
    said = {
        (output, name): state_of_output(name, *(Estimate(**figures[it]) for it in ("lost", "moved")))
        for output, by in changes.items()
        for name, figures in by.items()
    }
    assert said["looks", "blank_image"] == "relies on it" and said["looks", "padded_answers"] == "swayed by it"
    assert (
        said["clarity", "blank_image"] == "does not rely on it" and said["clarity", "padded_answers"] == "not swayed"
    )
