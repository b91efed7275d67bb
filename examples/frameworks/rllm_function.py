"""rLLM: a function of its workflows, which sees the task and the answer."""

from rllm.rewards import RewardOutput

from vlmrm.adapters.plain import Reward

reward = Reward("http://host:8080")


def people(task, action):
    [score] = reward([task["messages"]], [action.action])
    return RewardOutput(reward=score)
