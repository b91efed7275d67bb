"""Rewards as they are written for cosmos-rl's service."""

import torch


class Brightness:
    """Scores the mean of each sample's pixels, and says what it was called with."""

    reward_name = "brightness"

    def __init__(self, model_path, dtype="float16", device="cuda", download_path="", **kwargs):
        self.settings = [model_path, dtype, device, download_path, kwargs]
        self.calls = 0

    def set_up(self):
        self.scale = 1.0

    def calculate_reward(self, images, metadata):
        assert images.dtype == torch.uint8 and images.is_contiguous()
        self.calls += 1
        if "fail" in metadata["prompts"]:
            return {"error": "no weights", "scores": None}
        means = images.float().flatten(1).mean(1) * self.scale
        return {
            "scores": {
                "said": [f"{prompt} {list(images.shape)}" for prompt in metadata["prompts"]],
                "brightness": means,
                "groups": {"call": [self.calls] * len(images), "mood": metadata.get("moods", [0] * len(images))},
            },
            "input_info": metadata["input_info"],
            "duration": "0.00",
            "decoded_duration": metadata["decode_duration"],
            "type": "brightness",
        }
