"""Rewards of conversations and samples in one list, as a service and an evaluation have them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from vlmrm.conversation import Conversation
from vlmrm.errors import RowError
from vlmrm.formats.flow_factory import conversation_to_sample, write_sample
from vlmrm.rewards.contract import BaseRewardModel, GroupwiseRewardModel
from vlmrm.rewards.samples import CallResult, Samples, accepted_fields, batched, call, required_columns

Content = Conversation | Mapping[str, Any] | RowError


def reward_items(model: BaseRewardModel, items: Sequence[Content], groups: Sequence[Hashable]) -> CallResult:
    """Return the rewards of conversations that end with the answer and of samples by their columns, by index.

    An item that is an error, or lacks what the reward needs, fails alone. `groups` has the id of each item's group.
    """
    reads_answers = bool(accepted_fields(model, ["response"]))
    rows = [_row(model, item, reads_answers) for item in items]
    names = dict.fromkeys(["prompt", *(name for row in rows for name in row if name != "group")])
    samples = Samples({name: [row.get(name) for row in rows] for name in names}, groups)
    if isinstance(model, GroupwiseRewardModel):
        batches = samples.by_group().values()
    else:
        batches = batched(model, samples, range(len(samples)), model.config.batch_size)
    result = CallResult()
    for batch in batches:
        result.update(call(model, samples.take(batch)))
    return result


def _row(model: BaseRewardModel, item: Content, reads_answers: bool) -> Mapping[str, Any]:
    """Return the columns of an item, or as its prompt why it has none."""
    try:
        if isinstance(item, RowError):
            raise item
        row = write_sample(conversation_to_sample(item)) if isinstance(item, Conversation) else item
        for names in required_columns(model):
            if all(row.get(name) is None for name in names):
                raise RowError(f"it has no {' or '.join(names)}, which this reward needs")
        # A sample may have columns for other rewards, but a conversation is about its answer.
        if isinstance(item, Conversation) and row.get("response") is not None and not reads_answers:
            raise RowError("its answer is no image or video alone, and this reward reads no response")
        return row
    except RowError as error:
        return {"prompt": error}
