"""Rewards written as the documents of Flow-Factory show them, with another import line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from vlmrm.rewards import RewardSet

POINTWISE = """
from vlmrm.rewards import PointwiseRewardModel, RewardModelOutput
from vlmrm.rewards import RewardArguments
from accelerate import Accelerator
from typing import Optional, List
from PIL import Image
import torch

class MyPointwiseReward(PointwiseRewardModel):
    required_fields = ("prompt", "image")

    def __init__(self, config: RewardArguments, accelerator: Accelerator):
        super().__init__(config, accelerator)
        assert (self.config.batch_size, self.device.type, self.dtype) == (2, "cpu", torch.bfloat16)
        assert self.accelerator is accelerator

    @torch.no_grad()
    def __call__(
        self,
        prompt: List[str],
        image: Optional[List[Image.Image]] = None,
        video: Optional[List[List[Image.Image]]] = None,
        condition_images: Optional[List[List[Image.Image]]] = None,
        condition_videos: Optional[List[List[List[Image.Image]]]] = None,
    ) -> RewardModelOutput:
        assert len(prompt) <= self.config.batch_size
        assert all(isinstance(one, Image.Image) for one in image) and video is None
        return RewardModelOutput(rewards=torch.tensor([one.width for one in image], device=self.device))
"""
GROUPWISE = """
from vlmrm.rewards import GroupwiseRewardModel, RewardModelOutput
from vlmrm.rewards import RewardArguments
from accelerate import Accelerator
from typing import Optional, List
from PIL import Image
import torch

class MyGroupwiseReward(GroupwiseRewardModel):
    required_fields = ("prompt", "image")

    def __init__(self, config: RewardArguments, accelerator: Accelerator):
        super().__init__(config, accelerator)

    def _score_batch(self, prompt, image):
        assert len(prompt) <= self.config.batch_size
        return torch.tensor([float(one.width) for one in image])

    @torch.no_grad()
    def __call__(
        self,
        prompt: List[str],
        image: Optional[List[Image.Image]] = None,
        video: Optional[List[List[Image.Image]]] = None,
        condition_images: Optional[List[List[Image.Image]]] = None,
        condition_videos: Optional[List[List[List[Image.Image]]]] = None,
    ) -> RewardModelOutput:
        group_size = len(prompt)
        all_scores = []
        for i in range(0, group_size, self.config.batch_size):
            batch_scores = self._score_batch(
                prompt[i:i + self.config.batch_size],
                image[i:i + self.config.batch_size],
            )
            all_scores.append(batch_scores)
        raw_scores = torch.cat(all_scores, dim=0)
        ranks = raw_scores.argsort().argsort()
        rewards = ranks.float() / group_size
        return RewardModelOutput(rewards=rewards)
"""
TENSORS = """
from vlmrm.rewards import PointwiseRewardModel, RewardModelOutput
from typing import List, Optional, Union
import torch

class TensorBasedReward(PointwiseRewardModel):
    required_fields = ("prompt", "image")
    use_tensor_inputs = True

    @torch.no_grad()
    def __call__(
        self,
        prompt: List[str],
        image: Optional[List[torch.Tensor]] = None,
        video: Optional[List[torch.Tensor]] = None,
        condition_images: Optional[List[Union[torch.Tensor, List[torch.Tensor]]]] = None,
        condition_videos: Optional[List[Union[torch.Tensor, List[torch.Tensor]]]] = None,
    ) -> RewardModelOutput:
        assert [tuple(one.shape) for one in image] == [(3, 30, 40), (3, 30, 50)]
        assert all(0 <= one.min() and one.max() <= 1 for one in image)
        assert [tuple(one.shape) for one in video] == [(4, 3, 28, 28), (2, 3, 28, 28)]
        assert condition_images[0].shape == (2, 3, 28, 28)
        assert [tuple(one.shape) for one in condition_images[1]] == [(3, 28, 28), (3, 30, 28)]
        assert [tuple(one.shape) for one in condition_videos[0]] == [(1, 3, 28, 28), (2, 3, 28, 28)]
        assert condition_videos[1].shape == (1, 3, 3, 28, 28)
        return RewardModelOutput(rewards=torch.stack([one.mean() for one in image]))
"""


def picture(width: int, height: int = 28) -> Image.Image:
    return Image.new("RGB", (width, height), "white")


@pytest.fixture
def write(tmp_path, monkeypatch):
    def module(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return module


def test_the_pointwise_example(write):
    write("my_pointwise", POINTWISE)
    rewards = RewardSet({"name": "custom", "reward_model": "my_pointwise.MyPointwiseReward", "batch_size": 2})
    scored = rewards(prompt=["a", "b", "c"], image=[picture(40), picture(30), picture(50)])
    assert scored.rewards["custom"].tolist() == [40, 30, 50]


def test_the_groupwise_example(write):
    write("my_groupwise", GROUPWISE)
    rewards = RewardSet({"name": "custom", "reward_model": "my_groupwise.MyGroupwiseReward", "batch_size": 2})
    scored = rewards(
        prompt=["a"] * 3 + ["b"], image=[picture(40), picture(30), picture(50), picture(90)], groups=[0, 0, 0, 1]
    )
    assert scored.rewards["custom"].tolist() == pytest.approx([1 / 3, 0, 2 / 3, 0])


def test_the_tensor_example(write):
    write("my_tensors", TENSORS)
    small = picture(28)
    scored = RewardSet({"name": "custom", "reward_model": "my_tensors.TensorBasedReward"})(
        prompt=["a", "b"],
        image=[picture(40, 30), torch.zeros(3, 30, 50)],
        video=[[small] * 4, torch.zeros(2, 3, 28, 28)],
        condition_images=[[small, small], [small, picture(28, 30)]],
        condition_videos=[[[small], [small, small]], [[small] * 3]],
    )
    assert scored.rewards["custom"].tolist() == [1.0, 0.0]


def test_a_registered_name_is_found_in_any_case(write):
    write("my_registered", POINTWISE.replace("class My", '@register_reward_model("MyReward")\nclass My').replace(
        "import PointwiseRewardModel", "import register_reward_model, PointwiseRewardModel"
    ))  # fmt: skip
    __import__("my_registered")
    scored = RewardSet({"rewards": {"name": "x", "reward_model": "myreward", "batch_size": 2}})(
        prompt=["a"], image=[picture(40)]
    )
    assert scored.rewards["x"].tolist() == [40]


DOCUMENT = Path(__file__).parents[2] / "docs" / "rewards.md"


def test_the_recipes_of_templates_write_the_published_words_and_nothing_else(tmp_path):
    """hpsv3 1.0.0 prints a line when it is imported without flash attention."""
    words = "\nJudge it, “please”.\n\n{text_prompt}\n", "\nThe rating: <|Reward|>\n"
    package = tmp_path / "hpsv3" / "dataset"
    package.mkdir(parents=True)
    (tmp_path / "hpsv3" / "__init__.py").write_text("print('Flash Attention is not installed. Falling to SDPA.')")
    (package / "__init__.py").touch()
    (package / "data_collator_qwen.py").write_text(
        f"INSTRUCTION = {words[0]!r}\nprompt_with_special_token = {words[1]!r}\n", encoding="utf-8"
    )
    (tmp_path / "prompt_template.py").write_text(
        f"print('loaded')\nDETAILED_PROMPT_WITH_SPECIAL_TOKEN = {words[1]!r}\n", encoding="utf-8"
    )
    [recipe] = [text for text in re.findall("```bash\n(.*?)```", DOCUMENT.read_text(), re.DOTALL) if "hpsv3" in text]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-euc", recipe],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "LC_ALL": "C"},
        check=True,
        timeout=120,
    )
    assert (tmp_path / "hpsv3.txt").read_bytes().decode() == "".join(words)
    assert (tmp_path / "videoalign.txt").read_bytes().decode() == words[1]
