"""VideoAlign: three dimensions at their tokens, normalised, by a LoRA model's own arithmetic on tiny weights."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny_reward_tokens
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

from vlmrm.errors import CheckpointError, ConfigError, RewardError
from vlmrm.rewards import RewardSet
from vlmrm.rewards.built_in.video_align import sampled

TEMPLATE = "Rate it: <|VQ_reward|>\nMotion: <|MQ_reward|>\nPrompt - {text_prompt}\nText: <|TA_reward|>\nEND\n"
TOKENS = ["<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>"]
NORM = {"VQ_mean": 3.6757, "VQ_std": 2.2476, "MQ_mean": 1.1646, "MQ_std": 1.3811, "TA_mean": 2.8105, "TA_std": 2.5121}
CONFIG = {
    "data_config": {"fps": 2.0, "max_frame_pixels": 200704},
    "inference_config": NORM,
    "peft_lora_config": {"lora_r": 4, "lora_alpha": 8, "use_rslora": False},
}
PROMPTS = ["a cat runs", "a longer prompt about two digits"]


def lora_model(base):
    """The processor, the tokens' ids, and the model with LoRA on the language model's linear layers."""
    processor, model, ids = tiny_reward_tokens.with_tokens(base, TOKENS)
    targets = r".*language_model\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
    torch.manual_seed(3)
    wrapped = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    ).eval()
    return processor, ids, wrapped


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("video-align")
    tiny_reward_tokens.save_base(folder / "base")
    (folder / "template.txt").write_text(TEMPLATE)
    (folder / "model_config.json").write_text(json.dumps(CONFIG))
    _, _, wrapped = lora_model(folder / "base")
    prefix = "base_model.model."
    weights = tiny_reward_tokens.published_names(wrapped.state_dict(), prefix)
    assert f"{prefix}model.layers.0.self_attn.q_proj.lora_A.default.weight" in weights
    weights[f"{prefix}rm_head.weight"] = torch.linspace(-1, 1, 128)[None]
    (folder / "checkpoint-11352").mkdir()
    torch.save(weights, folder / "checkpoint-11352" / "model.pth")
    return folder


@pytest.fixture(scope="module")
def clips():
    # Sides of multiples of 28 within the limits, so that the oracle need not resize.
    noise = np.random.default_rng(0)
    frames = [Image.fromarray(noise.integers(0, 256, (280, 364, 3), dtype=np.uint8)) for _ in range(12)]
    return [frames[:8], frames[4:]]


@pytest.fixture(scope="module")
def expected(folder, clips):
    """The normalised dimensions [N, 3] of all frames at 2 a second."""
    processor, ids, wrapped = lora_model(folder / "base")
    head = torch.linspace(-1, 1, 128)
    found = []
    for prompt, clip in zip(PROMPTS, clips, strict=True):
        text = TEMPLATE.replace("{text_prompt}", prompt)
        # Of a clip of 4 s at 2 a second all 8 frames are taken.
        video = torch.stack([pil_to_tensor(frame) for frame in clip])
        tokens, hidden = tiny_reward_tokens.hidden_states(
            processor, wrapped.base_model.model, {"type": "video", "video": video}, text
        )
        raw = [float(hidden[tokens.tolist().index(token)] @ head) for token in ids]
        found.append(
            [(value - NORM[f"{n}_mean"]) / NORM[f"{n}_std"] for n, value in zip(("VQ", "MQ", "TA"), raw, strict=True)]
        )
    return np.array(found)


@pytest.fixture
def reward(folder):
    def make(**settings) -> RewardSet:
        places = {"model_name_or_path": str(folder), "base_name_or_path": str(folder / "base")}
        common = {"template_file": str(folder / "template.txt"), "video_fps": 2, "dtype": "float32", "device": "cpu"}
        return RewardSet({"name": "video", "reward_model": "VideoAlign", **common, **places, **settings})

    return make


def test_the_reward_is_the_sum_of_the_dimensions_alone_and_in_company(reward, expected, clips):
    for size in (1, 2):
        found = reward(batch_size=size)(prompt=PROMPTS, video=clips)
        assert np.allclose(found.total(), expected.sum(axis=1), rtol=0, atol=1e-5)
        for number, name in enumerate(("VQ", "MQ", "TA")):
            assert found.info["video"][1][name] == pytest.approx(expected[1, number], abs=1e-5)
    assert np.ptp(expected, axis=0).min() > 1e-4
    motion = reward(dimension="MQ")(prompt=PROMPTS, video=clips).total()
    assert np.allclose(motion, expected[:, 1], rtol=0, atol=1e-5)


def test_frames_are_taken_at_the_rate_of_the_training(reward, expected, clips):
    # The same pictures, each shown four times: at 8 a second, a quarter of them are taken.
    slow = [[frame for frame in clip for _ in range(4)] for clip in clips]
    found = reward(video_fps=8)(prompt=PROMPTS, video=slow).total()
    assert np.allclose(found, expected.sum(axis=1), rtol=0, atol=1e-5)
    each = reward(video_fps=None)(prompt=PROMPTS, video=[slow[0], clips[1]], fps=[8.0, 2.0]).total()
    assert np.allclose(each, expected.sum(axis=1), rtol=0, atol=1e-5)
    with pytest.raises(RewardError, match="set video_fps, or give a column fps"):
        reward(video_fps=None)(prompt=PROMPTS, video=clips)


@pytest.mark.parametrize(
    ("length", "video_fps", "places"),
    [
        (80, 16, [0, 9, 18, 26, 35, 44, 53, 61, 70, 79]),  # 5 s, 10 frames
        (16, 16, [0, 5, 10, 15]),  # 1 s, at least 4
        (3, 16, [0, 2]),  # an even number of what there is
        (1, 16, [0]),
    ],
)
def test_frames_are_even_in_time_and_in_number(length, video_fps, places):
    assert sampled(list(range(length)), video_fps, 2.0) == places


def test_a_broken_sample_fails_alone(reward, expected, clips):
    uneven = [clips[0][0], clips[0][1].resize((280, 280))] * 4
    found = reward(on_failure="mask")(
        prompt=["all <|VQ_reward|> please", PROMPTS[1], PROMPTS[0]], video=[*clips, uneven]
    )
    assert "spells <|VQ_reward|>" in found.failures["video"][0]
    assert "different sizes" in found.failures["video"][2]
    assert found.total()[1] == pytest.approx(expected[1].sum(), abs=1e-5)


def test_what_is_missing_is_named(reward, folder, tmp_path):
    with pytest.raises(ConfigError, match="write the frames a second of the videos"):
        reward(video_fps=0)
    with pytest.raises(CheckpointError, match=r"there is no model_config\.json in"):
        reward(model_name_or_path=str(tmp_path))
    (tmp_path / "model_config.json").write_text(json.dumps({**CONFIG, "inference_config": None}))
    with pytest.raises(CheckpointError, match="has no VQ_mean in inference_config"):
        reward(model_name_or_path=str(tmp_path))
    (tmp_path / "model_config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(CheckpointError, match=r"there is no checkpoint-11352/model\.pth in"):
        reward(model_name_or_path=str(tmp_path))
