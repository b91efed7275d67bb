"""`vlmrm frames progress`: a model's score after each frame of episodes: does it rise with time, does it end higher?

The value-order correlation (VOC: Ma et al. 2024, Vision Language Models are In-Context Value Learners) of an episode
is Spearman's correlation of step and score: 1 where each later frame scores higher. Of successes, up to the first, it
should be high; of failures it need not be. A model that counts frames has 1 as well, of anything. So each episode is
also scored with its first frame in place of all, and with its frames shuffled: what it has there is no progress.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from vlmrm.errors import ConfigError, RowError
from vlmrm.files import require_new_file, write_file
from vlmrm.measures.intervals import Estimate, Mean
from vlmrm.measures.statistics import expected_calibration_error, reliability, spearman_within, squared_errors
from vlmrm.rewards.contract import GroupwiseRewardModel, RewardArguments
from vlmrm.rewards.items import reward_items
from vlmrm.rewards.registry import reward_arguments, reward_model_class
from vlmrm.rewards.reward_set import Models
from vlmrm.scoring import load_scorer
from vlmrm.scoring.protocol import PrefixScorer, prefixes_of
from vlmrm_robots.trajectories.pairs import spread_steps, task_of
from vlmrm_robots.trajectories.pictures import as_picture
from vlmrm_robots.trajectories.success import AreaUnderCurve, fitted_calibration, held_out_calibrations
from vlmrm_robots.trajectories.trajectory import TrajectoryFile

TIED = 2**-18  # of the largest score: 32 times the precision of float32
Shown = Literal["scores", "repeated", "shuffled"]
CONTROLS: dict[Shown, str] = {"repeated": "their first frame repeated", "shuffled": "their frames shuffled"}


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


def open_prefix_scorer(model: str) -> PrefixScorer:
    """Return the scorer of a checkpoint, of a service by its address, or of the reward in a YAML file."""
    if not model.endswith((".yaml", ".yml")):
        return load_scorer(model)
    arguments = reward_arguments(model)
    if len(arguments) > 1:
        raise ConfigError(f"{model} has {len(arguments)} rewards, of which one can score episodes: leave one.")
    reward = RewardOfPrefixes(arguments[0])
    own: PrefixScorer = reward.model if hasattr(reward.model, "score_prefixes") else reward  # ty: ignore
    return own


def score_episodes(
    scorer: PrefixScorer, files: Sequence[TrajectoryFile], *, task: str | None, frames: int, image_key: str | None
) -> list[Scored]:
    """Return the scores of each episode, and its controls, after at most `frames` steps, evenly spread."""
    if frames < 2:
        raise ConfigError(f"{frames} frames of an episode have no order: give two or more.")
    scored = []
    for number, file in enumerate(files):
        key = image_key or files[0].keys[0]
        stop = int(file.successes.argmax()) + 1 if file.successes.any() else len(file)
        steps = spread_steps(range(stop), min(frames, stop))
        pictures = [as_picture(file.frame(key, step)) for step in steps]
        order = np.random.default_rng(number).permutation(len(steps))
        score = partial(scorer.score_prefixes, task_of(file, task))
        controls = [pictures[0]] * len(steps), [pictures[place] for place in order]
        scored.append(Scored(file, steps, score(pictures), *map(score, controls)))
    return scored


# Does it rise with time? ---------------------------------------------------------------------------------------------


def value_order(episodes: Sequence[Scored], of: Shown = "scores") -> Estimate:
    """Return the mean value-order correlation with its interval by episode; episodes of one frame do not count."""
    return _mean(_orders(episodes, of), "difference")


def gain(episodes: Sequence[Scored], control: Shown) -> Estimate:
    """Return by how much the value-order correlation is higher than that of a control, with its interval."""
    return _mean(_orders(episodes, "scores") - _orders(episodes, control), "plain")


def _orders(episodes: Sequence[Scored], of: Shown) -> np.ndarray:
    """Return the value-order correlation of each episode, [N]: of its scores and the number of frames shown.

    Scores of an episode that all differ by less than `TIED` of the largest are tied: a batch may round equal pictures
    apart.
    """
    shown = [np.asarray(getattr(episode, of)) for episode in episodes]
    tied = TIED * max((abs(score) for episode in episodes for score in episode.scores), default=0.0)
    scores = np.concatenate([[], *(np.zeros(len(one)) if len(one) and np.ptp(one) < tied else one for one in shown)])
    places = np.concatenate([[], *(np.arange(len(one)) for one in shown)])
    orders = np.full(len(episodes), math.nan)
    found = spearman_within(scores, places, np.repeat(np.arange(len(shown)), [len(one) for one in shown]))
    orders[: len(found)] = found
    return orders


def _mean(values: np.ndarray, scale: Literal["difference", "plain"]) -> Estimate:
    return Mean(values, scale=scale).estimate(np.arange(len(values)))


# Does it end higher? -------------------------------------------------------------------------------------------------


def success_area(episodes: Sequence[Scored], of: Shown = "scores") -> Estimate:
    """Return how well the last score tells successes from failures (AUC), with its interval by episode."""
    return AreaUnderCurve(*_last(episodes, of)).estimate(np.arange(len(episodes)))


def success_probabilities(episodes: Sequence[Scored]) -> list[np.ndarray]:
    """Return for each episode the probability of its success after each of its steps, [T].

    The curve from the last score to the probability is that of other episodes; NaN without two of both outcomes.
    """
    curves = held_out_calibrations(*_last(episodes, "scores"))
    return [curve.probabilities(np.array(e.scores)) for curve, e in zip(curves, episodes, strict=True)]


def _last(episodes: Sequence[Scored], of: Shown) -> tuple[np.ndarray, np.ndarray]:
    scores = [getattr(episode, of)[-1] for episode in episodes]
    return np.array(scores, dtype=np.float64), np.array([episode.success for episode in episodes], dtype=bool)


# What is said of them ------------------------------------------------------------------------------------------------


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
        controls = {control: value_order(part, control) for control in CONTROLS}
        beside = ", ".join(f"of {CONTROLS[control]} {_figure(of)}" for control, of in controls.items())
        yield f"value-order correlation of {found.n} {name}: {_figure(found)}; {beside}"
        for control in CONTROLS:
            if success and not gain(part, control).low > 0:
                yield (
                    f"  warning: it is not shown to be more than that of {CONTROLS[control]}, and a model that only "
                    "counts frames has as much"
                )


def _said_of_success(episodes: Sequence[Scored]) -> Iterator[str]:
    scores, good = _last(episodes, "scores")
    if good.all() or not good.any():
        return
    counts = f"{good.sum()} successes and {(~good).sum()} failures"
    control = success_area(episodes, "repeated")
    yield (
        f"AUC of success by the last score, of {counts}: {_figure(success_area(episodes))}; of {CONTROLS['repeated']} "
        f"{_figure(control)}"
    )
    if control.low > 0.5:
        yield "  warning: their first frame, or the number of frames, tells successes from failures already"
    curve = fitted_calibration(scores, good)
    held_out = np.array([probabilities[-1] for probabilities in success_probabilities(episodes)])
    if np.isnan(held_out).any():
        return
    with np.errstate(divide="ignore"):
        margins = np.where(good, 1, -1) * (np.log(held_out) - np.log1p(-held_out))
    yield (
        f"probability of success: σ({curve.factor:.4g} · score {curve.offset:+.4g}); by the curves of other episodes, "
        f"Brier score {squared_errors(margins).mean():.3f}, calibration error "
        f"{expected_calibration_error(reliability(margins)):.3f}"
    )


def _figure(of: Estimate) -> str:
    return f"{of.value:.2f} ({of.low:.2f} to {of.high:.2f})"
