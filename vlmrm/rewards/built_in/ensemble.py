"""`vlm_reward_ensemble`: several trained models as one reward that trusts them less where they disagree."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vlmrm.errors import ConfigError
from vlmrm.rewards.built_in.vlm_reward import CHECKS, VlmReward
from vlmrm.rewards.contract import PointwiseRewardModel, RewardArguments, RewardModelOutput, choice

if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState

COMBINATIONS = ("mean", "min")


class VlmRewardEnsemble(PointwiseRewardModel):
    """The mean of the models' rewards, or their least (Coste et al. 2023, arXiv:2310.02743).

    `std`, the population standard deviation over the models, is in the details: with `uncertainty_penalty: k` the
    reward is the mean less k of them. Models trained apart have scales of their own, so each score is normalised by
    the mean and deviation that its checkpoint carries, unless `transform` says otherwise. A sample that one of them
    cannot score has failed.

    Settings:
        model_paths: the checkpoints, at least two.
        combine: `mean` (default) or `min`.
        transform, custom_prompt, system, check_sight, check_files: of each model, as of `vlm_reward`.

    Raises:
        ConfigError: for less than two checkpoints, or one that is given twice.
    """

    required_fields = VlmReward.required_fields
    message_responses = True
    default_dtype = VlmReward.default_dtype
    options = ("model_paths", "combine", "transform", "custom_prompt", "system", *CHECKS)

    def __init__(self, config: RewardArguments, accelerator: Accelerator | PartialState):
        super().__init__(config, accelerator)
        extra = {name: value for name, value in config.extra_kwargs.items() if name not in ("model_paths", "combine")}
        paths = config.extra_kwargs.get("model_paths")
        if not isinstance(paths, (list, tuple)) or len(paths) < 2 or len({str(path) for path in paths}) < len(paths):
            raise ConfigError(
                f"reward {config.name}: model_paths is {paths!r}: list two different checkpoints or more."
            )
        self.least = choice(config, "combine", "mean", COMBINATIONS) == "min"
        extra.setdefault("transform", "normalized")
        self.members = [
            VlmReward(replace(config, extra_kwargs={**extra, "model_path": str(path)}), accelerator) for path in paths
        ]

    def __call__(  # ty: ignore[incompatible-method-override]
        self,
        prompt: list[Any],
        image: list[Any] | None = None,
        video: list[Any] | None = None,
        condition_images: list[Any] | None = None,
        condition_videos: list[Any] | None = None,
        response: list[Any] | None = None,
    ) -> RewardModelOutput:
        columns = (prompt, image, video, condition_images, condition_videos, response)
        outputs = [member(*columns) for member in self.members]
        each = np.array([output.rewards for output in outputs], dtype=np.float64)  # [models, N]
        rewards = each.min(axis=0) if self.least else each.mean(axis=0)
        details = {"members": each.T.tolist(), "std": each.std(axis=0).tolist()}
        failures = {index: reason for output in outputs for index, reason in output.failures.items()}
        return RewardModelOutput(rewards, extra_info=details, failures=failures)
