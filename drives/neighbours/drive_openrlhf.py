"""OpenRLHF: its single-turn executor with a reward function's file and with a service; vLLM's part is given."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from checks import QUESTION, Case, data_uri, main, raised, scored
from openrlhf.utils.agent import SingleTurnAgentExecutor
from transformers import AutoProcessor

import vlmrm.adapters

FUNCTION = str(Path(vlmrm.adapters.__file__).with_name("openrlhf_reward.py"))


class Engine:
    """Says the answer where vLLM would generate one."""

    def __init__(self, tokens: list[int]):
        self.tokens = tokens

    async def generate(self, prompt: list[int], params: Any, multi_modal_data: Any) -> Any:
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=self.tokens, finish_reason="stop", logprobs=None)])


def outputs(case: Case, rows: list[tuple[str, str]], *endpoints: str, embedded: bool = False) -> list[dict[str, Any]]:
    """What the executor returns of each row, all of them at once as in a rollout."""
    executor = SingleTurnAgentExecutor(list(endpoints))
    processor = AutoProcessor.from_pretrained(case.policy)
    prompt = (
        f"<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    )
    params = SimpleNamespace(max_tokens=32, logprobs=None)

    async def execute(picture: str, answer: str) -> dict[str, Any]:
        engine = Engine(processor.tokenizer(answer + "<|im_end|>")["input_ids"])
        image = data_uri(picture)
        label = {"prompt": f"<image>{QUESTION}", "images": [image if embedded else picture]}
        return await executor.execute(prompt, label, params, 4096, processor, engine, [case.pictures[0]])

    async def all_rows() -> list[dict[str, Any]]:
        return await asyncio.gather(*(execute(*row) for row in rows))

    return asyncio.run(all_rows())


def equal(case: Case) -> list[dict[str, Any]]:
    rows, result = case.rows(), []
    os.environ["VLMRM_REWARD_MODEL"] = case.url
    for found in (
        outputs(case, rows, FUNCTION),
        outputs(case, rows, f"{case.url}/get_reward", embedded=True),
    ):
        for row, output in zip(rows, found, strict=True):
            [value] = output["reward"]
            result.append(scored(*row, value))
    return result


def broken(case: Case) -> str:
    os.environ["VLMRM_REWARD_MODEL"] = case.url
    rows = case.rows()
    rows[1] = (case.broken, rows[1][1])
    return raised(lambda: outputs(case, rows, FUNCTION), "Unscored", rows[1][1])


def away(case: Case) -> str:
    os.environ["VLMRM_REWARD_MODEL"] = case.away
    return raised(lambda: outputs(case, case.rows()[:1], FUNCTION), "Unscored", case.away)


def away_remote(case: Case) -> str:
    [output] = outputs(case, case.rows()[:1], f"{case.away}/get_reward")
    assert output["reward"] is not None, "by `/get_reward` OpenRLHF logs it at level INFO and goes on without a reward"
    return "a reward"


if __name__ == "__main__":
    main({"equal": equal, "broken": broken, "away": away, "away_remote": away_remote})
