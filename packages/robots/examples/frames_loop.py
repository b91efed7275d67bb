"""Trains a classifier of frames and a policy in rounds, until the policy's own episodes bear the classifier out.

python packages/robots/examples/frames_loop.py packages/robots/examples/frames_loop.yaml --rounds 2 --train.epochs 8

A round trains a classifier on all episodes so far and, if it qualifies, a policy with its reward alone. Episodes of
that policy show how often it is rewarded without a success. Where that is too often, they join the data with the
simulator's labels, and the next round begins anew. A round's folder has its `data`, complete before the round begins,
its classifier, its policy (`rl`) and that policy's `episodes`. loop.md and loop.json in `output_dir` have the table of
rounds. The program exits with 6 if no round holds, and goes on where it was interrupted. Words after the file are
keys of it and their values in YAML, with a dot between a block and its key.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from vlmrm.cli import run
from vlmrm.data.comparisons import data_fingerprint
from vlmrm.errors import BelowThreshold, ConfigError
from vlmrm.files import make_folder, write_file, write_json
from vlmrm.logs import say, start_log
from vlmrm.settings import did_you_mean, load_file, validate
from vlmrm_robots.frames.checkpoint import load_classifier, read_config
from vlmrm_robots.frames.collecting import collect, summarise
from vlmrm_robots.frames.evaluation import evaluate
from vlmrm_robots.frames.qualification import episodes_needed, upper_bound
from vlmrm_robots.frames.settings import (
    IMAGE_KEY,
    IMAGE_SIZE,
    CollectSettings,
    Crop,
    EnvironmentSettings,
    RLSettings,
    Size,
    TrainSettings,
    check_same,
)
from vlmrm_robots.frames.training import train_classifier
from vlmrm_robots.policies.training import ALGORITHMS, episodes_folder, train_policies
from vlmrm_robots.trajectories.trajectory import trajectory_paths

LABELS = ("positive", "negative")
# What the loop decides itself of the blocks `train` and `policy`.
OWN = {
    "train": {
        *("positive_dir", "negative_dir", "output_checkpoint", "image_key", "image_size", "seed"),
        *("max_false_fires", "min_precision"),
    },
    "policy": {"env", "env_options", "success", "sources", "seeds", "reward", "output_dir", "episodes_dir"},
}


class LoopSettings(EnvironmentSettings):
    """Rounds of a classifier and a policy with its reward, each measured on the policy's episodes.

    `env`, `env_options`, `success`, `image_keys` and `crop` are those of `vlmrm frames collect`, and `demonstrator` is
    its `policy`; `train`, `policy` and `reward_model` are as elsewhere. With `accept_unqualified` a classifier that
    does not qualify teaches a policy too; its round does not hold.
    """

    demonstrator: str = "scripted"
    rounds: int = Field(3, ge=1)  # at most
    episodes: int = Field(40, ge=1)  # of the demonstrator, at first
    random_episodes: int = Field(25, ge=0)  # of random actions, at first
    max_steps: int = Field(200, ge=1)  # of those
    image_keys: list[str] = Field(default_factory=lambda: [IMAGE_KEY], min_length=1)
    image_size: Size = IMAGE_SIZE
    crop: Crop = Field(default_factory=dict)  # as `data_collection` has it
    min_precision: float = Field(0.9, gt=0, lt=1)  # of the rewards of a policy's episodes: 95 % sure not to be less
    max_false_fires: float = Field(0.5, gt=0, lt=1)  # share of failed episodes that are rewarded: 95 % sure
    min_success: float = Field(0.9, ge=0)  # times that of the same training with the true success as the reward
    seed: int = Field(0, ge=0)
    train: dict[str, Any] = Field(default_factory=dict)
    policy: dict[str, Any] = Field(default_factory=dict)
    reward_model: dict[str, Any] = Field(default_factory=dict)
    output_dir: Path = Path("./frames_loop")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a classifier and a policy in rounds.")
    parser.add_argument("config", type=Path, help="YAML such as packages/robots/examples/frames_loop.yaml")
    parser.add_argument("keys", nargs=argparse.REMAINDER, metavar="--key value", help="of the file, to override it")
    given = parser.parse_args(words)
    settings = validate(LoopSettings, overridden(load_file(given.config), given.keys), str(given.config))
    start_log("frames_loop")
    if reason := run_loop(settings)[-1]["reason"]:
        raise BelowThreshold(f"no round of {settings.output_dir} holds: {reason}.")


def overridden(content: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Return `content` with the keys that the words `--key value` and `--block.key value` give."""
    for number in range(0, len(words), 2):
        name, text = words[number], words[number + 1 : number + 2]
        if not name.startswith("--") or not text:
            raise ConfigError(f"{name} is no key with a value: keys are given as --key value.")
        *path, key = name.removeprefix("--").split(".")
        block = content
        for part in path:
            block[part] = block.get(part) or {}  # a block without keys is None in YAML
            if not isinstance(block := block[part], dict):
                raise ConfigError(f"{part} is {block!r}: it has no key {key}.")
        try:
            block[key] = yaml.safe_load(text[0])
        except yaml.YAMLError as error:
            raise ConfigError(f"the value of {name} is not valid YAML: {text[0]}") from error
    return content


def run_loop(settings: LoopSettings) -> list[dict[str, Any]]:
    """Run rounds until one holds, and write loop.json and loop.md; an interrupted loop goes on where it was.

    Each has its `episodes`, its `policy`, which is None if the classifier did not qualify, its `reference`, the true
    success rate with the true success as the reward where that decides something, and the `reason` why it does not
    hold.
    """
    for name, own in OWN.items():
        if taken := sorted(own & set(getattr(settings, name))):
            raise ConfigError(f"{name} has {', '.join(taken)}, which the loop itself decides: leave it out.")
    first = Round(settings, 1)
    first.training()  # so that a typo is found at once
    check_hyperparameters(first.policy())
    kept, now = (
        settings.output_dir / "settings.json",
        settings.model_dump(mode="json", exclude={"rounds", "output_dir"}),
    )
    if kept.exists():
        refusal = f"{settings.output_dir} holds a loop with {{}}: choose another output_dir."
        check_same(json.loads(kept.read_text(encoding="utf-8")), now, refusal)
    make_folder(settings.output_dir)
    first.demonstrate()
    write_json(kept, now)
    rounds: list[dict[str, Any]] = []
    for number in range(1, settings.rounds + 1):
        one = Round(settings, number)
        one.gather()
        rounds.append(one.run())
        write_json(settings.output_dir / "loop.json", {"rounds": rounds})
        write_file(settings.output_dir / "loop.md", markdown(rounds))
        say(markdown(rounds))
        if rounds[-1]["reason"] is None or rounds[-1]["policy"] is None:  # or there are no episodes to learn from
            break
    return rounds


def check_hyperparameters(settings: RLSettings) -> None:
    """Raise ConfigError for a hyperparameter that no algorithm in question has; no environment is made for it."""
    algorithms = [settings.algorithm] if settings.algorithm else list(ALGORITHMS)
    known = {name for algorithm in algorithms for name in inspect.signature(ALGORITHMS[algorithm]).parameters}
    for name in sorted(set(settings.hyperparameters) - known):
        hint = did_you_mean(name, known, f": {' and '.join(algorithms)} of Stable-Baselines3 have none of that name.")
        raise ConfigError(f"unknown hyperparameter {name}{hint}")


@dataclass(frozen=True)
class Round:
    """A round's folders, and how its classifier and its policy are trained."""

    settings: LoopSettings
    number: int

    @property
    def folder(self) -> Path:
        return self.settings.output_dir / f"round-{self.number}"

    @property
    def checkpoint(self) -> Path:
        return self.folder / "reward_model.safetensors"

    def data(self, label: str) -> Path:
        return self.folder / "data" / label

    def episodes(self, label: str) -> Path:
        """Return the folder of the episodes that its policy played afterwards."""
        return episodes_folder(self.policy(), "learned", self.settings.seed) / label

    def training(self) -> TrainSettings:
        """Return how the classifier is trained, on all episodes so far."""
        shared = self.settings.model_dump(include={"image_size", "seed", "max_false_fires", "min_precision"})
        return TrainSettings(
            **{f"{label}_dir": self.data(label) for label in LABELS},
            output_checkpoint=self.checkpoint,
            image_key=tuple(self.settings.image_keys),
            **shared,
            **self.settings.train,
        )

    def policy(self) -> RLSettings:
        """Return how the policy is trained, with the classifier's reward alone."""
        model = {**self.settings.reward_model, "checkpoint_path": self.checkpoint}
        reward = {"use_reward_model": True, "reward_model": model}
        return self._policy("learned", self.folder / "rl", reward, episodes_dir=self.folder / "episodes")

    def reference(self) -> RLSettings:
        """Return how the same policy is trained with the true success as its reward, once for all rounds."""
        return self._policy("success", self.settings.output_dir / "reference", self._frames())

    def _policy(self, source: str, output: Path, reward: dict[str, Any], **more: Any) -> RLSettings:
        own = {**self._environment(), "sources": [source], "seeds": [self.settings.seed], "output_dir": output}
        return validate(RLSettings, {**self.settings.policy, **own, "reward": reward, **more}, "policy")

    def _environment(self) -> dict[str, Any]:
        return self.settings.model_dump(include=set(EnvironmentSettings.model_fields))

    def _frames(self) -> dict[str, Any]:
        """Return which frames are shown, as the block `reward` says it."""
        data = self.settings.model_dump(include={"image_keys", "crop"})
        return {"data_collection": data, "reward_model": {"image_size": self.settings.image_size}}

    def demonstrate(self) -> None:
        """Collect the first episodes: the demonstrator's, and random ones."""
        settings, reward = self.settings, self._frames()
        reward["collect_data"] = True
        reward["data_collection"] |= {f"{label}_dir": self.data(label) for label in LABELS}
        counts = ((settings.demonstrator, settings.episodes), ("random", settings.random_episodes))
        for number, (policy, episodes) in enumerate(counts):
            if episodes:
                content = {**self._environment(), "policy": policy, "episodes": episodes, "reward": reward}
                content |= {"seed": 2 * settings.seed + number, "max_steps": settings.max_steps}
                say(summarise(collect(validate(CollectSettings, content, "the loop"))))

    def gather(self) -> None:
        """Make the data of a later round: those of the round before, and the episodes of its policy."""
        if self.number == 1 or (self.folder / "data").exists():
            return
        before, partial = Round(self.settings, self.number - 1), self.folder / "data.partial"
        shutil.rmtree(partial, ignore_errors=True)
        for label in LABELS:
            make_folder(partial / label)
            for path in trajectory_paths(before.data(label)) + trajectory_paths(before.episodes(label)):
                try:
                    os.link(path, partial / label / path.name)
                except OSError:  # the file system has no links
                    shutil.copyfile(path, partial / label / path.name)
        partial.rename(self.folder / "data")

    def run(self) -> dict[str, Any]:
        """Train classifier and policy, measure them, and return the outcome as `run_loop` does."""
        training, policy, settings = self.training(), self.policy(), self.settings
        if self.checkpoint.is_file() and not Path(f"{self.checkpoint}.training").exists():  # finished before
            config = read_config(self.checkpoint)
            if config.data_fingerprint != data_fingerprint([str(training.positive_dir), str(training.negative_dir)]):
                raise ConfigError(
                    f"{self.checkpoint} was trained on other episodes than {training.positive_dir.parent} has now: "
                    f"restore them, or delete {self.folder} and the later rounds."
                )
        else:
            config = train_classifier(training).config
        reasons = [] if config.qualified else [f"the classifier does not qualify: {config.unqualified_because}"]
        outcome = {"episodes": len(config.episodes), "policy": None, "reference": None}
        if reasons and not policy.reward.reward_model.accept_unqualified:
            return outcome | {"reason": reasons[0]}
        [run] = train_policies(policy)
        folders = [folder for label in LABELS if trajectory_paths(folder := self.episodes(label))]
        measured = evaluate(load_classifier(self.checkpoint), folders).metrics
        figures = {
            "true_success_rate": run.final,
            "rewarded": run.counts.rewarded,
            "false_positives": run.counts.false_positives,
            "precision": None if isnan(measured["precision"]) else measured["precision"],
            **{name: measured[name] for name in ("precision_low", "failed_episodes", "false_fires")},
        }
        reasons += doubts(settings, figures)
        if not reasons and settings.min_success:  # otherwise nothing depends on it
            [reference] = train_policies(self.reference())
            outcome["reference"] = reference.final
            if run.final < settings.min_success * reference.final:
                reasons.append(
                    f"its policy succeeds in {run.final:.1%} of episodes, less than {settings.min_success:g} times "
                    f"the {reference.final:.1%} of one with the true success as its reward"
                )
        return outcome | {"policy": figures, "reason": ", and ".join(reasons) or None}


def doubts(settings: LoopSettings, figures: Mapping[str, Any]) -> list[str]:
    """Return why the rewards of a policy's episodes are not to be believed; nothing if they are."""
    reasons = []
    if figures["precision"] is None:
        reasons.append("its policy's episodes are never rewarded")
    elif figures["precision_low"] < settings.min_precision:
        reasons.append(
            f"{figures['precision']:.1%} of its policy's rewards are for successes, and perhaps no more than "
            f"{figures['precision_low']:.1%}, where min_precision is {settings.min_precision:.0%}"
        )
    fires, failed = int(figures["false_fires"]), int(figures["failed_episodes"])
    # Few failures of a good policy show nothing.
    if failed >= episodes_needed(settings.max_false_fires) and (
        (high := upper_bound(fires, failed)) > settings.max_false_fires
    ):
        reasons.append(
            f"{fires} of {failed} failed episodes are rewarded, perhaps {high:.0%} of all such, where "
            f"max_false_fires is {settings.max_false_fires:.0%}"
        )
    return reasons


def markdown(rounds: list[dict[str, Any]]) -> str:
    """Return the rounds as a table."""
    lines = [
        "| round | episodes | true success | with it as the reward | rewarded steps | of them false "
        "| false afterwards | failed episodes rewarded | verdict |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for number, one in enumerate(rounds, 1):
        cells = [""] * 6
        if policy := one["policy"]:
            cells = [
                f"{policy['true_success_rate']:.0%}",
                "" if one["reference"] is None else f"{one['reference']:.0%}",
                f"{policy['rewarded']:,}",
                f"{policy['false_positives']:,}",
                "no reward" if policy["precision"] is None else f"{1 - policy['precision']:.1%}",
                f"{policy['false_fires']:.0f} of {policy['failed_episodes']:.0f}",
            ]
        lines.append(f"| {number} | {one['episodes']} | {' | '.join(cells)} | {one['reason'] or 'holds'} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run(main)
