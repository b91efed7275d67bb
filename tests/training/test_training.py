"""What a training run promises: what changes, what is logged, what is saved, and what each key does to the loss."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import av
import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import logsigmoid

from tests.runs import (
    assert_equal_weights,
    colour_lists,
    colour_pairs,
    largest_difference,
    logged,
    text_pairs,
    weights,
    write_rows,
)
from vlmrm import evaluate
from vlmrm.data.arguments import INPUT_KEYS, DataArguments
from vlmrm.data.comparisons import load_comparisons
from vlmrm.modeling import load_checkpoint, verify_complete
from vlmrm.scoring.scorer import LocalScorer


@pytest.fixture
def data(tmp_path):
    return colour_pairs(tmp_path / "data", 12)


def start_weights(folder, head="linear", seed=42):
    """Return the weights that a run with `seed` starts from."""
    from vlmrm.modeling import load_for_training

    return load_for_training(folder, head=head, dtype=torch.float32, seed=seed).state_dict()


def changed(before, after) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.smoke
@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_every_weight_learns_and_the_result_can_score(train_here, tmp_path, tiny_checkpoint, data, head):
    result = train_here(data, head=head)
    assert result.model_dir == tmp_path / "out" / "final"
    before, after = start_weights(tiny_checkpoint, head), weights(result.model_dir)
    # Embeddings of tokens and patches that no row shows have no gradient, but each matrix has others.
    assert changed(before, after) == set(before)
    loaded = load_checkpoint(result.model_dir)
    assert loaded.info["head"] == head
    assert loaded.model.score.weight.dtype == torch.float32
    assert loaded.info["provenance"]["base_model"] == str(tiny_checkpoint)


@pytest.mark.parametrize(("part", "prefix"), [("vit", "model.visual."), ("llm", "model.language_model.")])
def test_a_frozen_part_stays(train_here, tiny_checkpoint, data, part, prefix):
    result = train_here(data, **{f"freeze_{part}": True})
    names = changed(start_weights(tiny_checkpoint), weights(result.model_dir))
    frozen = {name for name in weights(result.model_dir) if name.startswith(prefix)}
    if part == "llm":
        assert names and not names & frozen
    else:
        assert names == set(weights(result.model_dir)) - frozen


@pytest.mark.smoke
def test_adapters_and_head_are_all_that_lora_trains(train_here, tiny_checkpoint, data):
    result = train_here(data, use_peft=True, lora_r=4)
    saved = weights(result.model_dir)
    assert all("lora_" in name or name.endswith("score.weight") for name in saved)
    assert any(value.any() for name, value in saved.items() if "lora_B" in name)  # they start at zero
    loaded = load_checkpoint(result.model_dir)
    base = start_weights(tiny_checkpoint)
    inside = {name.replace(".base_layer", ""): value for name, value in loaded.model.state_dict().items()}
    same = [name for name in base if name in inside and not name.startswith("score")]
    assert len(same) == len(base) - 1
    assert all(torch.equal(base[name], inside[name]) for name in same)


def test_the_log_speaks_trl(train_here, tmp_path, data):
    train_here(data, save_steps=5, use_irrelevant_queries=True, center_rewards_coefficient=0.01)
    history = json.loads((tmp_path / "out/checkpoint-5/trainer_state.json").read_text())["log_history"]
    assert len(history) == 5
    assert set(history[0]) == {
        *("loss", "grad_norm", "learning_rate", "epoch", "step", "num_tokens"),
        *("accuracy", "margin", "mean_reward", "min_reward", "max_reward"),
        *("loss_preference", "loss_irrelevant", "loss_center", "irrelevant_margin"),
        *("tokens_per_second", "pairs_per_second", "data_wait", "dropped_rows"),
    }
    for entry in history:
        parts = entry["loss_preference"] + entry["loss_irrelevant"] + entry["loss_center"]
        assert entry["loss"] == pytest.approx(parts, rel=1e-5)
        assert entry["min_reward"] <= entry["mean_reward"] <= entry["max_reward"]
        assert 0 <= entry["data_wait"] <= 1
    assert history[0]["loss_preference"] == pytest.approx(math.log(2), abs=0.05)
    tokens = [entry["num_tokens"] for entry in history]
    assert tokens == sorted(set(tokens))


def scores_at_start(checkpoint, rows_folder, rows):
    """The untrained scores (chosen, rejected) of simple rows, one conversation at a time, by the library alone."""
    loaded = load_checkpoint(checkpoint)
    scores = []
    for row in rows:
        pair = []
        for answer in (row["chosen"], row["rejected"]):
            image = Image.open(rows_folder / row["images"][0])
            content = [{"type": "image", "image": image}, {"type": "text", "text": row["prompt"]}]
            messages = [
                {"role": "user", "content": content},
                {"role": "assistant", "content": [{"type": "text", "text": answer}]},
            ]
            inputs = loaded.processor.apply_chat_template(
                [messages], tokenize=True, return_dict=True, return_tensors="pt"
            )
            with torch.no_grad():
                pair.append(loaded.model(**inputs).logits.item())
        scores.append(pair)
    return torch.tensor(scores, dtype=torch.float64)


@pytest.fixture
def one_step(train_here, tmp_path):
    """The loss that a run logs for one step over all rows, and the scores that the model had in that step."""

    def run(path, **keys):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        size = {"per_device_train_batch_size": len(rows), "max_steps": 1, "learning_rate": 0.0, "save_steps": 1}
        train_here(path, **size, **keys)
        [loss] = logged(tmp_path / "out/checkpoint-1", "loss")
        return loss, scores_at_start(tmp_path / "out/checkpoint-1", path.parent, rows)

    return run


def test_margin_and_weight_enter_the_loss_as_written(one_step, tmp_path):
    margins, row_weights = [0.0, 0.5, 2.0], [1.0, 3.0, 0.5]
    path = colour_pairs(tmp_path / "data", 3, margin=margins, weight=row_weights)
    loss, scores = one_step(path)
    difference = scores[:, 0] - scores[:, 1]
    losses = -logsigmoid(difference - torch.tensor(margins, dtype=torch.float64))
    weight = torch.tensor(row_weights, dtype=torch.float64)
    assert loss == pytest.approx(((weight * losses).sum() / weight.sum()).item(), rel=1e-5)


def test_a_tie_is_lost_by_any_difference(one_step, tmp_path):
    path = colour_pairs(tmp_path / "data", 3, tie=[True, False, True])
    loss, scores = one_step(path)
    d = scores[:, 0] - scores[:, 1]
    win = torch.sigmoid(d)
    tied = (win * torch.sigmoid(-d)).sqrt()  # the geometric mean of winning and losing
    expected = -torch.where(torch.tensor([True, False, True]), tied, win).log().mean().item()
    assert loss == pytest.approx(expected, rel=1e-5)


def test_bfloat16_trains_float32_weights(train_here, tmp_path, data):
    result = train_here(data, bf16=True, max_steps=8, learning_rate=3e-3, save_steps=8)
    losses = logged(tmp_path / "out/checkpoint-8", "loss")
    assert losses[-1] < 0.8 * losses[0]
    assert {value.dtype for value in weights(result.model_dir).values()} == {torch.float32}


def test_bfloat16_on_a_cpu_without_it_is_said(train_here, data, monkeypatch, capsys):
    """It is 15 times slower there than float32."""
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": False, "amx_tile": False})
    train_here(data, bf16=True, max_steps=1)
    assert "--bf16 false" in capsys.readouterr().err


def test_the_best_checkpoint_is_kept_and_saved(train_here, tmp_path, data):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "accuracy", "eval_strategy": "steps"}
    result = train_here(
        data,
        eval_dataset_path=colour_pairs(tmp_path / "eval", 11),
        eval_steps=2,
        save_steps=2,
        max_steps=10,
        save_total_limit=2,
        learning_rate=3e-3,
        **best,
    )
    out = tmp_path / "out"
    newest = out / "checkpoint-10"
    accuracies = dict(zip([2, 4, 6, 8, 10], logged(newest, "eval_accuracy"), strict=True))
    winner = max(accuracies, key=lambda step: (accuracies[step], -step))
    assert result.model_dir == out / "best"
    assert result.metrics["best_metric"] == accuracies[winner]
    assert_equal_weights(result.model_dir, out / f"checkpoint-{winner}")
    # The limit of two spares the best and the newest, and both are whole.
    kept = {path.name for path in out.glob("checkpoint-*")}
    assert {f"checkpoint-{winner}", "checkpoint-10"} <= kept and len(kept) == 2
    for name in kept:
        verify_complete(out / name)


def test_ranked_lists_and_texts_train_together(train_here, tmp_path):
    lists, texts = colour_lists(tmp_path / "lists", 6), text_pairs(tmp_path / "texts", 6)
    train_here([lists, texts], max_steps=12, save_steps=12, learning_rate=3e-3, seed=3)  # the loss falls to a seventh
    losses = logged(tmp_path / "out/checkpoint-12", "loss")
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])


def test_unusable_rows_are_counted_and_listed_by_id(train_here, tmp_path, data):
    rows = [json.loads(line) for line in data.read_text().splitlines()][:4]
    rows[1]["images"] = ["absent.png"]
    rows[2]["chosen"] = "long " * 200
    write_rows(data, rows)
    train_here(data, bad_rows="skip", max_seq_length=120, max_dropped_share=0.5, max_steps=2, save_steps=2)
    dropped = (tmp_path / "out/rank0_dropped_rows.jsonl").read_text().splitlines()
    reasons = {row["id"]: row["reason"] for row in map(json.loads, dropped)}
    assert set(reasons) == {"pair-1", "pair-2"}
    assert "absent.png" in reasons["pair-1"] and "max_seq_length" in reasons["pair-2"]
    assert sum(logged(tmp_path / "out/checkpoint-2", "dropped_rows")) == 2


def test_wandb_reports_without_a_network(train_here, tmp_path, data, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for kind in ("", "CACHE_", "CONFIG_", "DATA_"):
        monkeypatch.setenv(f"WANDB_{kind}DIR", str(tmp_path / "wandb"))
    import wandb

    wandb.teardown()  # it reads the environment once
    train_here(data, max_steps=1, report_to="wandb")
    wandb.finish()
    wandb.teardown()
    assert list(tmp_path.glob("wandb/**/run-*.wandb"))


@pytest.mark.parametrize("batching", ["shared", "reference"])
def test_a_token_budget_changes_no_loss(train_here, tmp_path, data, batching):
    keys = {
        "batching": batching,
        "per_device_train_batch_size": 4,
        "save_steps": 5,
        "use_irrelevant_queries": True,
        "center_rewards_coefficient": 0.01,
    }
    train_here(data, "whole", **keys)
    train_here(data, "parts", max_tokens_per_batch=1, **keys)
    unsplit, parts = (tmp_path / name / "checkpoint-5" for name in ("whole", "parts"))
    for name in ("loss", "loss_irrelevant", "accuracy", "margin", "mean_reward", "grad_norm"):
        assert logged(parts, name) == pytest.approx(logged(unsplit, name), rel=1e-4, abs=1e-6), name
    assert largest_difference(unsplit, parts) < 1e-4


def moving_square(path, seconds: int) -> str:
    """Write a video of four frames a second."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for i in range(4 * seconds):
            pixels = np.zeros((64, 64, 3), np.uint8)
            pixels[i : i + 16, 8:24] = 255
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return str(path)


def test_a_checkpoint_is_scored_with_its_training_input(train_here, tmp_path):
    """Each key changes the score of a row; the scorer and the sweep have those of the training."""
    asked = {"min_pixels": 6272, "max_pixels": 12544, "video_fps": 1.0, "video_max_frames": 6}
    asked |= {"max_seq_length": 500, "overlong": "trim"}
    for side in (28, 168):
        Image.radial_gradient("L").resize((side, side)).save(tmp_path / f"{side}.png")
    media = [{"images": [str(tmp_path / f"{side}.png")]} for side in (28, 168)]
    media += [{"videos": [moving_square(tmp_path / f"{seconds}.mp4", seconds)]} for seconds in (4, 12)]
    rows = [{"prompt": f"What is {i}?", "chosen": "a square", "rejected": "no", **it} for i, it in enumerate(media)]
    rows.append({"prompt": "Count.", "chosen": "one two " * 400, "rejected": "two one " * 400})
    data = write_rows(tmp_path / "rows.jsonl", rows)
    result = train_here(
        data, max_steps=1, save_steps=1, eval_dataset_path=data, eval_strategy="steps", eval_steps=1, **asked
    )
    [margin] = logged(tmp_path / "out/checkpoint-1", "eval_margin")

    loaded = load_checkpoint(result.model_dir)
    read = load_comparisons([str(data)], arguments=DataArguments())
    talks = [talk for row in read for talk in row["comparison"].conversations()]
    scores = np.array(LocalScorer(loaded).score(talks))
    assert (scores[::2] - scores[1::2]).mean() == pytest.approx(margin, abs=1e-5)
    swept = evaluate(model_dirs=str(result.model_dir), dataset_path=str(data), output_file=str(tmp_path / "table.csv"))
    assert swept.best["average_margin"] == pytest.approx(margin, abs=1e-5)
    assert asked.keys() == INPUT_KEYS.keys()
    for key in INPUT_KEYS:
        others = LocalScorer(replace(loaded, info=loaded.info | {key: None})).score_each(talks)
        changed = [
            isinstance(it, Exception) or abs(it - score) > 1e-6 for it, score in zip(others, scores, strict=True)
        ]
        assert any(changed), f"{key} changes no score"


def test_another_input_than_the_training_s_is_logged(caplog):
    trained = DataArguments(video_fps=0.5, max_seq_length=100).input_record()
    assert DataArguments().as_trained(trained).video_fps == 0.5
    assert DataArguments(video_fps=2.0, max_seq_length=50).as_trained(trained).video_fps == 2.0
    assert "video_fps is 2.0, and the model was trained with 0.5" in caplog.text
