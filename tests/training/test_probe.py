"""What every evaluation of a training says of its probe: whether the model looks at images and at prompts."""

from __future__ import annotations

import json
import shutil

import pandas as pd
import pytest
from safetensors.torch import load_file, save_file

from tests.runs import (
    assert_equal_weights,
    colour_lists,
    colour_pairs,
    finish,
    logged,
    short_training,
    square,
    start,
    text_pairs,
    words,
    write_rows,
)
from vlmrm.evaluation.sweep import sweep
from vlmrm.measures.analysis import figures

OF_IMAGES = {"eval_probe_image_reliance": "image_reliance", "eval_probe_blank_image_accuracy": "blank_image_accuracy"}
OF_PROMPTS = {"eval_probe_irrelevant_margin": "swapped_prompt_margin", "eval_probe_prompt_reliance": "prompt_reliance"}
NAMES = {**OF_IMAGES, **OF_PROMPTS}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 5, "save_steps": 5}


@pytest.fixture
def data(tmp_path):
    return colour_pairs(tmp_path / "data", 12)


def image_pairs(folder, count):
    """`count` rows that ask for the first of two squares of equal size."""
    folder.mkdir()
    chosen, rejected = square(folder, 0), square(folder, 3)
    rows = [{"prompt": f"Draw it {i}.", "chosen_image": chosen, "rejected_image": rejected} for i in range(count)]
    return write_rows(folder / "images.jsonl", rows)


def evaluated(checkpoint) -> dict[str, float]:
    """The figures of the last evaluation."""
    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return [entry for entry in history if "eval_loss" in entry][-1]


def test_probe_figures_match_a_sweep_of_equal_rows(train_here, tmp_path, data):
    # People tied some. Of two images painted alike none is better, so the second set relies on them.
    questions = colour_pairs(tmp_path / "asked", 11, tie=[i % 7 == 3 for i in range(11)])
    held_out = [questions, image_pairs(tmp_path / "drawn", 7)]
    train_here(data, eval_dataset_path=held_out, probe_samples=12, split_seed=3, **EVALUATED)
    metrics = evaluated(tmp_path / "out/checkpoint-5")
    sample = {"max_eval_samples": 12, "split_seed": 3, "output_file": tmp_path / "results.csv"}
    result = sweep(words(model_dirs=tmp_path / "out/checkpoint-5", dataset_path=held_out, **sample))
    swept = figures(pd.read_parquet(result.scores))
    for name, figure in NAMES.items():
        # A pair whose images are painted alike may be equal in the last digit or not, which is half a pair of eleven.
        tolerance = 0.5 / 11 + 1e-5 if "reliance" in name or "accuracy" in name else 1e-5
        assert metrics[name] == pytest.approx(swept[figure]["value"], abs=tolerance), name
    assert metrics["eval_probe_image_reliance"] != 0
    assert metrics["eval_pairs"] == 16  # those of all rows, as without a probe


def test_a_model_that_ignores_images_is_exposed(train_here, tmp_path, tiny_checkpoint, data):
    blind = tmp_path / "blind"
    shutil.copytree(tiny_checkpoint, blind)
    weights = load_file(blind / "model.safetensors")
    for name in ("weight", "bias"):  # whatever is in the image, the language model sees zeros
        weights[f"visual.merger.mlp.2.{name}"].zero_()
    save_file(weights, blind / "model.safetensors", {"format": "pt"})
    frozen = {"freeze_vit": True, "freeze_merger": True, "check_sight": False}
    train_here(data, model=blind, eval_dataset_path=data, learning_rate=3e-3, max_steps=10, **frozen, **EVALUATED)
    assert logged(tmp_path / "out/checkpoint-10", "eval_probe_image_reliance") == [0.0, 0.0]
    metrics = evaluated(tmp_path / "out/checkpoint-10")
    assert metrics["eval_probe_blank_image_accuracy"] == metrics["eval_accuracy"]


def test_texts_have_no_image_reliance(train_here, tmp_path):
    data = text_pairs(tmp_path / "data", 6)
    train_here(data, eval_dataset_path=data, **EVALUATED)
    assert evaluated(tmp_path / "out/checkpoint-5").keys() & NAMES.keys() == OF_PROMPTS.keys()


def test_rows_that_cannot_be_used_leave_the_probe(train_here, tmp_path, data):
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    rows[1]["images"] = ["absent.png"]
    rows[2]["chosen"] = "long " * 200
    for name, usable in {"bad": rows, "good": [rows[0], *rows[3:]]}.items():
        held_out = write_rows(data.parent / f"{name}.jsonl", usable)
        keys = {"bad_rows": "skip", "max_seq_length": 120, "max_dropped_share": 0.5}
        train_here(data, name, eval_dataset_path=held_out, **keys, **EVALUATED)
    bad, good = (evaluated(tmp_path / name / "checkpoint-5") for name in ("bad", "good"))
    assert bad["eval_pairs"] == good["eval_pairs"] == 10
    for name in OF_IMAGES:
        assert bad[name] == good[name]


def test_training_goes_as_it_goes_without_a_probe(train_here, tmp_path, data):
    # Dropout draws from the random state that an evaluation might have moved.
    keys = {"eval_dataset_path": data, "eval_strategy": "steps", "eval_steps": 2, "use_peft": True}
    for name, samples in {"with": 6, "without": 0}.items():
        train_here(data, name, probe_samples=samples, lora_r=4, lora_dropout=0.2, save_steps=5, **keys)
    assert_equal_weights(tmp_path / "with/final", tmp_path / "without/final")
    probed, plain = (evaluated(tmp_path / name / "checkpoint-5") for name in ("with", "without"))
    assert probed["eval_loss"] == pytest.approx(plain["eval_loss"], abs=1e-6)
    assert probed.keys() - plain.keys() == NAMES.keys()


def test_a_probe_figure_may_choose_the_best_model(train_here, tmp_path, data):
    best = {"metric_for_best_model": "probe_prompt_reliance", "greater_is_better": True}
    result = train_here(data, eval_dataset_path=data, load_best_model_at_end=True, max_steps=10, **best, **EVALUATED)
    assert result.metrics["best_metric"] == max(logged(tmp_path / "out/checkpoint-10", "eval_probe_prompt_reliance"))


def test_two_processes_have_the_figures_of_one(tmp_path, tiny_checkpoint, train_here, data):
    """Also where ranks split their batches into parts of different numbers."""
    held_out = [colour_lists(tmp_path / "lists", 6), colour_pairs(tmp_path / "eval", 5)]
    keys = {"eval_dataset_path": held_out, "probe_samples": 7, "max_tokens_per_batch": 120, **EVALUATED}
    two_ranks = start(
        ["train_rm.py"], *short_training(tiny_checkpoint, data, tmp_path / "two", **keys), cwd=tmp_path, processes=2
    )
    train_here(data, "one", gradient_accumulation_steps=2, **keys)
    finish(two_ranks)
    one_rank, two_ranks = (evaluated(tmp_path / name / "checkpoint-5") for name in ("one", "two"))
    for name in NAMES:
        assert two_ranks[name] == pytest.approx(one_rank[name], abs=1e-6), name
