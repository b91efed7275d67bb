"""Several trained models as one reward, against the scores of each."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vlmrm.errors import ConfigError
from vlmrm.modeling import load_for_training, load_processor, save_reward_files, write_complete
from vlmrm.modeling.manifest import save_scale
from vlmrm.rewards import RewardSet
from vlmrm.scoring import load_scorer

ANSWERS = ["It is one.", "It is two, I think.", "No.", "It is one."]


@pytest.fixture(scope="module")
def members(tiny_checkpoint, tmp_path_factory):
    """Three models with heads of their own, and their scores' means and deviations."""
    folders = []
    for seed in range(3):
        folder = tmp_path_factory.mktemp("members") / f"member-{seed}"
        torch.manual_seed(seed)
        load_for_training(tiny_checkpoint).save_pretrained(folder)
        processor = load_processor(tiny_checkpoint)
        save_reward_files(folder, processor=processor, head="linear", provenance={})
        write_complete(folder, world_size=1, step=0)
        save_scale(folder, {"reward_mean": seed / 100, "reward_std": 0.5 + seed})
        folders.append(folder)
    return folders


@pytest.fixture(scope="module")
def scores(members):
    conversations = [
        [{"role": "user", "content": "Which digit is this?"}, {"role": "assistant", "content": answer}]
        for answer in ANSWERS
    ]
    return np.array([load_scorer(folder, device="cpu", dtype="float32").score(conversations) for folder in members])


def rewards(members, **settings):
    common = {"reward_model": "vlm_reward_ensemble", "dtype": "float32", "device": "cpu"}
    reward = RewardSet({"name": "all", **common, "model_paths": [str(folder) for folder in members], **settings})
    return reward(prompt=["Which digit is this?"] * len(ANSWERS), response=ANSWERS)


def test_the_ensemble_reward_is_mean_minimum_or_penalised(members, scores):
    z = (scores - np.array([[0.0], [0.01], [0.02]])) / np.array([[0.5], [1.5], [2.5]])
    assert z.std(axis=0).min() > 1e-3  # they disagree
    scored = rewards(members)
    assert scored.rewards["all"].tolist() == pytest.approx(z.mean(axis=0), abs=1e-5)
    assert scored.info["all"][1]["std"] == pytest.approx(z[:, 1].std(), abs=1e-5)
    assert scored.info["all"][1]["members"] == pytest.approx(z[:, 1], abs=1e-5)
    assert rewards(members, combine="min").rewards["all"].tolist() == pytest.approx(z.min(axis=0), abs=1e-5)
    assert rewards(members, uncertainty_penalty=2.0).rewards["all"].tolist() == pytest.approx(
        z.mean(axis=0) - 2 * z.std(axis=0), abs=1e-5
    )
    assert rewards(members, transform="raw").rewards["all"].tolist() == pytest.approx(scores.mean(axis=0), abs=1e-5)


def test_one_model_is_no_ensemble(members):
    for paths in (members[:1], [members[0], members[0]]):
        with pytest.raises(ConfigError, match="two or more that differ"):
            rewards(paths)
