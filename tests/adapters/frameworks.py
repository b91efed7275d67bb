"""Stand-ins for what the RL frameworks import and call, with the signatures of their releases.

None of them is a dependency: ms-swift 4.6.0, verl 0.9.1, OpenRLHF 0.11.2, Flow-Factory a0b2bc5.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import vlmrm.adapters
from vlmrm.adapters.openrlhf_reward import OpenRLHFReward
from vlmrm.adapters.plain import Reward
from vlmrm.adapters.swift_orm import VlmrmORM, set_orms
from vlmrm.adapters.trl_reward import TRLReward, TRLRewardSet
from vlmrm.adapters.verl_reward import compute_rewards, compute_score

ADAPTERS = Path(vlmrm.adapters.__file__).parent


def import_file(path: Path, name: str) -> ModuleType:
    """As ms-swift, verl and OpenRLHF import a user's file."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class RewardManagerBase:
    """verl's `verl.experimental.reward_loop.reward_manager.base.RewardManagerBase`."""

    def __init__(self, config, tokenizer, compute_score):
        self.config, self.tokenizer, self.compute_score = config, tokenizer, compute_score
        self.loop = asyncio.get_running_loop()


def install(monkeypatch, dotted: str, **names: Any) -> None:
    """Makes `from dotted import name` work."""
    parts = dotted.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    for name, value in names.items():
        setattr(sys.modules[dotted], name, value)


def verl_sample(
    tokenizer: Any, messages: list[dict], answer: str, row: dict[str, Any] | None = None
) -> list[SimpleNamespace]:
    """A one-item DataProto: the response right-padded, and its mask."""
    import torch

    ids = tokenizer(answer)["input_ids"]
    padded = torch.tensor([*ids, *[tokenizer.pad_token_id] * 3])
    mask = torch.tensor([1] * 5 + [1] * len(ids) + [0] * 3)
    return [SimpleNamespace(
        batch={"responses": padded, "attention_mask": mask},
        non_tensor_batch={"raw_prompt": messages, "data_source": "x", "extra_info": row or {}},
    )]  # fmt: skip


# A call of an adapter, as its framework makes it: rewards of prompts (messages), answers and each row's images.
Call = Callable[[Sequence[list[dict]], Sequence[str], Sequence[list]], list[Any]]


def calls(model: Any, rewards: Any, options: dict[str, Any], monkeypatch: Any) -> dict[str, Call]:
    """Return the calls of all adapters for text policies by name, with a model or a set of `rewards`, one named it."""
    reward = Reward(model, **options)
    return {
        "plain.Reward": reward,
        "TRLReward": _trl(TRLReward(model, **options)),
        "TRLRewardSet": _trl(TRLRewardSet(rewards)),
        "each()": _trl(TRLRewardSet(rewards).each()[0]),
        "VlmrmORM": _swift(type("It", (VlmrmORM,), {"model": model, "options": options})()),
        "set_orms": _swift(set_orms(rewards)["it"]()),
        "compute_score": _verl(compute_score, model=model, load=options),
        "compute_rewards": _verl(compute_rewards, rewards=rewards),
        "VlmrmRewardManager": _verl_manager(model, options, monkeypatch),
        "OpenRLHFReward": _openrlhf(OpenRLHFReward(model, **options)),
    }


def _trl(reward: Any) -> Call:
    return lambda prompts, answers, images: reward(prompts, answers, images=images)


def _swift(orm: Any) -> Call:
    def call(prompts: Any, answers: Any, images: Any) -> list[Any]:
        messages = [[*prompt, {"role": "assistant", "content": "?"}] for prompt in prompts]
        return orm(answers, messages=messages, images=images, prompt_id=[str(prompt) for prompt in prompts])

    return call


def _at_once(ask: Callable[..., Any]) -> Call:
    async def gathered(*columns: Any) -> list[Any]:
        return await asyncio.gather(*(ask(*row) for row in zip(*columns, strict=True)))

    return lambda *columns: asyncio.run(gathered(*columns))


def _verl(function: Any, **options: Any) -> Call:
    async def ask(prompt: Any, answer: str, images: Any) -> float:
        return (await function("x", answer, extra_info={"prompt": prompt, "images": images}, **options))["score"]

    return _at_once(ask)


def _verl_manager(model: Any, options: dict[str, Any], monkeypatch: Any) -> Call:
    install(monkeypatch, "verl.experimental.reward_loop.reward_manager.base", RewardManagerBase=RewardManagerBase)
    made = import_file(ADAPTERS / "verl_manager.py", "manager").VlmrmRewardManager
    given = SimpleNamespace(reward_kwargs={"model": model, "load": options})
    config = SimpleNamespace(reward=SimpleNamespace(custom_reward_function=given))

    async def ask(prompt: Any, answer: str, images: Any) -> float:
        import torch

        left = iter(images)
        for turn in (prompt := [dict(turn) for turn in prompt]):  # it shows pictures as parts
            first, *others = turn["content"].split("<image>")
            shown = [part for text in others for part in ({"type": "image", "image": next(left)}, _text(text))]
            turn["content"] = [*([_text(first)] if first else []), *shown]
        tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: answer)
        batch = {"responses": torch.ones(1), "attention_mask": torch.ones(2)}
        item = SimpleNamespace(batch=batch, non_tensor_batch={"raw_prompt": prompt, "data_source": "x"})
        return (await made(config, tokenizer, None).run_single([item]))["reward_score"]

    return _at_once(ask)


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _openrlhf(reward: Any) -> Call:
    def ask(prompt: Any, answer: str, images: Any) -> float:
        rendered = str(prompt)
        return float(reward([rendered + answer], [rendered], [{"prompt": prompt, "images": images}])["rewards"])

    def call(*columns: Any) -> list[Any]:
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(ask, *columns))

    return call
