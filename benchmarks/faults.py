"""Faults of a reward in TRL's own GRPO: what they do to the advantages; drives/rounds.py tells how long they take.

A tiny policy with a learning rate of 0 and a new seed before each step writes the same completions in every step, and
each step's reward fails in its own way for a share of them, which does not depend on their rewards. Rewards have the
mean -3, as logits may, so that a missing one that became 0 would be paid. Two figures tell of a step's advantages:

- `bias_failed`: the mean advantage of the completions that failed. As faults strike whatever the reward would have
  been, the expected advantage of these completions without faults is 0.
- `bias_others`: the mean over all others of their advantage less that in the step without faults. Its own sampling
  error is √(share / (1 - share) / N) for N completions.

A reward that is wrong but plausible, another completion's or a best grade for all, cannot be told sample by sample,
and nothing can keep it out of the advantages. The metrics of a round tell of it: `held_out`, the correlation with a
reward that trains nothing, and `saturation`, the share at one end of the scale.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import product
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch

from benchmarks import harness, runs
from benchmarks.harness import Row, row
from vlmrm.adapters.trl_reward import TRLReward, TRLRewardSet
from vlmrm.errors import RowError
from vlmrm.modeling import make_tiny
from vlmrm.rewards import PointwiseRewardModel, RewardModelOutput, RewardSet

GROUP = 8
SHARES = (0.01, 0.1, 0.5)
FAULTS = ("down", "slow", "nan", "type", "off_scale")
TELLING = {"shuffled": "held_out", "stuck": "saturation"}  # the metric that tells of a fault that is plausible
SCORER_FAULTS = ("down", "nan", "type")  # what a scorer's row can be; an exception of a scorer ends the run
BIAS = 0.05
COMPLETIONS = 2048
LATE = 1.0  # seconds of the deadline that a slow reward misses
SCALE = [-20.0, 20.0]  # of the rewards
BEST = 5.0
TOLD = 0.8  # the least share of the faults that a metric must show

RewardFunction = Callable[..., list[float | None]]


def fraction(purpose: str, prompt: Any, response: Any) -> float:
    """Return a number in (0, 1) of a completion and a purpose, as good as random."""
    digest = blake2b(f"{purpose} {prompt} {response}".encode(), digest_size=6).digest()
    return (int.from_bytes(digest, "big") + 0.5) / 2**48


class Fragile(PointwiseRewardModel):
    """A reward of the mean -3 that fails for `share` of the completions, as `fault` says."""

    required_fields = ("prompt", "response")
    options = ("fault", "share")
    released = threading.Event()  # ends the calls that are slow

    def __call__(self, prompt: Sequence[Any], response: Sequence[Any], **_: Any) -> RewardModelOutput:  # ty: ignore[invalid-method-override]
        rewards: list[Any] = []
        failures: dict[int, str] = {}
        for position, pair in enumerate(zip(prompt, response, strict=True)):
            rewards.append(logit(*pair))
            if fraction("fault", *pair) >= self.config.share:
                continue
            match self.config.fault:
                case "down":
                    failures[position] = "the judge is away"
                case "slow":
                    self.released.wait(60)
                case "nan":
                    rewards[-1] = float("nan")
                case "type":
                    rewards[-1] = "N/A"
                case "off_scale":
                    rewards[-1] = 1e6
                case "shuffled":
                    rewards[-1] = logit(*pair, purpose="another's reward")
                case "stuck":
                    rewards[-1] = BEST
        return RewardModelOutput(rewards, failures=failures)


class FragileScorer:
    """The same as a `Scorer`, of one's own."""

    def __init__(self, fault: str, share: float):
        self.fault, self.share = fault, share

    def score_each(self, conversations: Sequence[Any]) -> list[Any]:
        broken = {"down": RowError("the picture is broken"), "nan": float("nan"), "type": "N/A"}
        scores = []
        for conversation in conversations:
            pair = [message.text for message in conversation.messages]
            failed = fraction("fault", *pair) < self.share
            scores.append(broken[self.fault] if failed else logit(*pair))
        return scores


def logit(prompt: Any, response: Any, purpose: str = "reward") -> float:
    return -3.0 + NormalDist().inv_cdf(fraction(purpose, prompt, response))


def fragile(fault: str, share: float, size: int) -> TRLRewardSet:
    """Return a set of one reward that fails; a slow one has a thread for each completion, so that none waits."""
    config = {"name": "fragile", "reward_model": f"{__name__}.Fragile", "on_failure": "mask", "valid": SCALE}
    config |= {"fault": fault, "share": share, "device": "cpu"}
    if fault == "slow":
        config |= {"async_reward": True, "num_workers": size, "batch_size": 1, "deadline": LATE}
    return TRLRewardSet(config, GROUP)


@dataclass
class Step:
    """A step of GRPO: prompt and completion of each sample, rewards as TRL has them and its advantages, [N] each, and
    the seconds that it waited for the rewards."""

    completions: list[tuple[str, str]]
    rewards: np.ndarray
    advantages: np.ndarray
    seconds: float

    def failed(self, share: float) -> np.ndarray:
        """Return which completions fail at a share: [N]."""
        return np.array([fraction("fault", *pair) < share for pair in self.completions])


def grpo(folder: Path, functions: Sequence[RewardFunction], size: int) -> list[Step]:
    """Return a step of TRL's GRPOTrainer for each reward function, all of the same completions.

    Raises:
        AssertionError: when the completions differ.
    """
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    steps: list[Step] = []

    def reward(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        started = time.perf_counter()
        values = functions[len(steps)](prompts, completions, **columns)
        seconds = time.perf_counter() - started
        pairs = [(_text(prompt), _text(completion)) for prompt, completion in zip(prompts, completions, strict=True)]
        numbers = np.array([np.nan if value is None else value for value in values])
        steps.append(Step(pairs, numbers, np.zeros(0), seconds))
        return values

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch.manual_seed(0)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            steps[-1].advantages = np.array(trainer._logs["advantages"])
            Fragile.released.set()
            Fragile.released.clear()

    rows = [{"prompt": [{"role": "user", "content": f"Question {n}?"}]} for n in range(size // GROUP)]
    trainer = GRPOTrainer(
        str(make_tiny(folder / "policy")),
        args=GRPOConfig(
            output_dir=str(folder / "grpo"),
            per_device_train_batch_size=size,
            num_generations=GROUP,
            max_completion_length=3,
            max_steps=len(functions),
            learning_rate=0.0,
            shuffle_dataset=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
        ),
        reward_funcs=[reward],
        train_dataset=Dataset.from_list(rows),
        callbacks=[Steps()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    assert len(steps) == len(functions), "a round was lost"
    assert all(step.completions == steps[0].completions for step in steps), "the completions differ between steps"
    return steps


def _text(messages: Any) -> str:
    content = messages[0]["content"]
    return content if isinstance(content, str) else content[-1]["text"]


def biases(clean: Step, step: Step, share: float) -> dict[str, float]:
    """Return the figures of this module for one step."""
    failed = step.failed(share)
    others = ~failed
    kept = np.polyfit(clean.advantages[others], step.advantages[others], 1)[0]
    return {
        "failed": int(failed.sum()),
        "bias_failed": float(step.advantages[failed].mean()),
        "bias_others": float((step.advantages - clean.advantages)[others].mean()),
        "slope": float(kept),
        "correlation": float(np.corrcoef(clean.advantages[others], step.advantages[others])[0, 1]),
    }


def measure(options: argparse.Namespace) -> list[Row]:
    size, shares = (64, (0.5,)) if options.quick else (COMPLETIONS, SHARES)
    cases = [(fault, share) for fault in FAULTS for share in shares]
    scorer_cases = [(fault, share) for fault in SCORER_FAULTS for share in shares]
    functions: list[RewardFunction] = [fragile("none", 0.0, size), *(fragile(*case, size) for case in cases)]
    functions += [TRLReward(FragileScorer(*case)) for case in scorer_cases]
    with runs.workplace() as folder:
        clean, *steps = grpo(folder, functions, size)
        names = [*(f"set_{fault}_{share:g}" for fault, share in cases),
                 *(f"scorer_{fault}_{share:g}" for fault, share in scorer_cases)]  # fmt: skip
        rows = []
        for name, step, (_, share) in zip(names, steps, [*cases, *scorer_cases], strict=True):
            figures = biases(clean, step, share)
            worst = max(abs(figures["bias_failed"]), abs(figures["bias_others"]))
            rows.append(row(name, worst, "of bias", at_most=BIAS, **figures, seconds=step.seconds))
        rows += [telling(*case, clean.completions) for case in product(TELLING, shares)]
        return rows


def telling(fault: str, share: float, completions: Sequence[tuple[str, str]]) -> Row:
    """Return the share of plausible faults that the metric shows, over the share that there is."""
    common = {"reward_model": f"{__name__}.Fragile", "device": "cpu"}
    proxy = {"name": "proxy", "fault": fault, "share": share, **common}
    truth = {"name": "truth", "fault": "none", "share": 0.0, "weight": 0.0, **common}
    prompts, responses = (list(column) for column in zip(*completions, strict=True))
    groups = [number // GROUP for number in range(len(prompts))]
    metrics = RewardSet([proxy, truth])(prompt=prompts, response=responses, groups=groups).metrics()
    struck = np.mean([fraction("fault", *pair) < share for pair in completions])
    shown = 1 - metrics["rewards/truth/held_out"] if fault == "shuffled" else metrics["rewards/proxy/saturation"]
    return row(f"{fault}_{share:g}", float(shown / struck), f"of the faults, by {TELLING[fault]}", at_least=TOLD)


if __name__ == "__main__":
    harness.main("faults", measure, __doc__)
