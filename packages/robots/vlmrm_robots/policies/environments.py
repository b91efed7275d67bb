"""Environments as a policy in training takes them: rewarded, audited, and in Stable-Baselines3's form."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv, VectorWrapper
from stable_baselines3.common.vec_env import VecEnv

from vlmrm_robots.frames.frame_reward import FrameReward


class TrueSuccess(VectorWrapper):
    """Rewards 1 for each step to a true success, otherwise 0; `info` gets `true_success` [N].

    For autoreset in the same step. Where an episode ends, its last state counts, not the first of the next.
    """

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, _, terminations, truncations, info = self.env.step(actions)
        ended = terminations | truncations
        # A declared success is of steps alone: where all have just been reset, info has none.
        success = np.array(info.get("success", np.zeros(self.num_envs)), dtype=bool)
        success[ended] = np.asarray(info["final_info"]["success"])[ended] if ended.any() else False
        # Wrappers read info by Gymnasium's convention: `_name` masks the environments that have a value.
        info = {**info, "true_success": success, "_true_success": np.ones(self.num_envs, dtype=bool)}
        return observation, success.astype(np.float64), terminations, truncations, info


@dataclass
class Counts:
    """Steps of training, and how many of them were rewarded or led to a true success."""

    training_steps: int = 0
    true_successes: int = 0
    rewarded: int = 0
    false_positives: int = 0  # rewarded without a success
    missed: int = 0  # successes without a reward

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def false_positive_share(self) -> float | None:
        """Share of the rewards; None without any."""
        return self.false_positives / self.rewarded if self.rewarded else None

    def figures(self) -> dict[str, float | None]:
        """Return the counts and the share by name, as tables and summaries have them."""
        return {**asdict(self), "false_positive_share": self.false_positive_share}


class RewardAudit(VectorWrapper):
    """Counts each learned reward against the true success of its state, and leaves the rewards as they are.

    A binary reward counts if it is not 0, a continuous one above the classifier's threshold.
    """

    def __init__(self, env: FrameReward):
        super().__init__(env)
        self._threshold = 0.0 if env.settings.reward_type == "binary" else env.scorer.config.threshold
        self._recent = Counts()

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        *result, info = self.env.step(actions)
        success, rewarded = info["true_success"], info["frame_reward"] > self._threshold
        self._recent += Counts(
            training_steps=self.num_envs,
            true_successes=int(success.sum()),
            rewarded=int(rewarded.sum()),
            false_positives=int((rewarded & ~success).sum()),
            missed=int((~rewarded & success).sum()),
        )
        return *result, info

    def counts(self) -> Counts:
        """Return the counts since the last call."""
        recent, self._recent = self._recent, Counts()
        return recent


class StableBaselinesEnv(VecEnv):
    """Environments of `make_environments`, with autoreset in the same step, as Stable-Baselines3 takes them.

    The infos have `true_success`, of the state that a step led to, and the keys that Stable-Baselines3 reads.
    """

    def __init__(self, env: VectorEnv):
        self.env = env
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)

    def reset(self) -> Any:
        return self.env.reset()[0]

    def step_async(self, actions: np.ndarray) -> None:
        self._actions = actions

    def step_wait(self) -> tuple[Any, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        observation, rewards, terminations, truncations, info = self.env.step(self._actions)
        ended = terminations | truncations
        infos: list[dict[str, Any]] = [{"true_success": bool(value)} for value in info["true_success"]]
        for i in np.flatnonzero(ended):
            infos[i]["TimeLimit.truncated"] = bool(truncations[i] and not terminations[i])
            infos[i]["terminal_observation"] = info["final_obs"][i]
        return observation, rewards.astype(np.float32), ended, infos

    def close(self) -> None:
        self.env.close()

    # Methods that VecEnv requires for its wrappers; those of single environments have no meaning here.

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self.env, attr_name)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError("a vector environment is configured before its training")

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        raise NotImplementedError("a vector environment has no methods of single environments")

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: Any = None) -> list[bool]:
        return [False] * self.num_envs
