"""A plugin that makes a reward model of vlmrm a reward function of ms-swift.

VLMRM_REWARD_MODEL=outputs/best swift rlhf --rlhf_type grpo --external_plugins examples/swift_plugin.py \
    --reward_funcs people --model Qwen/Qwen2.5-VL-3B-Instruct --dataset my_prompts.jsonl

python examples/swift_plugin.py     # one call as ms-swift makes it, without ms-swift; a tiny model stands in for none
"""

import os
import tempfile
from importlib.util import find_spec

from PIL import Image

from vlmrm.adapters.swift_orm import VlmrmORM
from vlmrm.modeling import make_tiny_reward_model


class People(VlmrmORM):
    model = os.environ.get("VLMRM_REWARD_MODEL")


if find_spec("swift"):
    from swift.rewards import orms  # ty: ignore[import-not-found]

    orms["people"] = People


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        People.model = People.model or make_tiny_reward_model(folder)
        answers = ["It is red.", "It is green."]
        question = {"role": "user", "content": "<image>Which colour is this?"}
        messages = [[question, {"role": "assistant", "content": answer}] for answer in answers]
        scores = People(args=None)(answers, messages=messages, images=[[Image.new("RGB", (112, 112), "red")]] * 2)
        for answer, score in zip(answers, scores, strict=True):
            print(f"{score:+9.4f}  {answer}")


if __name__ == "__main__":
    main()
