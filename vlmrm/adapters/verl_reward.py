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
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from vlmrm.adapters.rows import sample_batcher, trained_model
from vlmrm.conversation import Conversation
from vlmrm.errors import RewardError, RowError
from vlmrm.formats.flow_factory import read_sample, sample_to_conversation
from vlmrm.formats.rollouts import read_answer
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
        load: options of any reward, and of `vlm_reward`.
    """
    one = trained_model(model, "vlmrm", "raise", **(load or {}))
    scored = await compute_rewards(
        data_source, solution_str, ground_truth, extra_info, rewards=one, solution_image=solution_image
    )
    return {"score": scored["score"]}


def _conversation(row: Mapping[str, Any], answer: str | None, ground_truth: Any, picture: Any) -> Conversation:
    """Return the prompt with the answer: a text, or a picture or video of verl-omni, as `vlm_reward` reads one."""
    prompt = row.get("prompt") or (ground_truth if picture is not None else row.get("prompt"))
    if prompt is None:
        raise RowError("extra_info has no prompt: add it and its images to the data, or use VlmrmRewardManager")
    if picture is None:
        return read_answer(prompt, answer, row.get("images"), row.get("videos"))
    kind = "image" if picture.ndim == 3 else "video"
    if picture.ndim == 4:  # verl-omni's videos are [C, F, H, W], or of some engines [F, H, W, C]
        picture = picture.permute(0, 3, 1, 2) if picture.shape[-1] == 3 else picture.permute(1, 0, 2, 3)
    columns = {"prompt": prompt, "condition_images": row.get("images"), kind: CONVERTERS[kind, False](picture)}
    return sample_to_conversation(read_sample(columns))


@contextmanager
def named(data_source: Any, extra_info: Mapping[str, Any] | None) -> Generator[None, None, None]:
    """Begin errors with the sample: verl's data sets number their rows in `extra_info`."""
    try:
        yield
    except (RowError, RewardError) as error:
        index = (extra_info or {}).get("index")
        sample = f"a sample of {data_source}" if index is None else f"sample {index} of {data_source}"
        raise RewardError(f"{sample}: {error.reason if isinstance(error, RowError) else error}") from error


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

    The names are for verl's GDPO: `algorithm.gdpo_reward_keys`. `rewards` is their configuration: a YAML file, or the
    mappings.
    """
    with named(data_source, extra_info):
        conversation = _conversation(extra_info or {}, solution_str, ground_truth, solution_image)
        return await scored_with_others(rewards, conversation)


async def scored_with_others(rewards: Any, conversation: Conversation) -> dict[str, float]:
    """Return the rewards of a conversation, computed with those of concurrent calls."""
    batcher = await asyncio.to_thread(sample_batcher, rewards)  # the first call loads the models
    return await asyncio.wrap_future(batcher.submit_conversation(conversation))
