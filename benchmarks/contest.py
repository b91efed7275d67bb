"""The naive and the shared-prefix model on one workload, with equal weights and, before any timing, equal scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig

from benchmarks import flops
from benchmarks.naive import NaiveRewardModel, padded
from benchmarks.shapes import Workload, reward_model
from vlmrm.batching import to_device

Prepare = Callable[[], Callable[[], Any]]


class Contest:
    """Both models with the workload's inputs, which are prepared anew in every round before the clock starts."""

    def __init__(
        self,
        config: PreTrainedConfig,
        work: Workload,
        *,
        tolerance: float = 1e-4,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        self.config, self.work = config, work
        self.model, self.batcher = reward_model(config, device, dtype)
        self.naive = NaiveRewardModel(self.model)
        self.compare(tolerance)

    @torch.no_grad()
    def compare(self, tolerance: float) -> None:
        """Raise AssertionError if the scores of the two models differ by more than this fraction of their norm."""
        shared, naive = self.our_scores(self.our_inputs()), self.naive_scores(self.naive_inputs())
        error = ((shared - naive).norm() / naive.norm()).item()
        if not error <= tolerance:
            raise AssertionError(
                f"the scores of the two models differ by {error:.2g} of their norm: there is nothing to compare"
            )

    def our_inputs(self) -> dict[str, Any]:
        return to_device(self.batcher(self.work.conversations), self.model.device)

    def naive_inputs(self) -> dict[str, Any]:
        return to_device(padded(self.work.conversations), self.model.device)

    def our_scores(self, inputs: dict[str, Any]) -> torch.Tensor:
        return self.model(**inputs).logits.squeeze(-1)

    def naive_scores(self, inputs: dict[str, Any]) -> torch.Tensor:
        return self.naive(**inputs)

    def steps(self) -> dict[str, Prepare]:
        """Return forward and backward of both for `harness.interleave`."""
        self.model.train()
        self.naive.train()

        def step(inputs: Callable, scores: Callable) -> Callable[[], Any]:
            self.naive.zero_grad()  # both share the weights
            prepared = inputs()
            return lambda: self.work.loss(scores(prepared)).backward()

        return {
            "naive": lambda: step(self.naive_inputs, self.naive_scores),
            "ours": lambda: step(self.our_inputs, self.our_scores),
        }

    def forwards(self) -> dict[str, Prepare]:
        """Return the forward pass of both for `harness.interleave`."""

        def forward(inputs: Callable, scores: Callable) -> Callable[[], Any]:
            prepared = inputs()
            return torch.inference_mode()(lambda: scores(prepared))

        return {
            "naive": lambda: forward(self.naive_inputs, self.naive_scores),
            "ours": lambda: forward(self.our_inputs, self.our_scores),
        }

    def operations(self) -> tuple[flops.Work, flops.Work]:
        """Return the operations of the naive and of the shared-prefix model."""
        return flops.of_padded(self.config, self.work.conversations), flops.of_shared(self.config, self.our_inputs())
