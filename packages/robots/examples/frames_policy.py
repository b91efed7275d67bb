"""Trains a policy by Stable-Baselines3 with a classifier's reward alone, and audits what was paid for.

python packages/robots/examples/frames_policy.py outputs/frames_demo/reward_model.safetensors --seeds 0 1 2

Episodes of training last --max-steps also after a success, because their end would give the success away. A policy's
worth is its true success rate: the share of episodes, from states that no training has, in which some state truly is a
success. --source success trains the same policy with the true success as its reward, for comparison. --episodes-dir
stores episodes of the trained policies with their frames, for `vlmrm frames qualify`: a policy finds what deceives.
"""

from __future__ import annotations

import argparse
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import VectorEnv, VectorWrapper
from stable_baselines3 import PPO, SAC
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import VecEnv

from vlmrm.cli import run
from vlmrm.logs import say
from vlmrm_robots.frames.collecting import episode_seed
from vlmrm_robots.frames.collector import RewardDataCollector
from vlmrm_robots.frames.environments import make_environments
from vlmrm_robots.frames.frame_reward import FrameReward, FrameScorer
from vlmrm_robots.frames.settings import RewardModelSettings

PPO_KEYS: dict[str, Any] = {"n_steps": 64, "batch_size": 256, "n_epochs": 10, "ent_coef": 0.01}
SAC_KEYS: dict[str, Any] = {"learning_starts": 1000, "batch_size": 128, "tau": 0.01, "gradient_steps": -1}
TRAINING, EVALUATION, DEMONSTRATION = 0, 1, 2  # numbers by which `episode_seed` keeps their environments apart
COUNTS = ("rewarded", "false", "missed")


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


class RewardAudit(VectorWrapper):
    """Counts each reward of the classifier against the true success of its state, and leaves the rewards alone."""

    def __init__(self, env: FrameReward):
        super().__init__(env)
        self.counts = Counter(dict.fromkeys(COUNTS, 0))

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        *result, info = self.env.step(actions)
        success, rewarded = info["true_success"], info["frame_reward"] > 0
        for name, steps in zip(COUNTS, (rewarded, rewarded & ~success, success & ~rewarded), strict=True):
            self.counts[name] += int(steps.sum())
        return *result, info


class StableBaselinesEnv(VecEnv):
    """Environments with `true_success`, as Stable-Baselines3 takes them."""

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
        infos: list[dict[str, Any]] = [{"true_success": bool(success)} for success in info["true_success"]]
        for i in np.flatnonzero(ended):
            infos[i]["TimeLimit.truncated"] = bool(truncations[i] and not terminations[i])
            infos[i]["terminal_observation"] = info["final_obs"][i]
        return observation, rewards.astype(np.float32), ended, infos

    def close(self) -> None:
        self.env.close()

    # What VecEnv requires for wrappers of single environments, which have no meaning here.

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self.env, attr_name)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        raise NotImplementedError

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs


def environments(options: argparse.Namespace, scorer: FrameScorer, seed: int, purpose: int) -> VectorEnv:
    """Return the environments of a purpose; but for training, one for each episode."""
    return TrueSuccess(
        make_environments(
            options.env,
            options.num_envs if purpose == TRAINING else options.episodes,
            seed=episode_seed(seed, purpose),
            image_size=scorer.config.image_size,
            keys=() if purpose == EVALUATION else scorer.config.image_keys,
            crop=scorer.config.crop,
            success=options.success,
            stop_at_success=purpose == EVALUATION,
            max_steps=options.max_steps,
            action_repeat=options.action_repeat,
        )
    )


def train(options: argparse.Namespace, scorer: FrameScorer, source: str, seed: int) -> dict[str, Any]:
    """Train a policy; return its true success rate, that of random actions, and what was paid for."""
    env = environments(options, scorer, seed, TRAINING)
    audit = RewardAudit(FrameReward(env, options.reward, scorer)) if source == "learned" else None
    with closing(StableBaselinesEnv(audit or env)) as adapted:
        build, keys = (SAC, SAC_KEYS) if isinstance(adapted.action_space, Box) else (PPO, PPO_KEYS)
        policy = build("MlpPolicy", adapted, seed=seed, device="cpu", **keys)
        policy.learn(options.steps)
    if options.episodes_dir is not None:
        collect(options, scorer, policy, options.episodes_dir / f"{source}-seed{seed}", seed)
    rates = {}
    for name, actor in (("random", None), ("success", policy)):
        with closing(StableBaselinesEnv(environments(options, scorer, seed, EVALUATION))) as adapted:
            adapted.action_space.seed(seed)
            rates[name] = float(play(adapted, actor).mean())
    return {**rates, **(audit.counts if audit else {})}


def play(env: VecEnv, policy: BaseAlgorithm | None) -> np.ndarray:
    """Play until each environment has ended an episode; return whether that had a true success: [N]."""
    succeeded, over = np.zeros(env.num_envs, dtype=bool), np.zeros(env.num_envs, dtype=bool)
    observations: Any = env.reset()
    while not over.all():
        if policy is None:
            actions = np.array([env.action_space.sample() for _ in over])
        else:
            actions = policy.predict(observations)[0]
        observations, _, ended, infos = env.step(actions)
        succeeded |= ~over & [info["true_success"] for info in infos]
        over |= ended
    return succeeded


def collect(options: argparse.Namespace, scorer: FrameScorer, policy: BaseAlgorithm, folder: Path, seed: int) -> None:
    """Store an episode of each environment in `folder/positive` or `folder/negative`."""
    env = environments(options, scorer, seed, DEMONSTRATION)
    folders = (folder / "positive", folder / "negative")
    collector = RewardDataCollector(env, *folders, scorer.config.image_keys, environment=options.env)
    with closing(StableBaselinesEnv(collector)) as adapted:
        play(adapted, policy)
        for i in range(options.episodes):
            collector.discard(i)  # the beginning of another episode


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--env", default="Acrobot-v1")
    parser.add_argument("--success", help="as of `vlmrm frames collect`")
    parser.add_argument("--source", nargs="+", choices=("learned", "success"), default=["learned"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=40_960, help="of all environments together")
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--max-steps", type=int, default=300, help="of an episode, in the simulator's steps")
    parser.add_argument("--action-repeat", type=int, default=4, help="the simulator's steps for each of the policy")
    parser.add_argument("--episodes", type=int, default=50, help="of an evaluation")
    parser.add_argument("--episodes-dir", type=Path)
    parser.add_argument("--accept-unqualified", action="store_true")
    options = parser.parse_args(words)
    keys = {"checkpoint_path": options.checkpoint, "accept_unqualified": options.accept_unqualified}
    options.reward = RewardModelSettings(**keys)
    scorer = FrameScorer.open(options.reward)
    lines = ["| reward | seed | true success | random actions | rewarded steps | of them false | missed |"]
    lines.append("|---" * 7 + "|")
    for source in options.source:
        for seed in options.seeds:
            found = train(options, scorer, source, seed)
            cells = [source, str(seed), f"{found['success']:.0%}", f"{found['random']:.0%}"]
            cells += [f"{found[name]:,}" if name in found else "" for name in COUNTS]
            lines.append(f"| {' | '.join(cells)} |")
    say("\n".join(lines))


if __name__ == "__main__":
    run(main)
