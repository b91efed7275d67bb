"""What a reward model says of episodes, as labels or as progress.

The value-order correlation (VOC: Ma et al. 2024, Vision Language Models are In-Context Value Learners) of an episode
is Spearman's correlation of step and score. A model that only counts frames has 1 as well: so each episode is also
scored with its first frame in place of all, and with its frames shuffled.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit, log_expit
from scipy.stats import mannwhitneyu

from vlmrm.errors import ConfigError, DataError, RowError
from vlmrm.files import require_new_file, write_file
from vlmrm.measures.intervals import NAN, Estimate, Mean
from vlmrm.measures.statistics import spearman_within
from vlmrm.plugins import imported_function
from vlmrm.rewards.contract import GroupwiseRewardModel, RewardArguments
from vlmrm.rewards.registry import reward_arguments, reward_model_class
from vlmrm.rewards.reward_set import Models
from vlmrm.rewards.samples import reward_items
from vlmrm.scoring import load_scorer
from vlmrm.scoring.protocol import prefixes_of
from vlmrm_robots.trajectories.importing import import_episodes
from vlmrm_robots.trajectories.importing import summarise as summarise_import
from vlmrm_robots.trajectories.pictures import as_picture
from vlmrm_robots.trajectories.rows import spread_steps, task_of
from vlmrm_robots.trajectories.trajectory import Episode, Trajectory, TrajectoryFile, digest

TIED = 2**-18  # of the largest score: 32 times the precision of float32
PYTHON = "python:"
UNMARKED = re.compile(r"[\w.]+:[A-Za-z_]\w*")  # a function without it
Shown = Literal["scores", "repeated", "shuffled"]
CONTROLS: dict[Shown, str] = {"repeated": "their first frame repeated", "shuffled": "their frames shuffled"}


# A model of any kind -------------------------------------------------------------------------------------------------


class PrefixScorer(Protocol):
    """A model that scores an episode after each of its frames: the local and the remote scorer, and some rewards."""

    def score_prefixes(self, task: str, frames: Sequence[Any]) -> list[float]:
        """Return the score of each prefix of an episode, [T]."""
        ...


class RewardOfPrefixes:
    """Any reward of samples as a scorer of prefixes, each of which is a sample with frames as its answer."""

    def __init__(self, arguments: RewardArguments):
        self.name = arguments.name
        if issubclass(reward_model_class(str(arguments.reward_model)), GroupwiseRewardModel):
            raise ConfigError(f"reward {self.name} compares answers, and an episode has one: name a pointwise reward.")
        self.model = Models().reward(arguments).model

    def score_prefixes(self, task: str, frames: Sequence) -> list[float]:
        """Return the reward of each prefix, [T], as `PrefixScorer` does."""
        conversations = prefixes_of(task, frames)
        result = reward_items(self.model, conversations, range(len(conversations)))
        for index, reason in sorted(result.failures.items()):
            raise RowError(f"reward {self.name} has none for the first {index + 1} frames: {reason}")
        return [result.rewards[index] for index in range(len(conversations))]


class FunctionOfPrefixes:
    """A function of a task and the pictures of an episode, which returns a score after each of them."""

    def __init__(self, named: str):
        module, _, function = named.removeprefix(PYTHON).rpartition(":")
        if not module:
            raise ConfigError(f"{named} names no function: write {PYTHON}module:function.")
        self.named, self.function = named, imported_function(module, function, named)

    def score_prefixes(self, task: str, frames: Sequence) -> list[float]:
        """Return the score after each of `frames`, [T]."""
        scores = [float(score) for score in self.function(task, frames)]
        if len(scores) != len(frames):
            raise RowError(f"{self.named} returned {len(scores)} scores of {len(frames)} frames: return one for each")
        return scores


def open_prefix_scorer(model: str) -> PrefixScorer:
    """Return the scorer of a checkpoint, of a service by its address, of the reward in a YAML file, or a function.

    A function is `python:module:function`, of the working directory too: (task, PIL pictures) to a score for each.
    """
    if model.startswith(PYTHON):
        return FunctionOfPrefixes(model)
    if model.endswith(".py") or UNMARKED.fullmatch(model):
        raise ConfigError(f"{model} is no checkpoint, address or YAML file: write a function as {PYTHON}module:name.")
    if not model.endswith((".yaml", ".yml")):
        return load_scorer(model)
    arguments = reward_arguments(model)
    if len(arguments) > 1:
        raise ConfigError(f"{model} has {len(arguments)} rewards, of which one can score episodes: leave one.")
    reward = RewardOfPrefixes(arguments[0])
    own: PrefixScorer = reward.model if hasattr(reward.model, "score_prefixes") else reward  # ty: ignore
    return own


# Labels --------------------------------------------------------------------------------------------------------------


def label_episodes(
    scorer: PrefixScorer,
    files: Sequence[TrajectoryFile],
    positive_dir: Path,
    negative_dir: Path,
    *,
    judge: str,
    above: float,
    task: str | None = None,
    image_key: str | None = None,
) -> str:
    """Write each trajectory anew, a success where its frame alone scores above `above`; return the counts in words.

    An episode that the folders have with these labels is not scored again, so that an interrupted labelling goes on.
    """
    for folder in (positive_dir, negative_dir):
        if folder.resolve() in {file.path.parent.resolve() for file in files}:
            raise ConfigError(f"{folder} has the episodes themselves: name another folder for their new labels.")
    counts: Counter[str] = Counter()

    def episode(file: TrajectoryFile) -> Episode:
        key, instruction = image_key or file.keys[0], task_of(file, task)
        declared = f"{judge} > {above:g} for {instruction!r}"

        def images() -> dict[str, np.ndarray]:
            return {name: file.frames(name) for name in file.keys}

        def labelled() -> Trajectory:
            scores = []
            for step in range(len(file)):
                try:
                    scores += scorer.score_prefixes(instruction, [as_picture(file.frame(key, step))])
                except RowError as error:
                    raise DataError(f"frame {step} of {file.path} has no score: {error.reason}.") from error
            labels = np.array(scores) > above
            kept, moved = labels == file.successes, labels.any() != file.successes.any()
            counts.update(frames=len(labels), kept=int(kept.sum()), moved=int(moved))
            metadata = {**file.metadata, "declared_success": declared, "success_once": "false"}
            return Trajectory(images(), labels.astype(np.float32), metadata)

        return Episode(str(file.path), lambda: digest(images(), file.labels, [declared, key]), labelled)

    imported = import_episodes([episode(file) for file in files], positive_dir, negative_dir)
    share = counts["kept"] / max(counts["frames"], 1)
    return (
        f"{summarise_import(imported)}; {share:.1%} of {counts['frames']} frames keep their label, and "
        f"{counts['moved']} episodes change sides"
    )


# Scores of every step ------------------------------------------------------------------------------------------------


class Scored(NamedTuple):
    """The scores [T] after some steps [T] of an episode; of a success, up to the first one.

    `repeated` and `shuffled` are the controls: those of its first frame T times, and of its frames in another order.
    """

    file: TrajectoryFile
    steps: Sequence[int]
    scores: Sequence[float]
    repeated: Sequence[float] = ()
    shuffled: Sequence[float] = ()

    @property
    def success(self) -> bool:
        return bool(self.file.successes.any())


def score_episodes(
    scorer: PrefixScorer, files: Sequence[TrajectoryFile], *, task: str | None, frames: int, image_key: str | None
) -> list[Scored]:
    """Return the scores of each episode, and its controls, after at most `frames` steps, evenly spread."""
    if frames < 2:
        raise ConfigError(f"{frames} frames of an episode have no order: give two or more.")
    scored = []
    for number, file in enumerate(files):
        key = image_key or files[0].keys[0]
        steps = spread_steps(file.way, min(frames, len(file.way)))
        pictures = [as_picture(file.frame(key, step)) for step in steps]
        order = np.random.default_rng(number).permutation(len(steps))
        score = partial(scorer.score_prefixes, task_of(file, task))
        controls = [pictures[0]] * len(steps), [pictures[place] for place in order]
        scored.append(Scored(file, steps, score(pictures), *map(score, controls)))
    return scored


def value_order(episodes: Sequence[Scored], of: Shown = "scores", less: Shown | None = None) -> Estimate:
    """Return the mean value-order correlation, or how much higher than that of a control it is, by episode.

    Episodes of one frame do not count; scores that all differ by less than `TIED` of the largest are tied.
    """
    orders = _orders(episodes, of) - (0.0 if less is None else _orders(episodes, less))
    return Mean(orders, scale="difference" if less is None else "plain").estimate(np.arange(len(episodes)))


def _orders(episodes: Sequence[Scored], of: Shown) -> np.ndarray:
    """Return the value-order correlation of each episode, [N]: of its scores and the number of frames shown."""
    shown = [np.asarray(getattr(episode, of)) for episode in episodes]
    tied = TIED * max((abs(score) for episode in episodes for score in episode.scores), default=0.0)
    scores = np.concatenate([[], *(np.zeros(len(one)) if len(one) and np.ptp(one) < tied else one for one in shown)])
    places = np.concatenate([[], *(np.arange(len(one)) for one in shown)])
    orders = np.full(len(episodes), math.nan)
    found = spearman_within(scores, places, np.repeat(np.arange(len(shown)), [len(one) for one in shown]))
    orders[: len(found)] = found
    return orders


def fitted_curve(scores: np.ndarray, successes: np.ndarray) -> tuple[float, float]:
    """Return the factor and the offset of the likeliest p = σ(factor · score + offset) of known outcomes.

    As in Platt's method (1999), one success and one failure more are spread over the targets: the curve is finite.
    """
    good = np.asarray(successes, dtype=bool)
    targets = np.where(good, (good.sum() + 1) / (good.sum() + 2), 1 / ((~good).sum() + 2))
    centre, scale = float(np.mean(scores)), float(np.std(scores)) or 1.0
    scaled = (np.asarray(scores, dtype=np.float64) - centre) / scale

    def loss(curve: np.ndarray) -> tuple[float, np.ndarray]:
        logits = curve[0] * scaled + curve[1]
        excess = expit(logits) - targets
        value = -(targets * log_expit(logits) + (1 - targets) * log_expit(-logits)).sum()
        return float(value), np.array([excess @ scaled, excess.sum()])

    slope, height = minimize(loss, np.zeros(2), jac=True, method="BFGS").x
    return float(slope / scale), float(height - slope * centre / scale)


def success_probabilities(episodes: Sequence[Scored]) -> list[np.ndarray]:
    """Return for each episode the probability of its success after each step, [T]; NaN without both outcomes."""
    scores, good = _last(episodes)
    factor, offset = (NAN, NAN) if good.all() or not good.any() else fitted_curve(scores, good)
    return [expit(factor * np.array(episode.scores) + offset) for episode in episodes]


def _last(episodes: Sequence[Scored], of: Shown = "scores") -> tuple[np.ndarray, np.ndarray]:
    scores = [getattr(episode, of)[-1] for episode in episodes]
    return np.array(scores, dtype=np.float64), np.array([episode.success for episode in episodes], dtype=bool)


def write_scores(episodes: Sequence[Scored], output: Path) -> None:
    """Write a line of JSON for each episode: its file, whether it succeeds, and what was scored after its steps."""
    require_new_file(output)
    lines = [
        {
            "episode": str(episode.file.path),
            "success": episode.success,
            "steps": [*episode.steps],
            "scores": [*episode.scores],
            "success_probabilities": [None if math.isnan(p) else p for p in probabilities.tolist()],
            "first_frame_repeated": [*episode.repeated],
            "frames_shuffled": [*episode.shuffled],
        }
        for episode, probabilities in zip(episodes, success_probabilities(episodes), strict=True)
    ]
    write_file(output, "".join(json.dumps(line) + "\n" for line in lines))


def summarise(episodes: Sequence[Scored]) -> str:
    """Return the value-order correlations and the AUC of success as lines, with what the controls say of them."""
    lines = [*_said_of_order(episodes), *_said_of_success(episodes)]
    return "\n".join(lines) or "no episode has two frames: there is no order of values"


def _said_of_order(episodes: Sequence[Scored]) -> Iterator[str]:
    for name, success in (("successes", True), ("failures", False)):
        part = [episode for episode in episodes if episode.success == success]
        found = value_order(part)
        if not found.n:
            continue
        beside = ", ".join(f"of {text} {_figure(value_order(part, control))}" for control, text in CONTROLS.items())
        yield f"value-order correlation of {found.n} {name}: {_figure(found)}; {beside}"
        for control, text in CONTROLS.items():
            if success and not value_order(part, less=control).low > 0:
                yield (
                    f"  warning: it is not shown to be more than that of {text}, and a model that only counts frames "
                    "has as much"
                )


def _said_of_success(episodes: Sequence[Scored]) -> Iterator[str]:
    scores, good = _last(episodes)
    if good.all() or not good.any():
        return
    (area, _), (of_control, doubt) = area_under_curve(scores, good), area_under_curve(*_last(episodes, "repeated"))
    yield (
        f"AUC of success by the last score, of {good.sum()} successes and {(~good).sum()} failures: {area:.2f}; of "
        f"{CONTROLS['repeated']} {of_control:.2f}"
    )
    if doubt < 0.025:
        yield "  warning: their first frame, or the number of frames, tells successes from failures already"
    factor, offset = fitted_curve(scores, good)
    yield f"probability of success: σ({factor:.4g} · score {offset:+.4g})"


def area_under_curve(scores: np.ndarray, successes: np.ndarray) -> tuple[float, float]:
    """Return the AUC, ties as halves, and how likely one as high is where scores tell nothing."""
    found = mannwhitneyu(scores[successes], scores[~successes], alternative="greater")
    return float(found.statistic / (successes.sum() * (~successes).sum())), float(found.pvalue)


def _figure(of: Estimate) -> str:
    return f"{of.value:.2f} ({of.low:.2f} to {of.high:.2f})"
