"""Small rewards whose values can be told by hand."""

from __future__ import annotations

import torch

from vlmrm.errors import RewardError
from vlmrm.rewards import GroupwiseRewardModel, PointwiseRewardModel, RewardModelOutput


class Length(PointwiseRewardModel):
    """The number of characters of the prompt; `calls` has the sizes of the batches."""

    required_fields = ("prompt",)
    options = ("offset",)

    def __init__(self, config, accelerator):
        super().__init__(config, accelerator)
        self.calls: list[int] = []

    def __call__(self, prompt, **kwargs):
        self.calls.append(len(prompt))
        offset = self.config.extra_kwargs.get("offset", 0.0)
        return RewardModelOutput(rewards=[len(text) + offset for text in prompt])


class Rank(GroupwiseRewardModel):
    """The rank of each prompt's length in its group, from 0."""

    required_fields = ("prompt",)

    def __call__(self, prompt, **kwargs):
        return torch.tensor([len(text) for text in prompt]).argsort().argsort().float()


class Answers(PointwiseRewardModel):
    """Whatever `rewards` of its configuration says, whatever is asked."""

    required_fields = ("prompt",)
    options = ("rewards",)

    def __call__(self, prompt, **kwargs):
        return self.config.rewards


class Down(PointwiseRewardModel):
    """A judge that cannot be reached when the prompt says so; `error` says how."""

    required_fields = ("prompt",)
    options = ("error",)

    def __call__(self, prompt, **kwargs):
        if any("down" in text for text in prompt):
            raise {"reward": RewardError, "bug": TypeError}[self.config.extra_kwargs.get("error", "reward")](
                "the judge cannot be reached"
            )
        return [1.0] * len(prompt)


class Brightness(PointwiseRewardModel):
    """The mean of the image as a tensor; of its condition images, where there are any, taken away."""

    use_tensor_inputs = True

    def __call__(self, prompt, image=None, condition_images=None):
        means = torch.stack([one.mean() for one in image])
        if condition_images is not None:
            given = [torch.stack([each.mean() for each in images]).mean() for images in condition_images]
            means = means - torch.stack(given)
        return RewardModelOutput(rewards=means)


class Same(PointwiseRewardModel):
    """How many samples of the call show the very same picture."""

    def __call__(self, prompt, image):
        return [float(sum(other is one for other in image)) for one in image]


class Shrinking(PointwiseRewardModel):
    """0, after it made the first image smaller."""

    def __call__(self, prompt, image):
        image[0].thumbnail((8, 8))
        return [0.0] * len(prompt)


class Width(PointwiseRewardModel):
    """The width of the image."""

    def __call__(self, prompt, image):
        return [float(one.width) for one in image]


class Boastful(PointwiseRewardModel):
    """1 a sample, and extra information under the names of what others say of a reward."""

    required_fields = ("prompt",)

    def __call__(self, prompt, **kwargs):
        extra = {"score": 99.0, "reward": 99.0, "error": "none", "reward_name": "best", "sample": 7}
        return RewardModelOutput([1.0] * len(prompt), extra)


class Spoken(PointwiseRewardModel):
    """The number of characters of the answer."""

    required_fields = ("prompt", "response")

    def __call__(self, prompt, response):
        return [float(len(text)) for text in response]


class Answered(PointwiseRewardModel):
    """1 for an answer in words, 0 for an image."""

    required_fields = ("prompt",)

    def __call__(self, prompt, response=None, image=None):
        return [float(response is not None)] * len(prompt)
