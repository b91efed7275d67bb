"""SkyRL: an environment whose reward is that of a step; pictures are parts of the prompt."""

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from vlmrm.adapters.plain import Reward

reward = Reward("http://host:8080")


class People(BaseTextEnv):
    def __init__(self, env_config=None, extras=None):
        super().__init__()

    def init(self, prompt):
        self.prompt = prompt
        return prompt, {}

    def step(self, action):
        [score] = reward([self.prompt], [action])
        return BaseTextEnvStepOutput(observations=[], reward=score, done=True, metadata={})


skyrl_gym.register("people", entry_point=People)
