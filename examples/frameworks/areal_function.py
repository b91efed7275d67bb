"""AReaL: a function of its workflows, which pass a row's columns: `question` with `<image>` in it, and `images`."""

from vlmrm.adapters.plain import Reward
from vlmrm.scoring import RemoteScorer

reward = Reward(RemoteScorer("http://host:8080", timeout=10), name="people")


def people(prompt, completions, prompt_ids, completion_ids, question, images, **row):
    [score] = reward([question], [completions.removesuffix("<|im_end|>")], [images])
    return score
