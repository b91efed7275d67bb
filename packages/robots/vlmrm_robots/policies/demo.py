"""`vlmrm frames demo`: a policy for Acrobot whose only reward is a classifier of frames, from collection to PPO."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from vlmrm.files import make_folder, write_json
from vlmrm.logs import say
from vlmrm.settings import load_file, validate
from vlmrm_robots.frames.checkpoint import read_config
from vlmrm_robots.frames.collecting import collect, summarise
from vlmrm_robots.frames.settings import CollectSettings, RLSettings, TrainSettings
from vlmrm_robots.frames.training import train_classifier
from vlmrm_robots.policies.comparison import write_comparison
from vlmrm_robots.policies.training import train_policies

CONFIG = Path(__file__).parents[1] / "demo_configs" / "frames_rl.yaml"
CHECKPOINT = "reward_model.safetensors"
EPISODES, FAILURES, EPOCHS = 40, 25, 4
TARGET_FPR = 0.002  # a policy searches for false positives, and most frames are failures
REPORT = """
What happened: a classifier of single frames learned when Acrobot's tip is above the line. On held-out episodes,
{validation_frames:,.0f} frames of which {validation_successes:,.0f} are successes, its AUC is {auc:.4f}, its
precision {precision:.1%} and its recall {recall:.1%}.
PPO then had that classifier's reward alone, and episodes that do not end at success, so nothing else revealed a
success. On {episodes} new episodes it truly succeeds in {true_success_rate:.0%}; random actions succeed in \
{random_success_rate:.0%}.
{rewarded:,} steps of its training were rewarded, {false_positives:,} of them without a success ({share}); {missed:,} \
successes went without a reward.

  success over steps    {folder}/rl/comparison.png
  each evaluation       {folder}/rl/comparison.csv
  these numbers         {folder}/summary.json

It took {wall_seconds:.0f} s. One seed says little: `python -m benchmarks.frames_rl` runs three.
"""


def run_demo(output: Path, seed: int = 0) -> dict[str, Any]:
    """Run the demo in `output`, and return the figures of its summary.json."""
    started = time.perf_counter()
    settings = policy_settings(output, output / CHECKPOINT, seeds=[seed], sources=["learned"])
    make_folder(output)
    checkpoint = classifier(output, seed)
    say(f"training PPO for {settings.total_steps:,} steps with the classifier's reward, {checkpoint}")
    [run] = train_policies(settings)
    write_comparison([run], settings)
    metrics, counts = read_config(checkpoint).metrics, run.counts.figures()
    summary = {
        **{
            name: metrics[name] for name in ("auc", "precision", "recall", "validation_frames", "validation_successes")
        },
        "random_success_rate": run.random_success_rate,
        "true_success_rate": run.final,
        **{name: counts[name] for name in ("rewarded", "false_positives", "false_positive_share", "missed")},
        "wall_seconds": round(time.perf_counter() - started, 1),
    }
    write_json(output / "summary.json", summary)
    share = "none" if run.counts.false_positive_share is None else f"{run.counts.false_positive_share:.1%}"
    say(REPORT.format(**summary, share=share, folder=output, episodes=settings.evaluation_episodes))
    return summary


def classifier(
    output: Path, seed: int, episodes: int = EPISODES, failures: int = FAILURES, epochs: int = EPOCHS
) -> Path:
    """Return the checkpoint of a classifier of Acrobot's frames, trained in `output` unless it is there."""
    checkpoint = output / CHECKPOINT
    if checkpoint.is_file():
        say(f"using {checkpoint} of an earlier demo")
        return checkpoint
    data: dict[str, Any] = {"positive_dir": output / "data" / "positive", "negative_dir": output / "data" / "negative"}
    reward = {"collect_data": True, "data_collection": data}
    # Of random actions, for failed episodes: without those held out, nothing bounds how often failure is rewarded.
    for number, (policy, count) in enumerate((("scripted", episodes), ("random", failures))):
        content = {"env": "Acrobot-v1", "policy": policy, "episodes": count, "seed": 2 * seed + number}
        say(summarise(collect(validate(CollectSettings, {**content, "reward": reward}, "the demo"))))
    partial = output / "reward_model.partial.safetensors"  # which an interrupted training leaves
    options = {"epochs": epochs, "batch_size": 64, "lr": 3e-4, "target_fpr": TARGET_FPR, "seed": seed}
    train_classifier(TrainSettings(output_checkpoint=partial, **data, **options))
    partial.replace(checkpoint)
    return checkpoint


def policy_settings(output: Path, checkpoint: Path, accept_unqualified: bool = False, **changes: Any) -> RLSettings:
    """Return the settings in `CONFIG`, with this classifier and `changes`."""
    content = load_file(CONFIG)
    content["reward"]["reward_model"] |= {"checkpoint_path": checkpoint, "accept_unqualified": accept_unqualified}
    return validate(RLSettings, {**content, "output_dir": output / "rl", **changes}, CONFIG.name)
