"""`vlmrm frames loop`: a classifier and a policy in rounds, until the policy's own episodes bear the classifier out.

A round trains a classifier on all episodes so far and, if it qualifies, a policy with its reward alone. Episodes of
that policy, which no classifier has seen, show how often it is rewarded without a success. Where that is too often,
they join the data with the simulator's labels, and the next round begins with both anew.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from math import isnan
from pathlib import Path
from typing import Any

from vlmrm.errors import ConfigError
from vlmrm.files import make_folder, write_file, write_json
from vlmrm.frames.checkpoint import load_classifier, read_config
from vlmrm.frames.collecting import collect, summarise
from vlmrm.frames.evaluation import evaluate
from vlmrm.frames.qualification import episodes_needed, upper_bound
from vlmrm.frames.rl import PolicyRun, check_hyperparameters, train_policies
from vlmrm.frames.settings import CollectSettings, EnvironmentSettings, LoopSettings, RLSettings, TrainSettings
from vlmrm.frames.training import train_classifier
from vlmrm.frames.trajectory import trajectory_paths
from vlmrm.logs import say
from vlmrm.settings import validate

OWN = {"positive_dir", "negative_dir", "output_checkpoint", "image_key", "image_size", "seed", "max_false_fires"}
OWN |= {"min_precision"}
OWN_POLICY = {"env", "env_options", "success", "sources", "seeds", "reward", "output_dir", "episodes_dir"}
LABELS = ("positive", "negative")
CHECKPOINT = "reward_model.safetensors"


@dataclass(frozen=True)
class PolicyFigures:
    """The rewards of a policy: steps of its training, then its own episodes, measured by frame and by episode."""

    true_success_rate: float
    rewarded: int
    false_rewards: int  # rewarded steps without a success
    precision: float  # of the episodes afterwards
    precision_low: float
    failed_episodes: int
    false_fires: int  # failed episodes that were rewarded


@dataclass(frozen=True)
class Round:
    """A classifier, trained on `episodes`, and the policy that it taught; `reason` says why neither is believed."""

    episodes: int
    reason: str | None
    policy: PolicyFigures | None = None  # None if the classifier did not qualify


def run_loop(settings: LoopSettings) -> list[Round]:
    """Run rounds until one holds, and write loop.json and loop.md; an interrupted loop goes on where it was.

    Raises:
        ConfigError: for settings that contradict each other, or that the loop decides itself.
    """
    for name, own in (("train", OWN), ("policy", OWN_POLICY)):
        if taken := sorted(own & set(getattr(settings, name))):
            raise ConfigError(f"{name} has {', '.join(taken)}, which the loop itself decides: leave it out.")
    # So that a typo is found at once.
    classifier_settings(settings, 1)
    check_hyperparameters(policy_settings(settings, 1))
    make_folder(settings.output_dir)
    say(summarise(collect(_collect_settings(settings, settings.demonstrator, settings.episodes, 2 * settings.seed))))
    if settings.random_episodes:
        say(summarise(collect(_collect_settings(settings, "random", settings.random_episodes, 2 * settings.seed + 1))))
    rounds: list[Round] = []
    for number in range(1, settings.rounds + 1):
        rounds.append(_round(settings, number))
        write_json(settings.output_dir / "loop.json", {"rounds": [asdict(one) for one in rounds]})
        write_file(settings.output_dir / "loop.md", markdown(rounds))
        say(markdown(rounds))
        if rounds[-1].reason is None or rounds[-1].policy is None:  # it holds, or there are no episodes to learn from
            break
        _add_episodes(settings, number)
    return rounds


def _round(settings: LoopSettings, number: int) -> Round:
    training = classifier_settings(settings, number)
    # One that an interrupted loop has finished is not trained again, on data that have grown since.
    finished = training.output_checkpoint.is_file() and not Path(f"{training.output_checkpoint}.training").exists()
    config = read_config(training.output_checkpoint) if finished else train_classifier(training).config
    if not config.qualified:
        return Round(len(config.episodes), f"the classifier does not qualify: {config.unqualified_because}")
    [run] = train_policies(policy_settings(settings, number))
    figures = _figures(settings, run, number)
    return Round(len(config.episodes), doubt(settings, figures), figures)


def _figures(settings: LoopSettings, run: PolicyRun, number: int) -> PolicyFigures:
    folder = _folder(settings, number)
    folders = [folder / "episodes" / label for label in LABELS]
    figures = evaluate(
        load_classifier(folder / CHECKPOINT), [path for path in folders if trajectory_paths(path)]
    ).metrics
    return PolicyFigures(
        run.final,
        run.counts.rewarded,
        run.counts.false_positives,
        figures["precision"],
        figures["precision_low"],
        int(figures["failed_episodes"]),
        int(figures["false_fires"]),
    )


def doubt(settings: LoopSettings, figures: PolicyFigures) -> str | None:
    """Return why the policy's rewards are not to be believed."""
    reasons = []
    if isnan(figures.precision):
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
    return ", and ".join(reasons) or None


def _add_episodes(settings: LoopSettings, number: int) -> None:
    """Copy the episodes of a round's policy into the data."""
    for label in LABELS:
        for path in trajectory_paths(_folder(settings, number) / "episodes" / label):
            shutil.copyfile(path, settings.output_dir / "data" / label / path.name)


def _environment(settings: LoopSettings) -> dict[str, Any]:
    return settings.model_dump(include=set(EnvironmentSettings.model_fields))


def _collect_settings(settings: LoopSettings, policy: str, episodes: int, seed: int) -> CollectSettings:
    data = {f"{label}_dir": settings.output_dir / "data" / label for label in LABELS}
    data |= settings.model_dump(include={"image_keys", "crop"})
    reward = {"collect_data": True, "data_collection": data, "reward_model": {"image_size": settings.image_size}}
    content = {**_environment(settings), "policy": policy, "episodes": episodes, "seed": seed, "reward": reward}
    return validate(CollectSettings, {**content, "max_steps": settings.max_steps}, "frames loop")


def classifier_settings(settings: LoopSettings, number: int) -> TrainSettings:
    """Return how the classifier of a round is trained, on all episodes so far."""
    return TrainSettings(
        **{f"{label}_dir": settings.output_dir / "data" / label for label in LABELS},
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
    checkpoint = classifier_settings(settings, number).output_checkpoint
    own = {
        **_environment(settings),
        "sources": ["learned"],
        "seeds": [settings.seed],
        "output_dir": _folder(settings, number) / "rl",
        "episodes_dir": _folder(settings, number) / "episodes",
        "reward": {
            "use_reward_model": True,
            "reward_model": {**settings.reward_model, "checkpoint_path": checkpoint},
        },
    }
    return validate(RLSettings, {**settings.policy, **own}, "frames loop: policy")


def _folder(settings: LoopSettings, number: int) -> Path:
    return settings.output_dir / f"round-{number}"


def markdown(rounds: list[Round]) -> str:
    """Return the rounds as a table."""
    lines = [
        "| round | episodes | true success | rewarded steps | of them false | false afterwards "
        "| failed episodes rewarded | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for number, one in enumerate(rounds, 1):
        cells = [""] * 5
        if policy := one.policy:
            share = f" ({policy.false_rewards / policy.rewarded:.1%})" if policy.rewarded else ""
            cells = [
                f"{policy.true_success_rate:.0%}",
                f"{policy.rewarded:,}",
                f"{policy.false_rewards:,}{share}",
                f"{1 - policy.precision:.1%}",
                f"{policy.false_fires} of {policy.failed_episodes}",
            ]
        lines.append(f"| {number} | {one.episodes} | {' | '.join(cells)} | {one.reason or 'holds'} |")
    return "\n".join(lines) + "\n"
