"""NeMo-RL: an environment, which finds a row's `prompt` and `images` in its `extra_env_info`."""

import ray
import torch
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.environments.utils import register_env

from vlmrm.adapters.plain import Reward


@ray.remote
class People(EnvironmentInterface):
    def __init__(self, config):
        self.reward = Reward("http://host:8080")

    def step(self, message_log_batch, metadata):
        answers = [log[-1]["content"] for log in message_log_batch]
        scores = self.reward([row["prompt"] for row in metadata], answers, [row["images"] for row in metadata])
        nothing = [None] * len(scores)
        said = [{"role": "environment", "content": ""} for _ in scores]
        return EnvironmentReturn(said, metadata, nothing, torch.tensor(scores), torch.ones(len(scores)), nothing)

    def global_post_process_and_metrics(self, batch):
        return batch, {}


register_env("people", f"{__name__}.People")
ACTOR_ENVIRONMENT_REGISTRY[f"{__name__}.People"] = PY_EXECUTABLES.SYSTEM
