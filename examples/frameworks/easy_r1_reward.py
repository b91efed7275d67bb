r"""EasyR1: `worker.reward.reward_function=easy_r1_reward.py:people`; it passes the answer column alone, here JSON.

{"problem": "<image>What is this?", "images": ["cat.jpg"],
 "answer": "{\"prompt\": \"<image>What is this?\", \"images\": [\"cat.jpg\"]}"}
"""

import json

from vlmrm.adapters.plain import Reward

reward = Reward("http://host:8080", name="people")


def people(samples):
    rows = [json.loads(sample["ground_truth"]) for sample in samples]
    answers = [sample["response"] for sample in samples]
    scores = reward([row["prompt"] for row in rows], answers, [row["images"] for row in rows])
    return [{"overall": score} for score in scores]
