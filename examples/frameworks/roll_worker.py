"""ROLL: the `worker_cls` of a reward; the data's columns `question`, with `<image>` in it, and `images` reach it."""

import torch
from roll.distributed.executor.worker import Worker
from roll.distributed.scheduler.decorator import Dispatch, register
from roll.distributed.scheduler.protocol import DataProto
from roll.models.model_providers import default_tokenizer_provider

from vlmrm.adapters.plain import Reward


class People(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config):
        super().initialize(pipeline_config)
        self.tokenizer = default_tokenizer_provider(pipeline_config.actor_train.model_args)
        self.reward = Reward("http://host:8080")

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, clear_cache=False)
    def compute_rewards(self, data):
        answers = self.tokenizer.batch_decode(data.batch["responses"], skip_special_tokens=True)
        rows = data.non_tensor_batch
        scores = torch.tensor(self.reward(rows["question"], answers, rows["images"]))
        tokens = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        return DataProto.from_dict(
            tensors={"token_level_rewards": tokens, "response_level_rewards": scores, "scores": scores}
        )
