"""TOPReward: transformers' own forward of the same text and pictures gives the log-probability of the answer."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from vlmrm import cli
from vlmrm.errors import CheckpointError, ConfigError, RewardError
from vlmrm.modeling.tiny import make_tiny
from vlmrm.rewards import RewardSet
from vlmrm_robots.trajectories.reward_models import open_prefix_scorer

ANSWERS = ["number", "digit"]  # with a space before them single tokens of the tiny tokenizer
OPENING = ["The", "What"]  # without one
TASK = "Push the block."
TEMPLATE = "What is it? {text_prompt} Is that even or odd? It is"


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def folder(request, tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("vlm") / request.param, request.param)


@pytest.fixture(scope="module")
def frames():
    pixels = np.random.default_rng(0).integers(0, 256, (6, 64, 96, 3), dtype=np.uint8)
    return [Image.fromarray(frame) for frame in pixels]


def rewards(folder, **changes) -> RewardSet:
    settings = {"name": "top", "reward_model": "topreward", "model_name_or_path": str(folder), "answers": ANSWERS}
    return RewardSet([{**settings, "dtype": "float32", "device": "cpu", "batch_size": 8, **changes}])


def theirs(folder, frames, text: str, answer: str, chat: bool) -> float:
    """log P(answer), by transformers alone, of the text cut as the published code cuts it."""
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    content = [*({"type": "image"} for _ in frames), {"type": "text", "text": text}]
    written = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=chat)
    if not chat:
        written = written[: written.rindex("<|im_end|>")]
    inputs = processor(text=[written], images=frames, return_tensors="pt")
    [token] = processor.tokenizer.encode(answer if chat else f" {answer}", add_special_tokens=False)
    with torch.inference_mode():
        return float(model(**inputs).logits[0, -1].log_softmax(-1)[token])


@pytest.mark.parametrize("chat", [False, True])
def test_reward_is_the_log_probability_after_every_prefix(folder, frames, tmp_path, chat, monkeypatch):
    (tmp_path / "words.txt").write_text(TEMPLATE)
    answers = OPENING if chat else ANSWERS
    form = {"template_file": str(tmp_path / "words.txt"), "chat_template": chat}
    made = rewards(folder, answers=answers, **form)
    model = made.rewards[0].model
    text = TEMPLATE.replace("{text_prompt}", TASK)
    expected = [theirs(folder, frames[:stop], text, answers[0], chat) for stop in range(1, 7)]
    forwards = []
    original = model.scorer.engine.forward
    monkeypatch.setattr(model.scorer.engine, "forward", lambda inputs: forwards.append(1) or original(inputs))
    assert model.score_prefixes(TASK, frames) == pytest.approx(expected, abs=1e-5)
    assert len(forwards) == 1
    # A sample, as a video, an image and an answer; other answers, tasks and frames have other rewards.
    scored = made(prompt=[TASK] * 2, video=[frames, frames[:2]]).rewards["top"]
    assert scored == pytest.approx([expected[5], expected[1]], abs=1e-5)
    assert made(prompt=[TASK], image=frames[:1]).rewards["top"] == pytest.approx(expected[:1], abs=1e-5)
    turn = {"role": "assistant", "content": [{"type": "image", "image": frame} for frame in frames[:3]]}
    assert made(prompt=[TASK], response=[[turn]]).rewards["top"] == pytest.approx([expected[2]], abs=1e-5)
    for task, clip in (("Stay.", frames), (TASK, frames[::-1])):
        assert abs(made(prompt=[task], video=[clip]).rewards["top"][0] - expected[5]) > 1e-3
    turned = rewards(folder, answers=answers[::-1], **form)(prompt=[TASK], video=[frames]).rewards["top"]
    assert turned == pytest.approx([theirs(folder, frames, text, answers[1], chat)], abs=1e-5)


def test_it_scores_episodes_from_the_command_line(folder, frames, tmp_path):
    settings = {"name": "top", "reward_model": "topreward", "model_name_or_path": str(folder), "answers": ANSWERS}
    (tmp_path / "top.yaml").write_text(json.dumps({"rewards": [settings | {"dtype": "float32", "device": "cpu"}]}))
    scorer = open_prefix_scorer(str(tmp_path / "top.yaml"))
    assert scorer.score_prefixes(TASK, frames) == pytest.approx(
        rewards(folder).rewards[0].model.score_prefixes(TASK, frames)
    )
    for name, clip in (("a", frames[:2]), ("b", frames[2:4])):
        for number, frame in enumerate(clip):
            frame.save(tmp_path / f"{name}{number}.png")
    answers = [
        [{"role": "assistant", "content": [{"type": "image", "image": f"{n}{i}.png"} for i in (0, 1)]}] for n in "ab"
    ]
    row = {"id": "1", "prompt": TASK, "chosen": answers[0], "rejected": answers[1]}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row))
    words = ["--scorer", f"reward:{tmp_path / 'top.yaml'}", "--data", tmp_path / "pairs.jsonl"]
    words += ["--output-file", tmp_path / "out.csv", "--interventions", "none"]
    cli.app(["eval", *map(str, words)], exit_on_error=False, result_action="return_value")
    [pair] = pd.read_parquet(tmp_path / "out" / "pairs.scores.parquet").to_dict("records")
    expected = rewards(folder)(prompt=[TASK] * 2, video=[frames[:2], frames[2:4]]).rewards["top"]
    assert [pair["chosen_score"], pair["rejected_score"]] == pytest.approx(expected.tolist(), abs=1e-5)


def test_at_most_so_many_frames_are_shown(folder, frames):
    few = rewards(folder, max_frames=2)(prompt=[TASK], video=[frames]).rewards["top"]
    assert few == pytest.approx(
        rewards(folder)(prompt=[TASK], video=[[frames[0], frames[-1]]]).rewards["top"], abs=1e-5
    )


def test_what_cannot_be_is_refused(folder, frames, tmp_path, tiny_reward_model):
    with pytest.raises(CheckpointError, match=r"writes 'unheard' in \d tokens"):
        rewards(folder, answers=["unheard", "digit"])
    with pytest.raises(CheckpointError, match="has no language head"):
        rewards(tiny_reward_model)
    with pytest.raises(CheckpointError, match="writes 'number' in 2 tokens"):
        rewards(folder, chat_template=True)
    with pytest.raises(ConfigError, match=r"answers is .* write two different words"):
        rewards(folder, answers=["True", "True"])
    with pytest.raises(ConfigError, match="max_frames is 0"):
        rewards(folder, max_frames=0)
    (tmp_path / "words.txt").write_text("no place")
    with pytest.raises(ConfigError, match="text_prompt"):
        rewards(folder, template_file=str(tmp_path / "words.txt"))
    with pytest.raises(RewardError, match="its answer is no list of images"):
        rewards(folder)(prompt=[TASK], response=["It is done."])
