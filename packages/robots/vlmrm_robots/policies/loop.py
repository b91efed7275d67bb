"""`vlmrm frames loop`: a classifier and a policy in rounds, until the policy's own episodes bear the classifier out.

A round trains a classifier on all episodes so far and, if it qualifies, a policy with its reward alone. Episodes of
that policy show how often it is rewarded without a success. Where that is too often, they join the data with the
simulator's labels, and the next round begins anew. A round's folder has its `data`, complete before the round begins,
its classifier, its policy (`rl`) and that policy's `episodes`.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from math import isnan
from pathlib import Path
from typing import Any

from vlmrm.data.comparisons import data_fingerprint
from vlmrm.errors import ConfigError
from vlmrm.files import make_folder, write_file, write_json
from vlmrm.logs import say
from vlmrm.settings import validate
from vlmrm_robots.frames.checkpoint import load_classifier, read_config
from vlmrm_robots.frames.collecting import collect, summarise
from vlmrm_robots.frames.evaluation import evaluate
from vlmrm_robots.frames.qualification import episodes_needed, upper_bound
from vlmrm_robots.frames.settings import CollectSettings, EnvironmentSettings, LoopSettings, RLSettings, TrainSettings
from vlmrm_robots.frames.training import train_classifier
from vlmrm_robots.policies.training import check_hyperparameters, episodes_folder, train_policies
from vlmrm_robots.trajectories.trajectory import trajectory_paths

# What the loop decides itself of the blocks `train` and `policy`.
OWN = {
    "train": {"positive_dir", "negative_dir", "output_checkpoint", "image_key", "image_size", "seed"},
    "policy": {"env", "env_options", "success", "sources", "seeds", "reward", "output_dir", "episodes_dir"},
}
OWN["train"] |= {"max_false_fires", "min_precision"}
LABELS = ("positive", "negative")
CHECKPOINT = "reward_model.safetensors"
SETTINGS = "settings.json"
FREE = {"rounds", "output_dir"}  # settings with which a loop may go on


@dataclass(frozen=True)
class PolicyFigures:
    """The rewards of a policy: steps of its training, then its own episodes, measured by frame and by episode."""

    true_success_rate: float
    rewarded: int
    false_rewards: int  # rewarded steps without a success
    precision: float | None  # of the episodes afterwards; None if they are never rewarded
    precision_low: float
    failed_episodes: int
    false_fires: int  # failed episodes that were rewarded


@dataclass(frozen=True)
class Round:
    """A classifier, trained on `episodes`, and the policy that it taught; `reason` says why neither is believed."""

    episodes: int
    reason: str | None
    policy: PolicyFigures | None = None  # None if the classifier did not qualify, and was not accepted all the same
    reference: float | None = None  # true success rate with the true success as the reward; None if it decides nothing


def run_loop(settings: LoopSettings) -> list[Round]:
    """Run rounds until one holds, and write loop.json and loop.md; an interrupted loop goes on where it was."""
    for name, own in OWN.items():
        if taken := sorted(own & set(getattr(settings, name))):
            raise ConfigError(f"{name} has {', '.join(taken)}, which the loop itself decides: leave it out.")
    # So that a typo is found at once.
    classifier_settings(settings, 1)
    check_hyperparameters(policy_settings(settings, 1))
    make_folder(settings.output_dir)
    _keep_settings(settings)
    first = (settings.demonstrator, settings.episodes), ("random", settings.random_episodes)
    for number, (policy, episodes) in enumerate(first):
        if episodes:
            reward: dict[str, Any] = {"collect_data": True, **_frames(settings)}
            reward["data_collection"] |= {f"{label}_dir": _data(settings, 1, label) for label in LABELS}
            content = {**_environment(settings), "policy": policy, "episodes": episodes, "reward": reward}
            content |= {"seed": 2 * settings.seed + number, "max_steps": settings.max_steps}
            say(summarise(collect(validate(CollectSettings, content, "frames loop"))))
    rounds: list[Round] = []
    for number in range(1, settings.rounds + 1):
        if rounds:
            _gather(settings, number)
        rounds.append(_round(settings, number))
        write_json(settings.output_dir / "loop.json", {"rounds": [asdict(one) for one in rounds]})
        write_file(settings.output_dir / "loop.md", markdown(rounds))
        say(markdown(rounds))
        if rounds[-1].reason is None or rounds[-1].policy is None:  # it holds, or there are no episodes to learn from
            break
    return rounds


def _keep_settings(settings: LoopSettings) -> None:
    """Write the settings of a new loop; ConfigError if an earlier one in the folder has others.

    One that failed before its first episode was stored, such as by a typo, is none.
    """
    file = settings.output_dir / SETTINGS
    now = settings.model_dump(mode="json", exclude=FREE)
    begun = any(trajectory_paths(_data(settings, 1, label)) for label in LABELS)
    if not (file.exists() and begun):
        write_json(file, now)
    before = json.loads(file.read_text(encoding="utf-8"))
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            values = f"{name} {before.get(name)}, which is now {now.get(name)}"
            raise ConfigError(f"{settings.output_dir} holds a loop with {values}: choose another output_dir.")


def _round(settings: LoopSettings, number: int) -> Round:
    training = classifier_settings(settings, number)
    checkpoint = training.output_checkpoint
    if checkpoint.is_file() and not Path(f"{checkpoint}.training").exists():  # an interrupted loop finished it
        config = read_config(checkpoint)
        if config.data_fingerprint != data_fingerprint([str(training.positive_dir), str(training.negative_dir)]):
            raise ConfigError(
                f"{checkpoint} was trained on other episodes than {training.positive_dir.parent} has now: restore "
                f"them, or delete {_folder(settings, number)} and the later rounds."
            )
    else:
        config = train_classifier(training).config
    policy = policy_settings(settings, number)
    reasons = [] if config.qualified else [f"the classifier does not qualify: {config.unqualified_because}"]
    if reasons and not policy.reward.reward_model.accept_unqualified:
        return Round(len(config.episodes), reasons[0])
    [run] = train_policies(policy)
    folders = [folder for label in LABELS if trajectory_paths(folder := _episodes(settings, number, label))]
    measured = evaluate(load_classifier(checkpoint), folders).metrics
    figures = PolicyFigures(
        run.final,
        run.counts.rewarded,
        run.counts.false_positives,
        None if isnan(measured["precision"]) else measured["precision"],
        measured["precision_low"],
        int(measured["failed_episodes"]),
        int(measured["false_fires"]),
    )
    reasons += doubts(settings, figures)
    reference = None
    if not reasons and settings.min_success:  # otherwise nothing depends on it
        [reference_run] = train_policies(reference_settings(settings))
        reference = reference_run.final
        if run.final < settings.min_success * reference:
            reasons.append(
                f"its policy succeeds in {run.final:.1%} of episodes, less than {settings.min_success:g} times the "
                f"{reference:.1%} of one with the true success as its reward"
            )
    return Round(len(config.episodes), ", and ".join(reasons) or None, figures, reference)


def doubts(settings: LoopSettings, figures: PolicyFigures) -> list[str]:
    """Return why the policy's rewards are not to be believed; nothing if they are."""
    reasons = []
    if figures.precision is None:
        reasons.append("its policy's episodes are never rewarded")
    elif figures.precision_low < settings.min_precision:
        reasons.append(
            f"{figures.precision:.1%} of its policy's rewards are for successes, and perhaps no more than "
            f"{figures.precision_low:.1%}, where min_precision is {settings.min_precision:.0%}"
        )
    fires = upper_bound(figures.false_fires, figures.failed_episodes)
    # Few failures of a good policy show nothing.
    if figures.failed_episodes >= episodes_needed(settings.max_false_fires) and fires > settings.max_false_fires:
        reasons.append(
            f"{figures.false_fires} of {figures.failed_episodes} failed episodes are rewarded, perhaps {fires:.0%} of "
            f"all such, where max_false_fires is {settings.max_false_fires:.0%}"
        )
    return reasons


def _gather(settings: LoopSettings, number: int) -> None:
    """Make the data of a round: those of the round before, and the episodes of its policy."""
    data = _folder(settings, number) / "data"
    if data.exists():
        return
    partial = data.with_name("data.partial")
    shutil.rmtree(partial, ignore_errors=True)
    for label in LABELS:
        make_folder(partial / label)
        for folder in (_data(settings, number - 1, label), _episodes(settings, number - 1, label)):
            for path in trajectory_paths(folder):
                try:
                    os.link(path, partial / label / path.name)
                except OSError:  # the file system has no links
                    shutil.copyfile(path, partial / label / path.name)
    partial.rename(data)


def _environment(settings: LoopSettings) -> dict[str, Any]:
    return settings.model_dump(include=set(EnvironmentSettings.model_fields))


def classifier_settings(settings: LoopSettings, number: int) -> TrainSettings:
    """Return how the classifier of a round is trained, on all episodes so far."""
    return TrainSettings(
        **{f"{label}_dir": _data(settings, number, label) for label in LABELS},
        output_checkpoint=_folder(settings, number) / CHECKPOINT,
        image_key=tuple(settings.image_keys),
        image_size=settings.image_size,
        seed=settings.seed,
        max_false_fires=settings.max_false_fires,
        min_precision=settings.min_precision,
        **settings.train,
    )


def policy_settings(settings: LoopSettings, number: int) -> RLSettings:
    """Return how the policy of a round is trained, with its classifier's reward alone."""
    folder, own = (
        _folder(settings, number),
        {**_environment(settings), "sources": ["learned"], "seeds": [settings.seed]},
    )
    own |= {"output_dir": folder / "rl", "episodes_dir": folder / "episodes"}
    model = {**settings.reward_model, "checkpoint_path": folder / CHECKPOINT}
    own["reward"] = {"use_reward_model": True, "reward_model": model}
    return validate(RLSettings, {**settings.policy, **own}, "frames loop: policy")


def reference_settings(settings: LoopSettings) -> RLSettings:
    """Return how the same policy is trained with the true success as its reward, once for all rounds."""
    own = {**_environment(settings), "sources": ["success"], "seeds": [settings.seed]}
    own |= {"output_dir": settings.output_dir / "reference", "reward": _frames(settings)}
    return validate(RLSettings, {**settings.policy, **own}, "frames loop: policy")


def _frames(settings: LoopSettings) -> dict[str, Any]:
    """Return which frames are shown, as the block `reward` says it."""
    data = settings.model_dump(include={"image_keys", "crop"})
    return {"data_collection": data, "reward_model": {"image_size": settings.image_size}}


def _folder(settings: LoopSettings, number: int) -> Path:
    return settings.output_dir / f"round-{number}"


def _data(settings: LoopSettings, number: int, label: str) -> Path:
    return _folder(settings, number) / "data" / label


def _episodes(settings: LoopSettings, number: int, label: str) -> Path:
    return episodes_folder(policy_settings(settings, number), "learned", settings.seed) / label


def markdown(rounds: list[Round]) -> str:
    """Return the rounds as a table."""
    lines = [
        "| round | episodes | true success | with it as the reward | rewarded steps | of them false "
        "| false afterwards | failed episodes rewarded | verdict |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for number, one in enumerate(rounds, 1):
        cells = [""] * 6
        if policy := one.policy:
            share = f" ({policy.false_rewards / policy.rewarded:.1%})" if policy.rewarded else ""
            cells = [
                f"{policy.true_success_rate:.0%}",
                "" if one.reference is None else f"{one.reference:.0%}",
                f"{policy.rewarded:,}",
                f"{policy.false_rewards:,}{share}",
                "no reward" if policy.precision is None else f"{1 - policy.precision:.1%}",
                f"{policy.false_fires} of {policy.failed_episodes}",
            ]
        lines.append(f"| {number} | {one.episodes} | {' | '.join(cells)} | {one.reason or 'holds'} |")
    return "\n".join(lines) + "\n"
