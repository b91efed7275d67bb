"""A reward of one's own that asks a service, where the model's libraries are missing or too old."""

from __future__ import annotations

from typing import Any

from vlmrm.formats.flow_factory import read_sample, sample_to_conversation
from vlmrm.rewards import PointwiseRewardModel, RewardModelOutput
from vlmrm.scoring import load_scorer


class Served(PointwiseRewardModel):
    """The raw logit of each response, by the service at `model_path`."""

    required_fields = ("prompt", "response")
    options = ("model_path",)

    def __call__(  # ty: ignore[invalid-method-override]
        self, prompt: list[Any], response: list[Any], image: list[Any] | None = None
    ) -> RewardModelOutput:
        columns = {"prompt": prompt, "response": response, "image": image or [None] * len(prompt)}
        samples = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        conversations = [sample_to_conversation(read_sample(sample)) for sample in samples]
        return RewardModelOutput(load_scorer(self.config.extra_kwargs["model_path"]).score(conversations))
