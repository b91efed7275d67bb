"""Rewards written as the documents of Flow-Factory show them, with another import line."""

from __future__ import annotations

import sys

import pytest
import torch
from PIL import Image

from vlmrm.rewards import RewardSet

IMPORTS = """
from vlmrm.rewards import GroupwiseRewardModel, PointwiseRewardModel, RewardModelOutput
from vlmrm.rewards import RewardArguments, register_reward_model
from accelerate import Accelerator
from typing import Optional, List, Union
from PIL import Image
import torch
"""
POINTWISE = """
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
TENSORS = """
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
        (tmp_path / f"{name}.py").write_text(IMPORTS + text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return module


def test_the_pointwise_example(write):
    write("my_pointwise", POINTWISE)
    rewards = RewardSet({"name": "custom", "reward_model": "my_pointwise.MyPointwiseReward", "batch_size": 2})
    scored = rewards(prompt=["a", "b", "c"], image=[picture(40), picture(30), picture(50)])
    assert scored.rewards["custom"].tolist() == [40, 30, 50]


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
