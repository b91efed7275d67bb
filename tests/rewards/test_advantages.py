"""Advantages against float64 oracles written out group by group."""

from __future__ import annotations

import numpy as np
import pytest

from vlmrm.errors import ConfigError, RewardError
from vlmrm.rewards import advantages

RNG = np.random.default_rng(0)
GROUPS = [f"p{i}" for i in RNG.integers(0, 7, 60)]
REWARDS = {"a": RNG.normal(3, 2, 60), "b": RNG.normal(-100, 0.01, 60)}
WEIGHTS = {"a": 1.0, "b": 0.5}


def deviations(values: np.ndarray, scale: float | None = None) -> np.ndarray:
    found = np.zeros(len(values))
    for group in set(GROUPS):
        mine = [i for i, other in enumerate(GROUPS) if other == group]
        std = float(np.sqrt(np.mean((values[mine] - values[mine].mean()) ** 2)))
        found[mine] = (values[mine] - values[mine].mean()) / max(std if scale is None else scale, 1e-6)
    return found


@pytest.mark.parametrize("global_std", [True, False])
def test_sum(global_std):
    total = REWARDS["a"] + 0.5 * REWARDS["b"]
    oracle = deviations(total, total.std() if global_std else None)
    np.testing.assert_allclose(advantages(REWARDS, WEIGHTS, GROUPS, "sum", global_std=global_std), oracle, rtol=1e-12)


@pytest.mark.parametrize("global_std", [True, False])
def test_gdpo(global_std):
    total = deviations(REWARDS["a"]) + 0.5 * deviations(REWARDS["b"])
    oracle = (total - total.mean()) / total.std() if global_std else total
    found = advantages(REWARDS, WEIGHTS, GROUPS, "gdpo", global_std=global_std)
    np.testing.assert_allclose(found, oracle, rtol=1e-10)


@pytest.mark.parametrize("method", ["sum", "gdpo"])
@pytest.mark.parametrize("value", [0.1, 0.3, 1e9])
def test_constant_rewards_and_lone_samples_have_no_advantage(method, value):
    assert advantages({"a": np.full(5, value)}, {"a": 1.0}, [0, 0, 0, 1, 2], method).tolist() == [0.0] * 5


def test_a_missing_reward_neither_rewards_nor_punishes():
    rewards = {"a": np.array([1.0, 2.0, 3.0, 5.0]), "judge": np.array([10.0, np.nan, 20.0, np.nan])}
    without = {"a": np.array([1.0, 2.0, 3.0, 5.0]), "judge": np.array([10.0, 15.0, 20.0, 15.0])}
    for method in ("sum", "gdpo"):
        found = advantages(rewards, {"a": 1.0, "judge": 1.0}, ["p"] * 4, method)
        np.testing.assert_allclose(found, advantages(without, {"a": 1.0, "judge": 1.0}, ["p"] * 4, method))


def test_a_judge_down_for_a_group_changes_nothing():
    rewards = {"a": np.array([1.0, 2.0, 1.0, 2.0]), "judge": np.array([np.nan, np.nan, 5.0, 9.0])}
    found = advantages(rewards, {"a": 1.0, "judge": 1.0}, [0, 0, 1, 1], "sum", global_std=False)
    np.testing.assert_allclose(found, [-1, 1, -1, 1])


def test_a_sample_without_reward_enters_no_statistic():
    rewards = {"a": np.array([1.0, np.nan, 3.0])}
    np.testing.assert_allclose(advantages(rewards, {"a": 1.0}, [0, 0, 0], "sum"), [-1, 0, 1])
    assert advantages({"a": np.full(2, np.nan)}, {"a": 1.0}, [0, 0]).tolist() == [0.0, 0.0]


def test_group_ids_of_64_bits_stay_apart():
    ids = [2**53, 2**53 + 1, 2**53, 2**53 + 1]
    found = advantages({"a": np.array([0.0, 10.0, 1.0, 11.0])}, {"a": 1.0}, ids, "sum", global_std=False)
    np.testing.assert_allclose(found, [-1, -1, 1, 1])


def test_a_custom_aggregation_function_is_used_and_checked():
    def best(rewards, weights, groups):
        return (rewards["a"] == rewards["a"].max()) * weights["a"]

    assert advantages({"a": np.array([1.0, 3.0])}, {"a": 2.0}, [0, 0], best).tolist() == [0.0, 2.0]
    with pytest.raises(RewardError, match="aggregation returned"):
        advantages({"a": np.array([1.0, 3.0])}, {"a": 2.0}, [0, 0], lambda *_: np.zeros(1))
    with pytest.raises(ConfigError, match="choose from sum, gdpo"):
        advantages({"a": np.array([1.0, 3.0])}, {"a": 2.0}, [0, 0], "mean")
