"""A scorer that breaks moves GRPO's advantages by little, stalls no round, and loses none."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from vlmrm.errors import RewardError
from vlmrm.rewards import PointwiseRewardModel, RewardModelOutput, RewardSet
from vlmrm.rewards.outcome import without_missing

GROUPS, SIZE = 400, 8
PROMPTS = [str(number // SIZE) for number in range(GROUPS * SIZE)]
RESPONSES = [str(number) for number in range(GROUPS * SIZE)]
LOGITS = np.random.default_rng(0).normal(-3.0, 1.0, GROUPS * SIZE)  # far from 0, as raw logits are
RELEASE = threading.Event()


class Broken(PointwiseRewardModel):
    """Answers `LOGITS`, but fails in its way for the share of samples that are `faults` of its configuration."""

    required_fields = ("prompt", "response")

    def __call__(self, prompt, response, **_):
        numbers = [int(text) for text in response]
        rewards, failures = LOGITS[numbers].copy(), {}
        for position in np.flatnonzero(np.isin(numbers, failed(self.config.share))):
            if self.config.fault == "down":
                failures[int(position)] = "the judge is away"
            elif self.config.fault == "slow":
                RELEASE.wait(30)
            else:
                rewards[position] = {"nan": np.nan, "off_scale": 1e6}[self.config.fault]
        return RewardModelOutput(rewards=rewards, failures=failures)


def failed(share: float) -> np.ndarray:
    return np.random.default_rng(1).permutation(len(LOGITS))[: round(share * len(LOGITS))]


def grpo(rewards: np.ndarray) -> np.ndarray:
    groups = rewards.reshape(-1, SIZE)
    deviations = np.maximum(groups.std(axis=1, keepdims=True), 1e-4)
    return ((groups - groups.mean(axis=1, keepdims=True)) / deviations).ravel()


def round_of(fault: str, share: float, size: int = len(PROMPTS), **settings) -> np.ndarray:
    """The advantages of the first samples, by the reward set."""
    config = {"name": "x", "reward_model": f"{__name__}.Broken", "on_failure": "mask", "fault": fault, "share": share}
    rewards = RewardSet({**config, "valid": [-20, 20], **settings})
    scored = rewards(prompt=PROMPTS[:size], response=RESPONSES[:size], groups=PROMPTS[:size])
    assert set(scored.failures["x"]) == {int(number) for number in failed(share) if number < size}
    return scored.advantages("sum", global_std=False)


@pytest.mark.parametrize("share", [0.01, 0.5])
@pytest.mark.parametrize("fault", ["down", "nan", "off_scale"])
def test_advantages_with_faults_are_those_without(fault, share):
    clean, advantages, broken = grpo(LOGITS), round_of(fault, share), failed(share)
    assert abs(advantages[broken].mean()) < 0.05, "no policy is paid for breaking its scorer"
    whole = np.setdiff1d(np.arange(len(LOGITS)), broken)
    assert abs((advantages - clean)[whole].mean()) < 0.05, "nor are the others for its faults"
    assert np.corrcoef(advantages[whole], clean[whole])[0, 1] > 0.85  # means of half a group


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_adapter_failures_pay_nothing_under_framework_grpo(share):
    """As `TRLReward` and `VlmrmORM` settle failures; TRL leaves out a group of None alone."""
    broken = failed(share)
    scores = LOGITS.copy()
    scores[broken] = np.nan
    advantages = np.nan_to_num(grpo(without_missing({"x": scores}, PROMPTS)["x"]))
    assert abs(advantages[broken].mean()) < 0.05
    whole = np.setdiff1d(np.arange(len(LOGITS)), broken)
    assert abs((advantages - grpo(LOGITS))[whole].mean()) < 0.05


def test_a_round_does_not_wait_for_slow_judges():
    settings = {"async_reward": True, "batch_size": 1, "num_workers": 64, "size": 400}
    try:
        advantages = round_of("slow", 0.05, **settings, deadline=0.5)
        slow = [number for number in failed(0.05) if number < 400]
        assert len(slow) > 10 and np.allclose(advantages[slow], 0.0)
        with pytest.raises(RewardError, match=r"no reward 0\.1 s after"):
            round_of("slow", 0.05, **settings, deadline=0.1, on_failure="raise")
    finally:
        RELEASE.set()


class Graded(PointwiseRewardModel):
    """A reward of 1 a word, which says how sure it is."""

    required_fields = ("prompt", "response")

    def __call__(self, prompt, response, **_):
        counts = [float(len(text.split())) for text in response]
        return RewardModelOutput(rewards=counts, extra_info={"std": [0.5] * len(counts)})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"clip": [2, 3]}, [2, 2, 3, 3]),
        ({"length_penalty": 2.0, "length_free": 2}, [1, 2, 1, 0]),
        ({"uncertainty_penalty": 2.0}, [0, 1, 2, 3]),
        ({"uncertainty_penalty": 2.0, "length_penalty": 0.5, "clip": [0, 1]}, [0, 0, 0.5, 1]),
        ({"valid": [1, 3], "on_failure": "mask"}, [1, 2, 3, np.nan]),
    ],
)
def test_penalties_clipping_and_the_valid_range_are_configuration(settings, expected):
    config = {"name": "x", "reward_model": f"{__name__}.Graded", **settings}
    rewards = RewardSet(config)(prompt=["p"] * 4, response=["a", "a b", "a b c", "a b c d"])
    np.testing.assert_allclose(rewards.rewards["x"], expected)


class Numbers(PointwiseRewardModel):
    required_fields = ("prompt", "response")

    def __call__(self, prompt, response, **_):
        values = [text.split()[self.config.column] for text in response]
        return RewardModelOutput(rewards=[float(value) for value in values])


def test_metrics_tell_signal_saturation_and_held_out_reward():
    columns = {"proxy": (0, 1.0), "same": (1, 1.0), "real": (2, 0.0)}
    config = [
        {"name": name, "reward_model": f"{__name__}.Numbers", "column": column, "weight": weight, "on_failure": "mask"}
        for name, (column, weight) in columns.items()
    ]
    rows = ["1 5 4", "3 5 2", "2 5 9", "2 5 nan"]
    metrics = RewardSet(config)(prompt=["p"] * 4, response=rows, groups=[0, 0, 1, 1]).metrics()
    assert metrics["rewards/proxy/group_std"] == 0.5  # 1 and 0
    assert metrics["rewards/proxy/no_signal"] == metrics["rewards/no_signal"] == 0.5
    assert metrics["rewards/same/saturation"] == metrics["rewards/same/no_signal"] == 1.0
    assert metrics["rewards/real/missing"] == 0.25 and metrics["rewards/real/failures"] == 1
    assert metrics["rewards/real/held_out"] == pytest.approx(-1.0)
    assert metrics["rewards/correlation/proxy/real"] == pytest.approx(np.corrcoef([1, 3, 2], [4, 2, 9])[0, 1])
    assert np.isnan(metrics["rewards/correlation/proxy/same"])
