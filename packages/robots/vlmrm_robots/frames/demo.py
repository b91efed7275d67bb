"""`vlmrm frames demo`: a classifier of Acrobot's frames, from collection to the reward, measured against the truth."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from vlmrm.files import make_folder, write_json
from vlmrm.logs import say
from vlmrm.settings import validate
from vlmrm_robots.frames.checkpoint import load_classifier
from vlmrm_robots.frames.collecting import collect, summarise
from vlmrm_robots.frames.environments import make_environments
from vlmrm_robots.frames.evaluation import qualify_classifier, record
from vlmrm_robots.frames.frame_reward import FrameReward
from vlmrm_robots.frames.settings import CollectSettings, Limits, RewardModelSettings, TrainSettings
from vlmrm_robots.frames.simulators import SIMULATORS
from vlmrm_robots.frames.training import train_classifier
from vlmrm_robots.trajectories.trajectory import open_folder

ENV = "Acrobot-v1"
EPISODES = {"scripted": 40, "random": 25}  # without failed ones, nothing bounds how often failure is rewarded
EPOCHS = 4
ENVIRONMENTS, STEPS = 16, 200  # that are rewarded at the end
REPORT = """
What happened: a classifier of single frames learned when Acrobot's tip is above the line. On {new_episodes} episodes
that it was not trained on, its AUC is {auc:.4f}, its precision {precision:.1%} and its recall {recall:.1%}: {verdict}.
Then it rewarded others, each step by the frame of the state that it led to, as FrameReward rewards a policy in
training. Of {steps:,} steps {rewarded:,} were rewarded, {false_positives:,} of them without a success; {missed:,} of \
{successes:,}
successes went without a reward.

  the classifier        {checkpoint}
  these numbers         {folder}/summary.json

It took {wall_seconds:.0f} s. packages/robots/examples/frames_policy.py trains a policy with this reward alone.
"""


def run_demo(output: Path, seed: int = 0) -> dict[str, Any]:
    """Run the demo in `output`, where an interrupted one resumes, and return the figures of its summary.json."""
    started = time.perf_counter()
    make_folder(output)
    checkpoint = output / "reward_model.safetensors"
    data, new = (_episodes(output / name, number, seed) for number, name in enumerate(("data", "new_data")))
    if not checkpoint.is_file() or Path(f"{checkpoint}.training").exists():
        options: dict[str, Any] = {**data, "epochs": EPOCHS, "batch_size": 64, "lr": 3e-4, "seed": seed}
        train_classifier(TrainSettings(output_checkpoint=checkpoint, **options))
    loaded = load_classifier(checkpoint)
    evaluation = qualify_classifier(
        loaded, [file for folder in new.values() for file in open_folder(folder)], Limits()
    )
    record(evaluation, loaded, checkpoint)
    metrics = evaluation.metrics
    summary = {
        "new_episodes": sum(EPISODES.values()),
        **{name: metrics[name] for name in ("auc", "precision", "recall")},
        "unqualified_because": evaluation.reason,
        **rewarded_steps(checkpoint, seed),
        "wall_seconds": round(time.perf_counter() - started, 1),
    }
    write_json(output / "summary.json", summary)
    verdict = (
        f"it does not qualify as a reward, {evaluation.reason}" if evaluation.reason else "it qualifies as a reward"
    )
    say(REPORT.format(**summary, verdict=verdict, checkpoint=checkpoint, folder=output))
    return summary


def _episodes(folder: Path, number: int, seed: int) -> dict[str, Path]:
    """Collect the episodes of a folder unless they are there; return its two folders as settings name them."""
    folders = {f"{label}_dir": folder / label for label in ("positive", "negative")}
    reward = {"collect_data": True, "data_collection": folders}
    for policy, count in EPISODES.items():
        content = {"env": ENV, "policy": policy, "episodes": count, "seed": 3 * seed + number, "reward": reward}
        say(summarise(collect(validate(CollectSettings, content, "the demo"))))
    return folders


def rewarded_steps(checkpoint: Path, seed: int) -> dict[str, int]:
    """Return how many steps a scripted policy makes, and how many are rewarded with and without a true success."""
    envs = make_environments(ENV, ENVIRONMENTS, seed=3 * seed + 2, stop_at_success=False)
    settings = RewardModelSettings(checkpoint_path=checkpoint, accept_unqualified=True)
    policy: Callable[[Any], Any] = SIMULATORS[ENV].policy  # ty: ignore[invalid-assignment]
    paid, true = [], []
    with closing(FrameReward(envs, settings)) as rewarded:
        observations, _ = rewarded.reset()
        for _ in range(STEPS):
            observations, rewards, _, _, info = rewarded.step(policy(observations))
            paid.append(rewards > 0)
            true.append(info["success"])
    paid, true = np.array(paid), np.array(true, dtype=bool)
    return {
        "steps": paid.size,
        "successes": int(true.sum()),
        "rewarded": int(paid.sum()),
        "false_positives": int((paid & ~true).sum()),
        "missed": int((~paid & true).sum()),
    }
