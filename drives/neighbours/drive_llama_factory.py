"""LLaMA-Factory: its PPO asks the service for the rewards of rendered texts, the only thing that it sends."""

from __future__ import annotations

from typing import Any

import torch
from checks import ANSWERS, Case, main, raised
from llamafactory.train.ppo.ppo_utils import get_rewards_from_server
from transformers import AutoTokenizer

QUESTIONS = ("Which colour is this?", "What do you see?")


def conversation(question: str, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def rewards(case: Case, url: str, conversations: list[list[dict[str, Any]]]) -> torch.Tensor:
    """As its trainer does: prompts and answers as tokens, decoded with all special ones."""
    tokenizer = AutoTokenizer.from_pretrained(case.policy)
    token_ids = [
        tokenizer.apply_chat_template(one[:-1], add_generation_prompt=True, return_dict=True)["input_ids"]
        + tokenizer(one[-1]["content"] + "<|im_end|>")["input_ids"]
        for one in conversations
    ]
    texts = tokenizer.batch_decode(token_ids, skip_special_tokens=False)
    return get_rewards_from_server(f"{url}/v1/score/evaluation", texts)


def equal(case: Case) -> list[dict[str, Any]]:
    asked = [conversation(question, answer) for question in QUESTIONS for answer in ANSWERS]
    got = rewards(case, case.url, asked).tolist()
    return [{"messages": one, "reward": reward} for one, reward in zip(asked, got, strict=True)]


def broken(case: Case) -> str:
    """LLaMA-Factory sends no pictures, broken or not: there is no reward for the text alone."""
    asked = [conversation("<|vision_start|><|image_pad|><|vision_end|>" + QUESTIONS[0], ANSWERS[0])]
    said = raised(lambda: rewards(case, case.url, asked), "KeyError: 'scores'")
    return f"a text with a picture's place and no picture: {said}"


def away(case: Case) -> str:
    return raised(lambda: rewards(case, case.away, [conversation(QUESTIONS[0], ANSWERS[0])]), "Connection refused")


if __name__ == "__main__":
    main({"equal": equal, "broken": broken, "away": away})
