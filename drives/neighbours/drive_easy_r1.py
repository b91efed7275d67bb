"""EasyR1: its data set and reward manager with the reward of examples/frameworks; what a policy says is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from checks import ANSWERS, GUIDES_QUESTION, Case, lay_out, main, raised, ran, recipe, scored
from transformers import AutoTokenizer
from verl.protocol import DataProto
from verl.utils.dataset import RLHFDataset, collate_fn
from verl.workers.reward import AutoRewardManager, RewardConfig


class Processor:
    """Stands for that of the policy, whose files are of a later transformers."""

    image_processor = None

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.apply_chat_template = tokenizer, tokenizer.apply_chat_template

    def __call__(self, images: Any, texts: list[str], **options: Any) -> Any:
        return self.tokenizer(texts, **options)


def rewards(case: Case, url: str, picture: str = "cat.jpg") -> list[float]:
    """What its manager makes of the recipe's row with two answers, and another picture for the reward."""
    module = recipe("easy_r1_reward", url, case.folder)
    row = json.loads((module.__doc__ or "").split("\n\n")[1])
    row["answer"] = row["answer"].replace("cat.jpg", picture)
    Path("rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(case.policy, extra_special_tokens={})
    data = RLHFDataset("rows.jsonl", tokenizer, Processor(tokenizer), "problem", filter_overlong_prompts=False)
    columns = collate_fn([data[0]] * len(ANSWERS))
    said = tokenizer(list(ANSWERS), padding=True, padding_side="right", return_tensors="pt")
    tensors = {"responses": said["input_ids"], "response_mask": said["attention_mask"]}
    config = RewardConfig(reward_function=f"{module.__file__}:people")
    config.post_init()
    batch = DataProto.from_dict(tensors, {"ground_truth": columns["ground_truth"]})
    by_token, _ = AutoRewardManager(config, tokenizer).compute_reward(batch)
    return by_token.sum(dim=1).tolist()


def equal(case: Case) -> dict[str, Any]:
    lay_out(case)
    shown = str(Path("cat.jpg").resolve())
    rows = [scored(shown, *row, GUIDES_QUESTION) for row in zip(ANSWERS, rewards(case, case.url), strict=True)]
    return ran("in its data set and reward manager", rows)


def broken(case: Case) -> str:
    return raised(lambda: rewards(case, case.url, case.broken), "RewardError", "sample 0")


def away(case: Case) -> str:
    return raised(lambda: rewards(case, case.away), "RewardError", case.away)


if __name__ == "__main__":
    main({"equal": equal, "broken": broken, "away": away})
