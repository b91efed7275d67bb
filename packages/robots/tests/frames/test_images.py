"""Whatever names and layout an environment gives its images, the same frames are found; the rest is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from vlmrm.errors import DataError
from vlmrm_robots.frames.images import fitted, images_of

PICTURE = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)  # [H,W,C]
FRAME = PICTURE.transpose(2, 0, 1)
OPAQUE = np.full((6, 8, 1), 255, dtype=np.uint8)
STATE = np.zeros(4, dtype=np.float32)

LAYOUTS = {
    "bare, channels last": PICTURE,
    "bare, channels first": FRAME,
    "RLinf": {"images": PICTURE, "states": STATE},
    "gym-pusht": {"pixels": PICTURE, "agent_pos": STATE},
    "gym-aloha": {"pixels": {"top": PICTURE, "wrist": 0 * PICTURE}, "agent_pos": STATE},
    "ManiSkill": {
        "sensor_data": {"top": {"rgb": torch.from_numpy(PICTURE), "depth": torch.zeros(6, 8, 1)}},
        "agent": {"qpos": torch.zeros(9)},
    },
    "LeRobot": {
        "observation.images.top": torch.from_numpy(FRAME / np.float32(255)),
        "observation.images.wrist": torch.zeros(3, 6, 8),
        "observation.state": torch.zeros(4),
    },
    "LeRobot, one camera": {"observation.image": torch.from_numpy(FRAME.copy()), "observation.state": torch.zeros(2)},
    "robosuite": {"top": PICTURE, "robot0_eef_pos": STATE},
    "RGBA": np.concatenate([PICTURE, OPAQUE], axis=2),
    "floats": {"pixels": PICTURE / 255},
}


def shown(observation: Any, key: str = "top", info: dict[str, Any] | None = None) -> np.ndarray:
    return images_of(0, [key], observation, info or {}, 1)[key]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_shows_the_same_frame(layout):
    frames = shown(LAYOUTS[layout])
    assert frames.dtype == np.uint8 and frames.shape == (1, 3, 6, 8) and (frames[0] == FRAME).all()


@pytest.mark.parametrize("grey", [PICTURE[..., 0], PICTURE[..., :1], FRAME[:1], {"pixels": PICTURE[..., 0] / 255}])
def test_grey_images_have_one_channel(grey):
    assert (shown(grey) == FRAME[None, :1]).all() and shown(grey).shape == (1, 1, 6, 8)


def test_info_precedes_observations_and_cameras_are_told_apart():
    info = {"images": {"top": PICTURE[None], "_top": np.array([True])}}
    assert (shown(LAYOUTS["gym-aloha"], "wrist") == 0).all()
    assert (shown(0 * PICTURE, info=info) == FRAME).all() and (
        shown(STATE, info={"images": PICTURE[None]}) == FRAME
    ).all()


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (LAYOUTS["gym-aloha"] | {}, r"shows no image 'front': it shows top, wrist; check image_keys"),
        (
            {"state": STATE, "goal": STATE},
            r"shows no image 'front': its observation has state, goal, and info no",
        ),
        (STATE, r"its observation has numbers \[4\]"),
        (np.zeros((4, 84, 84), np.uint8), r"numbers \[4, 84, 84\]"),
        ({"front": np.zeros((84, 84, 4), np.uint8)}, "a fourth channel that is no opaque alpha"),
        (
            {"pixels": np.zeros((4, 84, 84), np.uint8)},
            r"of shape \[4, 84, 84\].*of a stack of frames show the last alone",
        ),
        ({"pixels": PICTURE.astype(np.float32)}, r"values outside \[0, 1\], from 0 to 249"),
        ({"pixels": PICTURE.astype(np.int64)}, "are int64"),
    ],
)
def test_a_missing_image_is_refused_naming_those_shown(observation, message):
    with pytest.raises(DataError, match=message):
        shown(observation, "front")


def test_crops_in_pixels_or_shares_precede_scaling():
    frames = np.zeros((2, 3, 40, 80), dtype=np.uint8)
    frames[:, :, 10:20, 20:60] = 200
    for crop in ([20, 10, 60, 20], [0.25, 0.25, 0.75, 0.5]):
        assert (fitted(frames, (3, 5, 10), crop, "x") == 200).all()
        assert (fitted(frames, (1, 10, 40), crop, "x") == 200).all()
    assert fitted(frames, None, None, "x").shape == frames.shape
    assert fitted(frames, (3, 40, 80), None, "x").mean() == frames.mean()
    with pytest.raises(DataError, match=r"the crop \[0, 0, 90, 10\] is not within the top, 80 wide and 40 high"):
        fitted(frames, (3, 5, 10), [0, 0, 90, 10], "the top")
