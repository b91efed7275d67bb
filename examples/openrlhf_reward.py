"""A file with the `reward_func` that OpenRLHF calls, of a reward model of vlmrm.

VLMRM_REWARD_MODEL=http://host:8080 python -m openrlhf.cli.train_ppo_ray \
    --reward.remote_url examples/openrlhf_reward.py --data.label_key vlmrm ...

A row of the data has a column `vlmrm`: {"prompt": "<image>Which colour is this?", "images": ["red.png"]}

python examples/openrlhf_reward.py     # calls as OpenRLHF makes them; a tiny model stands in for none
"""

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor

from PIL import Image

from vlmrm.adapters.openrlhf_reward import OpenRLHFReward, reward_func

__all__ = ["reward_func"]


def main() -> None:
    from vlmrm.modeling import make_tiny_reward_model  # OpenRLHF's environment has no transformers that it could use

    answers = ["It is red.", "It is green.", "It is blue.", "No."]
    prompt = "<|im_start|>user\n<|image_pad|>Which colour is this?<|im_end|>\n<|im_start|>assistant\n"
    label = {"prompt": "<image>Which colour is this?", "images": [Image.new("RGB", (112, 112), "red")]}
    queries = [prompt.replace("<|image_pad|>", "<|image_pad|>" * 16) + answer + "<|im_end|>" for answer in answers]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(4) as threads:
        reward = OpenRLHFReward(os.environ.get("VLMRM_REWARD_MODEL") or make_tiny_reward_model(folder))
        for answer, result in zip(
            answers, threads.map(lambda q: reward([q], [prompt], [label]), queries), strict=True
        ):
            print(f"{result['rewards'].item():+9.4f}  σ {result['scores'].item():.4f}  {answer}")


if __name__ == "__main__":
    main()
