"""Figures of several outputs under interventions, of a planted model that rests on known things."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import spearmanr
from transformers import AutoProcessor

from tests.runs import write_rows
from vlmrm.batching import ComparisonCollator, PaddedBatcher
from vlmrm.data.arguments import DataArguments
from vlmrm.data.comparisons import load_comparisons
from vlmrm.engine import Engine
from vlmrm.evaluation.evaluate import evaluate
from vlmrm.evaluation.report.audit import state_of_output
from vlmrm.measures.intervals import Estimate
from vlmrm.measures.interventions import INTERVENTIONS
from vlmrm.measures.outputs import judged_outputs, output_changes
from vlmrm.outputs import Outputs
from vlmrm.rendering import Renderer

OUTPUTS = {"better": "preference", "long": "rating 0-10", "looks": "rating 0-10", "clear": "rating 0-10"}
GUILTY = {
    ("long", "padded_answers"): "swayed by it",
    ("looks", "blank_image"): "relies on it",
    ("looks", "swapped_image"): "relies on it",
}
COUNT = 60


def rated(folder):
    """Rows of two answers: the longer is better, `looks` is how light the picture is, and `clear` counts the marks."""
    draw, rows = np.random.default_rng(0), []
    for number in range(COUNT):
        light, words, *marks = draw.integers(0, (255, 8, 9, 9)).tolist()
        Image.new("RGB", (56, 56), (light,) * 3).save(folder / f"{number}.png")
        better, worse = ("word " * (words + more) + "!" * mark for more, mark in zip((2, 1), marks, strict=True))
        row = {"prompt": f"How is {number:02}?", "chosen": better, "rejected": worse, "images": [f"{number}.png"]}
        rows.append(row | {"long": [words + 2, words + 1], "looks": [light / 26] * 2, "clear": marks})
    return load_comparisons([str(write_rows(folder / "rows.jsonl", rows))], arguments=DataArguments(outputs=OUTPUTS))


def planted(mark: int):
    """A model whose first two outputs see the length alone, the third the picture and the last the marks."""

    def model(input_ids, attention_mask, pixel_values, image_grid_thw, **_):
        light = [it.mean() for it in pixel_values.split(image_grid_thw.prod(1).tolist())]
        marks = (input_ids == mark).sum(1)
        length = (attention_mask.sum(1) - marks) / 100
        return SimpleNamespace(logits=torch.stack([length, length, torch.stack(light), marks / 9], 1))

    return model


def test_each_output_shows_what_it_rests_on(tmp_path, tiny_checkpoint):
    """A length is found where answers are padded, a picture where it is gone; the output of the marks is clean."""
    processor, outputs = AutoProcessor.from_pretrained(tiny_checkpoint), Outputs.parse(OUTPUTS)
    options = {"interventions": {name: INTERVENTIONS[name] for _, name in GUILTY}, "outputs": outputs}
    batcher = PaddedBatcher.for_processor(processor)
    collator = ComparisonCollator(Renderer(processor), batcher, max_seq_length=4096, **options)
    engine = Engine(planted(*processor.tokenizer.encode("!")), collator, torch.device("cpu"))
    result = evaluate(engine, rated(tmp_path), batch_size=8, sample=COUNT * 2 // 3)
    judged = judged_outputs(outputs, result.comparisons, result.outputs)
    changes = output_changes(outputs, judged, result.altered_outputs, np.arange(COUNT))

    found = {
        (output, name): (Estimate(**it["lost"]), Estimate(**it["moved"]))
        for output, by in changes.items()
        for name, it in by.items()
    }
    assert found["better", "padded_answers"][0].value == 1  # the worse alone is padded
    assert found["looks", "blank_image"][0].value == pytest.approx(1, abs=0.02)  # of equal values no rank is left
    swapped = [row["swapped_image"]["looks"][0] if row else np.nan for row in result.altered_outputs]
    assert 0 < np.isnan(swapped).sum() < COUNT / 2
    correlation = spearmanr(judged["looks"].ratings[::2], swapped, nan_policy="omit").statistic
    assert found["looks", "swapped_image"][0].value == pytest.approx(1 - correlation)
    states = {it: state_of_output(it[1], *figures) for it, figures in found.items() if it[0] != "better"}
    guilty = {it: states.pop(it) for it in GUILTY}
    assert guilty == GUILTY and {*states.values()} == {"does not rely on it", "not swayed"}
