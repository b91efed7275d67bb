"""Flow-GRPO: a reward in place of one that is not used, for `multi_score` has their names in its own code."""

import flow_grpo.rewards

from vlmrm.rewards import RewardSet

rewards = RewardSet("rewards.yaml")


def people(device):
    def score(images, prompts, metadata):
        return rewards(prompt=list(prompts), image=list(images)).rewards["people"].tolist(), {}

    return score


flow_grpo.rewards.qwenvl_score = people
