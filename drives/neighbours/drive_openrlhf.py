"""OpenRLHF: the guide's command to its parser, data set and single-turn executor; vLLM's part is given."""

from __future__ import annotations

import asyncio
import os
import runpy
import shlex
import sys
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

from checks import ANSWERS, GUIDES_POLICY, GUIDES_QUESTION, QUESTION, Case, data_uri, guide, main, raised, ran, scored
from openrlhf.datasets import PromptDataset
from openrlhf.datasets.utils import blending_datasets
from openrlhf.utils.agent import SingleTurnAgentExecutor
from transformers import AutoProcessor

import vlmrm.adapters

FUNCTION = str(Path(vlmrm.adapters.__file__).with_name("openrlhf_reward.py"))


# Packages that only a machine with CUDA can build, or that need one.
ABSENT = (
    *("deepspeed", "deepspeed.runtime.zero.partition_parameters", "vllm", "vllm.inputs", "vllm.utils"),
    *("flash_attn", "flash_attn.bert_padding", "flash_attn.utils.distributed"),
)


class Engine:
    """Says the answer where vLLM would generate one."""

    def __init__(self, tokens: list[int]):
        self.tokens = tokens

    async def generate(self, prompt: list[int], params: Any, multi_modal_data: Any) -> Any:
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=self.tokens, finish_reason="stop", logprobs=None)])


def parsed(words: list[str]) -> Any:
    """What its command line makes of the words, up to where it would begin Ray."""
    found: list[Any] = []

    def begin() -> None:
        found.append(sys._getframe(1).f_locals["args"])
        raise SystemExit

    with (
        suppress(SystemExit),
        patch.dict(
            sys.modules, {name: MagicMock(__version__="0.20.0", __spec__=ModuleSpec(name, None)) for name in ABSENT}
        ),
        patch("ray.is_initialized", begin),
        patch.object(sys, "argv", words),
    ):
        runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")
    return found[0]


def of_guide(case: Case) -> dict[str, Any]:
    Path("rows.jsonl").write_text(guide(case, '"vlmrm": {'), encoding="utf-8")
    command = (
        guide(case, "openrlhf.cli").replace("\\\n", " ").replace("...", f"--actor.model_name_or_path {GUIDES_POLICY}")
    )
    setting, _, _, _, *words = shlex.split(command)
    args = parsed(["train_ppo_ray", *words])
    rows = blending_datasets(args.data.prompt_dataset, strategy=(strategy := MagicMock(args=args)))
    processor = AutoProcessor.from_pretrained(args.actor.model_name_or_path)
    data = PromptDataset(rows, processor, strategy)
    with patch.dict(os.environ, [setting.split("=", 1)]):
        executor = SingleTurnAgentExecutor(args.reward.remote_url)
        found = [executed(executor, *data[0][1:], answer, processor) for answer in ANSWERS]
    rewards = [output["reward"][0] for output in found]
    shown = str(Path("cat.jpg").resolve())
    rows = [scored(shown, *row, GUIDES_QUESTION) for row in zip(ANSWERS, rewards, strict=True)]
    return ran("its parser, data set and executor (its trainer needs CUDA)", rows)


def executed(executor: Any, prompt: str, label: Any, images: Any, answer: str, processor: Any) -> dict[str, Any]:
    engine = Engine(processor.tokenizer(answer + "<|im_end|>")["input_ids"])
    params = SimpleNamespace(max_tokens=32, logprobs=None)
    return asyncio.run(executor.execute(prompt, label, params, 4096, processor, engine, images))


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
    main({"guide": of_guide, "equal": equal, "broken": broken, "away": away, "away_remote": away_remote})
