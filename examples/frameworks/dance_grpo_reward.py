"""DanceGRPO: an object in place of HPSv3's, before a script with `--use_hpsv3` is run."""

import hpsv3
import torch

from vlmrm.rewards import RewardSet


class People:
    def __init__(self, device):
        self.rewards = RewardSet("rewards.yaml")

    def reward(self, image_paths, prompts):
        return torch.tensor(self.rewards(prompt=prompts, image=image_paths).rewards["people"])


hpsv3.HPSv3RewardInferencer = People
