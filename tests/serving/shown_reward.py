"""A reward of vlmrm's own kind that says what it is shown."""

from vlmrm.rewards import PointwiseRewardModel, RewardModelOutput


class Answered(PointwiseRewardModel):
    """The length of a response, which each sample needs."""

    required_fields = ("prompt", "response")

    def __call__(self, prompt, response):
        return RewardModelOutput([float(len(one)) for one in response])


class Shown(PointwiseRewardModel):
    """Ten times the red of the first pixel of a sample's last picture, plus its frames a second."""

    required_fields = ("prompt",)

    def __call__(self, prompt, image=None, video=None, fps=None):
        last = image or [frames[-1] for frames in video]
        red = [10.0 * picture.getpixel((0, 0))[0] for picture in last]
        return RewardModelOutput([one + rate for one, rate in zip(red, fps or [0.0] * len(red), strict=True)])


class Either(PointwiseRewardModel):
    """One for an image, two for a video, as rewards do that name both as required and mean one of them."""

    required_fields = ("prompt", "image", "video")

    def __call__(self, prompt, image=None, video=None):
        return RewardModelOutput([1.0 if video is None else 2.0] * len(prompt))
