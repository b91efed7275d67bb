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
    result = CallResult()
    rows: list[Mapping[str, Any]] = []
    for index, item in enumerate(items):
        try:
            row = _columns(item)
            for names in required_columns(model):
                if all(row.get(name) is None for name in names):
                    raise RowError(f"it has no {' or '.join(names)}, which this reward needs")
            rows.append(row)
        except RowError as error:
            result.failures[index] = error.reason
            rows.append({})
    names = dict.fromkeys(["prompt", *(name for row in rows for name in row if name != "group")])
    samples = Samples({name: [row.get(name) for row in rows] for name in names}, groups)
    if "response" not in accepted_fields(model, samples.columns):
        for index, item in enumerate(items):
            # A sample may have columns for other rewards, but a conversation is about its answer.
            if isinstance(item, Conversation) and rows[index].get("response") is not None:
                result.failures[index] = "its answer is no image or video alone, and this reward reads no response"
    valid = [index for index in range(len(items)) if index not in result.failures]
    if isinstance(model, GroupwiseRewardModel):
        batches = [[index for index in group if index in valid] for group in samples.by_group().values()]
    else:
        batches = list(batched(model, samples, valid, model.config.batch_size))
    for batch in filter(None, batches):
        result.update(call(model, samples.take(batch)))
    return result


def _columns(item: Content) -> Mapping[str, Any]:
    if isinstance(item, RowError):
        raise item
    return write_sample(conversation_to_sample(item)) if isinstance(item, Conversation) else item
