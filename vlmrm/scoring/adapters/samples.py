"""A text policy's rows as the columns of a `RewardSet`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlmrm.errors import RewardError, RowError
from vlmrm.rewards.samples import MEDIA, sample_of
from vlmrm.scoring.adapters.rows import conversation, table


def text_columns(prompts: Sequence[Any], answers: Sequence[Any], images: Sequence[Any] | None) -> dict[str, list[Any]]:
    """`prompt`, the answer, and what the prompt shows, of each row, as `vlmrm.rewards.samples.sample_of` has them.

    Raises:
        RewardError: naming the row whose images do not fit its prompt, or when the columns differ in length.
    """
    columns: dict[str, list[Any]] = {name: [] for name in ("prompt", "response", *MEDIA)}
    for place, row in enumerate(table(prompts, answers, images)):
        try:
            sample = sample_of(conversation(*row))
        except RowError as error:
            raise RewardError(f"sample {place}: {error.reason}") from error
        for name, column in columns.items():
            column.append(sample.get(name))
    return columns
