"""verl: its reward loop with VlmrmRewardManager, with compute_score, and asking a router.

Ray workers and all; nothing is generated.
"""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import verl.trainer.config
from checks import ANSWERS, QUESTION, Case, asked, main, raised, scored
from hydra import compose, initialize_config_module
from PIL import Image
from verl import DataProto
from verl.experimental.reward_loop import RewardLoopManager, RewardLoopWorker, migrate_legacy_reward_impl
from verl.trainer.ppo.reward import extract_reward
from verl.utils import hf_tokenizer

MANAGER = (
    "reward.reward_manager.source=importlib",
    "reward.reward_manager.name=VlmrmRewardManager",
    "reward.reward_manager.module.path=pkg://vlmrm.adapters.verl_manager",
)
FUNCTION = ("reward.custom_reward_function.path=pkg://vlmrm.adapters.verl_reward",)


def configured(case: Case, *settings: str) -> Any:
    with initialize_config_module(version_base=None, config_module=verl.trainer.config.__name__):
        policy = f"actor_rollout_ref.model.path={case.policy}"
        config = compose("ppo_trainer", overrides=[policy, "reward.num_workers=2", *settings])
    return migrate_legacy_reward_impl(config)


def rewards(case: Case, rows: list[tuple[str, str]], url: str, *settings: str) -> list[float]:
    """What verl's reward loop makes of the rows: their sums over the tokens."""
    model = f"+reward.custom_reward_function.reward_kwargs.model={url}"
    loop = RewardLoopManager(configured(case, model, *settings))
    try:
        tensor, _ = extract_reward(loop.compute_rm_score(batch(case, rows)))
    finally:
        for worker in loop.reward_loop_workers:
            ray.kill(worker)
    return tensor.sum(dim=1).tolist()


def batch(case: Case, rows: list[tuple[str, str]]) -> DataProto:
    """The rows as verl's rollout leaves them: prompts padded on the left, responses on the right."""
    tokenizer = hf_tokenizer(case.policy)
    tokenizer.padding_side = "right"
    answers = tokenizer([answer for _, answer in rows], padding=True, return_tensors="pt")
    prompts = torch.full((len(rows), 3), tokenizer.pad_token_id)
    mask = torch.cat([torch.ones_like(prompts), answers["attention_mask"]], dim=1)
    raw, extra, truth = (np.empty(len(rows), dtype=object) for _ in range(3))
    for number, (picture, _) in enumerate(rows):
        raw[number] = asked(picture if picture == case.broken else Image.open(picture).convert("RGB"))
        extra[number] = {"index": number, "prompt": f"<image>{QUESTION}", "images": [picture]}
        truth[number] = {"ground_truth": ""}
    return DataProto.from_dict(
        tensors={"prompts": prompts, "responses": answers["input_ids"], "attention_mask": mask},
        non_tensors={
            "raw_prompt": raw,
            "extra_info": extra,
            "reward_model": truth,
            "data_source": np.array(["colours"] * len(rows), dtype=object),
        },
    )


def equal(case: Case) -> list[dict[str, Any]]:
    rows = case.rows()
    both = [rewards(case, copy.deepcopy(rows), case.url, *how) for how in (MANAGER, FUNCTION)]
    return [scored(*row, value) for values in both for row, value in zip(rows, values, strict=True)]


def broken(case: Case) -> str:
    rows = case.rows()
    rows[2] = (case.broken, rows[2][1])
    said = [
        raised(lambda how=how: rewards(case, rows, case.url, *how), "RewardError", "sample 2 of colours")
        for how in (MANAGER, FUNCTION)
    ]
    return said[0] + ", which names the sample"


def routed(case: Case, url: str, engine: str, chats: list[list[dict[str, Any]]]) -> list[float]:
    """What its worker makes of rows that it sends to a reward model's router, by the engine behind it."""
    named = Path("vlm_reward")  # it names the reward by the folder of its tokenizer
    if not named.exists():
        named.symlink_to(case.model)
    settings = (f"model_path={named}", f"rollout.name={engine}", "enable=true")
    config = configured(case, *(f"reward.reward_model.{setting}" for setting in settings))

    async def rewards() -> list[float]:
        worker = RewardLoopWorker(config, url.removeprefix("http://"))
        rows = batch(case, [(case.pictures[0], chat[-1]["content"]) for chat in chats])
        for number, chat in enumerate(chats):
            rows.non_tensor_batch["raw_prompt"][number] = chat[:-1]
        return [output["reward_score"] for output in await worker.compute_score_batch(rows)]

    return asyncio.run(rewards())


def equal_texts(case: Case) -> list[dict[str, Any]]:
    """Texts alone: it sends no picture."""
    chats = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question in (QUESTION, "What is shown here?")
        for answer in ANSWERS
    ]
    return [
        {"messages": chat, "reward": reward}
        for engine in ("vllm", "sglang")
        for chat, reward in zip(chats, routed(case, case.url, engine, chats), strict=True)
    ]


def blind(case: Case) -> str:
    chat = [*asked(case.pictures[0]), {"role": "assistant", "content": ANSWERS[0]}]
    return raised(lambda: routed(case, case.url, "vllm", [chat]), "400") + " where a picture is asked about"


def away(case: Case) -> str:
    return raised(lambda: rewards(case, case.rows(), case.away, *MANAGER), "RewardError", case.away)


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    main({"equal": equal, "broken": broken, "away": away, "equal_texts": equal_texts, "blind": blind})
