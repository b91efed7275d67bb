"""VLM-R1: `reward_funcs_registry["people"] = people` in its grpo_jsonl.py, and `--reward_funcs people`."""

from vlmrm.adapters.plain import Reward

reward = Reward("http://host:8080", name="people")


def people(prompts, completions, image_path, **columns):
    return reward(prompts, completions, image_path)
