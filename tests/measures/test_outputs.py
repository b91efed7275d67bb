"""Figures of several outputs under interventions, of a made-up model that rests on known things."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import spearmanr

from vlmrm.conversation import Comparison, Judgement, Message
from vlmrm.evaluation.report.audit import state_of_output
from vlmrm.measures.intervals import Estimate
from vlmrm.measures.outputs import judged_outputs, output_changes
from vlmrm.outputs import Outputs

OUTPUTS = Outputs.parse({"better": "preference", "clarity": "rating 0-10", "looks": "rating 0-10"})
ANSWERS = tuple((Message.of("assistant", text),) for text in "ab")


def test_each_output_shows_what_it_rests_on():
    """`looks` sees the image and falls for padding, `clarity` does neither."""
    clear, looks, unseen = np.random.default_rng(0).uniform(2, 8, (3, 200, 2))
    rows, values, altered = [], [], []
    for number, (of_clear, of_looks, other) in enumerate(zip(clear, looks, unseen, strict=True)):
        rated = {"clarity": of_clear, "looks": of_looks}
        judged = [Judgement((0, 1), tuple(it), "rating", dimension=name) for name, it in rated.items()]
        rows.append(Comparison(str(number), (), ANSWERS, (Judgement((0, 1), (1, 0)), *judged)))
        values.append({"better": [1.0, 0.0], **rated})
        blank, padded = {"looks": other, "better": [0.0, 1.0]}, {"looks": of_looks + 2, "better": [3.0, 2.0]}
        both = {"blank_image": values[-1] | blank, "padded_answers": values[-1] | padded}
        altered.append(both if number % 2 else {})

    changes = output_changes(OUTPUTS, judged_outputs(OUTPUTS, rows, values), altered, np.arange(200))

    found = {
        (output, name): (Estimate(**it["lost"]), Estimate(**it["moved"]))
        for output, by in changes.items()
        for name, it in by.items()
    }
    correlation = spearmanr(looks[1::2].ravel(), unseen[1::2].ravel()).statistic
    assert found["looks", "blank_image"][0].value == pytest.approx(1 - correlation)
    assert found["better", "padded_answers"][0].value == 1  # the worse alone is padded
    assert found["looks", "padded_answers"][1].value == pytest.approx(2 / looks.std())
    assert {it: state_of_output(it[1], *figures) for it, figures in found.items() if it[0] != "better"} == {
        ("looks", "blank_image"): "relies on it",
        ("looks", "padded_answers"): "swayed by it",
        ("clarity", "blank_image"): "does not rely on it",
        ("clarity", "padded_answers"): "not swayed",
    }
