"""Requests and answers of `POST /get_reward`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, model_validator


class GetRewardRequest(BaseModel):
    """`query` is the rendered prompt with its answer. A label may be `{"prompt", "images", "videos"}`, or its JSON."""

    query: list[str] = Field(min_length=1)
    prompts: list[str] | None = None
    labels: list[Any] | None = None

    @model_validator(mode="after")
    def _equally_long(self) -> GetRewardRequest:
        for name in ("prompts", "labels"):
            column = getattr(self, name)
            if column is not None and len(column) != len(self.query):
                raise ValueError(f"there are {len(self.query)} queries but {len(column)} {name}")
        return self


class GetRewardAnswer(BaseModel):
    """Raw logits as `rewards`, σ of them as `scores`: OpenRLHF's dynamic filtering wants those between 0 and 1."""

    rewards: list[float]
    scores: list[float]
    extra_logs: dict[str, list[float]]
