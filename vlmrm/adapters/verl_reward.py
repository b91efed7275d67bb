"""verl and verl-omni: a custom reward function.

    reward.custom_reward_function.path=pkg://vlmrm.adapters.verl_reward
    +reward.custom_reward_function.reward_kwargs.model=http://host:8080

verl passes such a function neither the prompt nor its images, so the data's column `extra_info` must hold them:
`prompt`, a text or messages, and `images` or `videos` for its placeholders. `verl_manager` sees them without that.
verl-omni's policies draw: it passes the picture or video, which is the answer, and its own rewards read the prompt as
`ground_truth`; so does this one where `extra_info` has none. In `reward.reward_functions` set `required: true` beside
path and name, or its `MultiVisualRewardManager` makes a missing reward 0.

verl scores one sample at a time; samples of concurrent calls are scored together.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vlmrm.adapters.rows import MicroBatcher, SharedScorer
from vlmrm.conversation import Conversation
from vlmrm.errors import ConfigError, RewardError, RowError
from vlmrm.formats.flow_factory import conversation_to_sample, read_sample, sample_to_conversation, write_sample
from vlmrm.formats.rollouts import read_answer
from vlmrm.rewards import Rewards, RewardSet, reward_arguments
from vlmrm.rewards.samples import CONVERTERS


async def compute_score(
    data_source: str,
    solution_str: str | None = None,
    ground_truth: Any = None,
    extra_info: Mapping[str, Any] | None = None,
    *,
    solution_image: Any = None,
    model: Any,
    load: Mapping[str, Any] | None = None,
    **_: Any,
) -> dict[str, float]:
    """Return `{"score": raw logit}` of one answer.

    Args:
        solution_image: verl-omni's answer, uint8: a picture [C, H, W], or a video [C, F, H, W] or [F, H, W, C].
        model: the folder of a checkpoint, the address of a service, or a `Scorer`.
        load: keywords of `vlmrm.load_scorer`.
    """
    row, sample = extra_info or {}, sample_name(data_source, extra_info)
    scorer = SharedScorer(model, **(load or {}))
    if solution_image is not None:
        prompt = row.get("prompt") or ground_truth
        if not prompt:
            raise RewardError(f"{sample}: it has no prompt: add it to extra_info, or as the ground truth.")
        return {"score": await _score(scorer, sample, lambda: _drawn(prompt, solution_image, row))}
    if row.get("prompt") is None:
        raise RewardError(
            f"{sample}: extra_info has no prompt: add it and its images to the data, or use VlmrmRewardManager."
        )
    return {
        "score": await score_one(scorer, sample, row["prompt"], solution_str, row.get("images"), row.get("videos"))
    }


def _drawn(prompt: Any, picture: Any, row: Mapping[str, Any]) -> Conversation:
    """Return a conversation with a picture or video of verl-omni as its answer, as `vlm_reward` reads one."""
    kind = "image" if picture.ndim == 3 else "video"
    if picture.ndim == 4:  # verl-omni's videos are [C, F, H, W], or of some engines [F, H, W, C]
        picture = picture.permute(0, 3, 1, 2) if picture.shape[-1] == 3 else picture.permute(1, 0, 2, 3)
    columns = {"prompt": prompt, "condition_images": row.get("images"), kind: CONVERTERS[kind, False](picture)}
    return sample_to_conversation(read_sample(columns))


async def score_one(scorer: SharedScorer, sample: str, *row: Any) -> float:
    """Return the raw logit of a row of `read_answer`, scored with the rows of concurrent calls."""
    return await _score(scorer, sample, lambda: read_answer(*row))


async def _score(scorer: SharedScorer, sample: str, read: Callable[[], Conversation]) -> float:
    try:
        return await asyncio.wrap_future(scorer.micro_batcher.submit(read()))
    except RowError as error:
        raise RewardError(f"{sample}: {error.reason}") from error


async def compute_rewards(
    data_source: str,
    solution_str: str | None = None,
    ground_truth: Any = None,
    extra_info: Mapping[str, Any] | None = None,
    *,
    rewards: Any,
    solution_image: Any = None,
    **_: Any,
) -> dict[str, float]:
    """Return `{"score": weighted sum, name: reward, ...}` of one answer by a `RewardSet` of pointwise rewards.

    The names are for verl's GDPO: `algorithm.gdpo_reward_keys`.

    Args:
        rewards: the configuration of the rewards: a YAML file, or the mappings.
    """
    row, sample = extra_info or {}, sample_name(data_source, extra_info)
    prompt = row.get("prompt") or (ground_truth if solution_image is not None else None)
    if not prompt:
        raise RewardError(f"{sample}: extra_info has no prompt: add it and its images to the data.")
    try:
        conversation = (
            read_answer(prompt, solution_str, row.get("images"), row.get("videos"))
            if solution_image is None
            else _drawn(prompt, solution_image, row)
        )
        batches = await asyncio.to_thread(_set_batches, rewards)  # the first call loads the models
        return await asyncio.wrap_future(batches.submit(write_sample(conversation_to_sample(conversation))))
    except (RowError, RewardError) as error:
        raise RewardError(f"{sample}: {error.reason if isinstance(error, RowError) else error}") from error


class _SetBatches(MicroBatcher[Mapping[str, Any], dict[str, float]]):
    """A reward set that computes the samples of concurrent calls together, by the `batch_size` of each reward."""

    def __init__(self, config: Any):
        configured = reward_arguments(config)
        # One sample's failure must not end the batch of the others.
        self.rewards = RewardSet(
            [replace(each, on_failure="mask") if each.on_failure == "raise" else each for each in configured]
        )
        self.needed = {each.name for each in configured if each.weight or each.on_failure == "raise"}
        for reward in self.rewards.rewards:
            if reward.groupwise:
                raise ConfigError(f"reward {reward.arguments.name} is of groups, and verl passes one sample alone.")
        super().__init__(self._each)

    def _each(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, float] | RewardError]:
        names = dict.fromkeys(name for row in rows for name in row if name != "prompt")
        try:
            columns = {name: [row.get(name) for row in rows] for name in names}
            scored = self.rewards(prompt=[row["prompt"] for row in rows], **columns)
        except RewardError as error:  # the whole call's: alone, each sample has its own
            return [error] if len(rows) == 1 else [self._each([row])[0] for row in rows]
        totals = scored.total()
        return [self._of_sample(scored, index, float(totals[index])) for index in range(len(rows))]

    def _of_sample(self, scored: Rewards, index: int, total: float) -> dict[str, float] | RewardError:
        rewards = {name: float(values[index]) for name, values in scored.rewards.items()}
        for name, value in rewards.items():
            if np.isnan(value) and name in self.needed:
                return RewardError(f"reward {name}: {scored.failures[name][index]}")
        return {"score": total, **rewards}


def _set_batches(config: Any) -> _SetBatches:
    """Return the reward set of this process for a configuration; its models are loaded once."""
    with _lock:
        return _sets.get(str(config)) or _sets.setdefault(str(config), _SetBatches(config))


_lock = threading.Lock()
_sets: dict[str, _SetBatches] = {}


def sample_name(data_source: Any, extra_info: Mapping[str, Any] | None) -> str:
    """Return the sample's name in errors: verl's data sets number their rows in `extra_info`."""
    index = (extra_info or {}).get("index")
    return f"a sample of {data_source}" if index is None else f"sample {index} of {data_source}"
