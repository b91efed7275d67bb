"""CLIP, PickScore, its rank and HPSv2: published formulas on tiny weights, whatever the company."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from scipy.stats import rankdata
from torch.nn.functional import cosine_similarity
from transformers import CLIPImageProcessorPil, CLIPModel

from tests.rewards.built_in import tiny_clip
from vlmrm.errors import CheckpointError, ConfigError, RewardError
from vlmrm.rewards import RewardSet

PROMPTS = ["a red square", "two", "a very much longer prompt about nothing", "two"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_clip.save_checkpoint(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def pictures():
    return tiny_clip.noise((28, 28), (64, 40), (31, 90), (50, 50))


@pytest.fixture(scope="module")
def cosine(checkpoint):
    """The cosine of one text with one picture, by transformers' whole model."""
    model = CLIPModel.from_pretrained(checkpoint).eval()
    processor, tokenizer = CLIPImageProcessorPil.from_pretrained(checkpoint), tiny_clip.tokenizer()

    @torch.no_grad()
    def of(text: str, picture) -> float:
        ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=77)["input_ids"]
        logits = model(input_ids=ids, pixel_values=processor(picture, return_tensors="pt")["pixel_values"])
        return float(logits.logits_per_image) / float(model.logit_scale.exp())

    return of


@pytest.fixture
def reward(checkpoint):
    def make(model: str, **settings) -> RewardSet:
        places = {"model_name_or_path": str(checkpoint), "processor_name_or_path": str(checkpoint)}
        return RewardSet({"reward_model": model, "dtype": "float32", "device": "cpu", **places, **settings})

    return make


def test_clip_is_the_cosine_alone_and_in_company(reward, cosine, pictures):
    expected = [cosine(text, picture) for text, picture in zip(PROMPTS, pictures, strict=True)]
    for size in (1, 3):
        found = reward("CLIP", batch_size=size)(prompt=PROMPTS, image=pictures).total()
        assert np.allclose(found, expected, rtol=0, atol=1e-6)
    assert np.ptp(expected) > 0.01


def test_pickscore_is_the_logit_over_26(reward, cosine, pictures):
    found = reward("pickscore")(prompt=PROMPTS, image=pictures).total()
    scale = np.exp(4.6052)
    expected = [scale * cosine(text, picture) / 26 for text, picture in zip(PROMPTS, pictures, strict=True)]
    assert np.allclose(found, expected, rtol=0, atol=1e-6)


def test_ranks_are_within_groups_and_ties_share_theirs(reward, cosine, pictures):
    shown = [*pictures, pictures[1].copy(), pictures[0], pictures[2]]
    groups = ["a", "a", "a", "a", "a", "b", "b"]
    found = reward("PickScore_Rank", batch_size=2)(prompt=["two"] * 7, image=shown, groups=groups).total()
    scores = np.array([cosine("two", picture) for picture in shown])
    assert np.allclose(found[:5], (rankdata(np.round(scores[:5], 5)) - 1) / 5)
    assert np.allclose(found[5:], (rankdata(scores[5:]) - 1) / 2)
    assert found[1] == found[4]


def test_a_video_is_first_frame_or_mean(reward, cosine, pictures):
    clips = [pictures[:3], pictures[1:]]
    first = [cosine("two", clip[0]) for clip in clips]
    mean = [np.mean([cosine("two", frame) for frame in clip]) for clip in clips]
    columns = {"prompt": ["two"] * 2, "video": clips}
    assert np.allclose(reward("CLIP")(**columns).total(), first, rtol=0, atol=1e-6)
    assert np.allclose(reward("CLIP", video_frames="mean")(**columns).total(), mean, rtol=0, atol=1e-6)
    found = reward("PickScore")(**columns).total()
    assert np.allclose(found, np.exp(4.6052) / 26 * np.array(mean), rtol=0, atol=1e-6)


def test_what_is_not_clear_is_an_error(reward, pictures):
    with pytest.raises(RewardError, match="images and videos"):
        reward("PickScore")(prompt=["two"], image=pictures[:1], video=[pictures])
    with pytest.raises(RewardError, match="neither an image nor a video"):
        reward("CLIP")(prompt=["two"])
    with pytest.raises(ConfigError, match="video_frames"):
        reward("CLIP", video_frames="last")
    with pytest.raises(CheckpointError, match="/nowhere/clip"):
        reward("CLIP", model_name_or_path="/nowhere/clip")


def test_prompts_over_77_tokens_are_cut_with_notice(reward, cosine, pictures, caplog):
    long = "x " * 200
    with caplog.at_level(logging.WARNING, "vlmrm"):
        found = reward("CLIP")(prompt=[long, "two"], image=pictures[:2]).total()
    assert np.allclose(found, [cosine(long, pictures[0]), cosine("two", pictures[1])], rtol=0, atol=1e-6)
    assert caplog.text.count("reads the first 77") == 1


def test_weights_have_the_requested_type_and_are_shared(checkpoint):
    common = dict.fromkeys(("model_name_or_path", "processor_name_or_path"), str(checkpoint))
    common |= {"dtype": "bfloat16", "device": "cpu"}
    rewards = RewardSet([{"name": name, "reward_model": name, **common} for name in ("PickScore", "PickScore_Rank")])
    score, ranked = (each.model for each in rewards.rewards)
    assert score.model is ranked.model
    assert {parameter.dtype for parameter in score.model.parameters()} == {torch.bfloat16}
    assert score.towers.scale == pytest.approx(np.exp(4.6052), rel=1e-6)  # bfloat16 would make 98.9 of it


@pytest.fixture
def hps(checkpoint, tmp_path):
    weights = tiny_clip.open_clip_weights()
    torch.save({"state_dict": weights, "epoch": 3}, tmp_path / "HPS_v2.1_compressed.pt")
    torch.save({"state_dict": {k: v for k, v in weights.items() if "ln_final" not in k}}, tmp_path / "cut.pt")
    common = {"reward_model": "HPSv2", "dtype": "float32", "device": "cpu", "base_name_or_path": str(checkpoint)}
    return lambda path=tmp_path, **settings: RewardSet({**common, "model_name_or_path": str(path), **settings})


def test_hpsv2_equals_the_open_clip_cosine_when_padded(hps, pictures):
    weights, tokenizer = tiny_clip.open_clip_weights(), tiny_clip.tokenizer()
    mean, std = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])
    expected = []
    for text, (height, width) in zip(PROMPTS[:2], ((28, 28), (28, 14)), strict=True):
        # Sizes that need padding and no resizing, so that the oracle is exact.
        shown = np.zeros((28, 28, 3))
        left = (28 - width) // 2
        shown[:, left : left + width] = np.asarray(pictures[0])[:height, :width] / 255
        pixels = torch.tensor((shown - mean) / std).permute(2, 0, 1).float()
        image = tiny_clip.open_clip_image(weights, pixels)
        words = tiny_clip.open_clip_text(weights, tokenizer(text)["input_ids"])
        expected.append(float(cosine_similarity(image, words, dim=0)))
    # The core refuses pictures as narrow as the second one.
    found = hps().rewards[0].model(PROMPTS[:2], image=[pictures[0], pictures[0].crop((0, 0, 14, 28))]).rewards
    assert np.allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("a “big” dog’s   house ", 'a "big" dog\'s house'),
        ("a cat &amp;amp; a\tdog &lt;3", "a cat & a dog <3"),
        ("cafÃ© at night", "café at night"),
        ("ﬁre … in the SKY", "fire … in the sky"),
    ],
)
def test_hpsv2_cleans_prompts_like_the_published_tokenizer(hps, pictures, prompt, read):
    """tgxs002/HPSv2 866735e, `basic_clean` and `whitespace_clean`: ftfy, HTML's entities twice, spaces, lower case."""
    weights, ids = tiny_clip.open_clip_weights(), tiny_clip.tokenizer()(read)["input_ids"]
    rewards = hps()
    scores = rewards(prompt=[prompt, read, "another"], image=pictures[:1] * 3).total()
    assert scores[0] == scores[1] != pytest.approx(scores[2], abs=1e-4)
    pixels = rewards.rewards[0].model.towers.prepare(pictures[:1])[0]
    image, text = tiny_clip.open_clip_image(weights, pixels), tiny_clip.open_clip_text(weights, ids)
    assert scores[0] == pytest.approx(float(cosine_similarity(image, text, dim=0)), abs=1e-6)


def test_hpsv2_ignores_batch_neighbours_and_sees_wide_pictures(hps, pictures):
    rewards = hps()
    together = rewards(prompt=PROMPTS, image=pictures).total()
    alone = [
        rewards(prompt=[text], image=[picture]).total()[0] for text, picture in zip(PROMPTS, pictures, strict=True)
    ]
    assert np.allclose(together, alone, rtol=0, atol=1e-6)
    changed = pictures[2].copy()
    changed.paste("white", (0, 0, 20, 31))  # what a crop of the middle would not see
    assert rewards(prompt=PROMPTS[2:3], image=[changed]).total()[0] != pytest.approx(together[2], abs=1e-4)


def test_broken_weights_are_named(hps, tmp_path):
    (tmp_path / "code.pt").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(CheckpointError, match="HPS_v2_compressed"):
        hps(hps_version="v2.0")
    with pytest.raises(CheckpointError, match=r"final_layer_norm\.weight is missing"):
        hps(tmp_path / "cut.pt")
    with pytest.raises(CheckpointError, match="read safely"):
        hps(tmp_path / "code.pt")
