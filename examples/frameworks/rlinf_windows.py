"""RLinf: each window of `history_buffers` as a video; `RLINF_EXT_MODULE=rlinf_windows` and `model_type: people`."""

import torch
from rlinf.models.embodiment.reward import BaseRewardModel, reward_model_registry

from vlmrm.rewards import RewardSet


class People(BaseRewardModel):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.rewards = RewardSet({"name": "people", "reward_model": "vlm_reward", "model_path": "http://host:8080"})

    def forward(self, input_data, labels=None):
        raise NotImplementedError("vlmrm trains it")

    def compute_reward(self, observations):
        windows = observations["history_input"]["history_window"]["main_images"]  # frames [H, W, 3], by environment
        whole = [index for index, frames in enumerate(windows) if frames]
        rewards = torch.zeros(len(windows))
        if whole:
            tasks = [observations["task_descriptions"][index] for index in whole]
            videos = [torch.stack(windows[index]).permute(0, 3, 1, 2) for index in whole]
            rewards[whole] = torch.tensor(self.rewards(prompt=tasks, video=videos).rewards["people"]).float()
        return rewards


def register():
    reward_model_registry["people"] = People
