"""verl: the guide's overrides and data, in its reward loop on Ray or in one of the loop's workers, and a router.

Nothing is generated. A process takes half a minute to import verl, so that few are begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import verl.trainer.config
from checks import (
    ANSWERS,
    GUIDES_QUESTION,
    QUESTION,
    Case,
    asked,
    begin_ray,
    gdpo,
    guide,
    main,
    normalised,
    raised,
    ran,
    scored,
)
from hydra import compose, initialize_config_module
from PIL import Image
from verl import DataProto
from verl.experimental.reward_loop import RewardLoopManager, RewardLoopWorker, migrate_legacy_reward_impl
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.utils import hf_processor, hf_tokenizer
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

SET = {"people": 1.0, "repeats": 0.5}  # the guide's rewards.yaml

Rows = list[tuple[str, str]]


def configured(case: Case, *settings: str) -> Any:
    """verl's configuration with overrides as its command line takes them."""
    with initialize_config_module(version_base=None, config_module=verl.trainer.config.__name__):
        policy = f"actor_rollout_ref.model.path={case.policy}"
        config = compose("ppo_trainer", overrides=[policy, "reward.num_workers=2", *settings])
    return migrate_legacy_reward_impl(config)


@cache
def managers(case: Case) -> RewardLoopManager:
    """Its reward loop of two workers, with our manager by the guide's lines."""
    return RewardLoopManager(configured(case, *guide(case, "VlmrmRewardManager").split()))


def of_worker(rows: DataProto, config: Any, url: str | None = None) -> list[float]:
    """What one worker of the loop makes of the rows, in this process."""

    async def rewards() -> list[dict[str, Any]]:
        return await RewardLoopWorker(config, url).compute_score_batch(rows)

    return [output["reward_score"] for output in asyncio.run(rewards())]


def by_function(case: Case, url: str, rows: Rows) -> list[float]:
    lines = guide(replace(case, url=url), "vlmrm.adapters.verl_reward").split()
    return of_worker(batch(case, rows), configured(case, *lines))


def guides_rows(case: Case) -> DataProto:
    """The guide's row as verl's data set reads it, with two answers."""
    exec(guide(case, "to_parquet"), {})
    config = configured(case).data
    rows = RLHFDataset("rows.parquet", hf_tokenizer(case.policy), config, hf_processor(case.policy))
    data = batch(case, [("cat.jpg", answer) for answer in ANSWERS])
    columns = collate_fn([rows[0]] * len(ANSWERS))
    data.non_tensor_batch |= {name: column for name, column in columns.items() if isinstance(column, np.ndarray)}
    return data


def guides_rewards(rewards: Sequence[float]) -> list[dict[str, Any]]:
    shown = str(Path("cat.jpg").resolve())
    return [scored(shown, *row, GUIDES_QUESTION) for row in zip(ANSWERS, rewards, strict=True)]


def of_guide(case: Case) -> dict[str, Any]:
    lines = guide(case, "vlmrm.adapters.verl_reward").split()
    rewards = of_worker(guides_rows(case), configured(case, *lines))
    return ran("`compute_score` in its reward worker, of its data set", guides_rewards(rewards))


def guide_manager(case: Case) -> dict[str, Any]:
    rewards = guides_rows(case).union(managers(case).compute_rm_score(guides_rows(case))).batch["rm_scores"]
    return ran("`VlmrmRewardManager` in its reward loop", guides_rewards(rewards.sum(dim=1).tolist()))


def batch(case: Case, rows: Rows) -> DataProto:
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
            "uid": np.array([picture for picture, _ in rows], dtype=object),
        },
    )


def across(case: Case) -> Rows:
    """Return both answers to each picture so that each half of them, which a worker gets, has one of each."""
    return case.rows()[::2] + case.rows()[1::2]


def rewarded(case: Case, rows: Rows, loop: RewardLoopManager) -> DataProto:
    """The rows with the rewards of the workers, as its trainer takes them."""
    data = batch(case, rows)
    return data.union(loop.compute_rm_score(data))


def advantages(data: DataProto, estimator: str, config: Any = None) -> np.ndarray:
    """What its estimator makes of the rewards, as its trainer calls it: [N]."""
    each = {"non_tensor_batch": data.non_tensor_batch, "batch": data.batch} if estimator == "gdpo" else {}
    by_token, _ = get_adv_estimator_fn(estimator)(
        token_level_rewards=data.batch["rm_scores"],
        response_mask=data.batch["attention_mask"][:, 3:],
        index=data.non_tensor_batch["uid"],
        config=config,
        **each,
    )
    return by_token[:, 0].numpy()


def equal(case: Case) -> list[dict[str, Any]]:
    rows = case.rows()
    return [scored(*row, value) for row, value in zip(rows, by_function(case, case.url, rows), strict=True)]


def ranks(case: Case) -> list[dict[str, Any]]:
    """By the manager, with each picture's answers on both workers; advantages are those of the whole group."""
    rows = across(case)
    data = rewarded(case, rows, managers(case))
    rewards = data.batch["rm_scores"].sum(dim=1).tolist()
    found = advantages(data, "grpo")
    expected = normalised(rewards, [picture for picture, _ in rows], epsilon=1e-6)
    assert np.allclose(found, expected, atol=1e-4) and np.abs(expected).min() > 0.1, (found, expected)
    return [scored(*row, value) for row, value in zip(rows, rewards, strict=True)]


def broken(case: Case) -> str:
    rows = case.rows()
    rows[2] = (case.broken, rows[2][1])
    named = ("RewardError", "sample 2 of colours")
    raised(lambda: by_function(case, case.url, rows), *named)
    return raised(lambda: rewarded(case, rows, managers(case)), *named) + ", which names the sample"


def of_many(case: Case) -> list[dict[str, Any]]:
    """Several rewards by the guide's lines, on two workers, and GDPO's advantages; one answer repeats itself."""
    config = configured(
        case,
        *guide(case, "compute_rewards").split(),
        "algorithm.adv_estimator=gdpo",
        f"+algorithm.gdpo_reward_keys={list(SET)}",
        f"+algorithm.gdpo_reward_weights={list(SET.values())}",
    )
    for worker in managers(case).reward_loop_workers:  # the others have their names
        ray.kill(worker)
    rows = [(picture, answer + " It is red." * (answer == ANSWERS[0])) for picture, answer in across(case)]
    data = rewarded(case, rows, RewardLoopManager(config))
    found = advantages(data, "gdpo", config.algorithm)
    columns = {name: data.non_tensor_batch[name].tolist() for name in SET}
    assert np.allclose(columns["repeats"], [-0.25 * ("red" in answer) for _, answer in rows]), columns
    lengths = data.batch["attention_mask"][:, 3:].sum(dim=1)  # it whitens tokens
    expected = gdpo(columns, [picture for picture, _ in rows], epsilon=1e-6, lengths=lengths, weights=SET)
    assert np.allclose(found, expected, atol=1e-4), (found, expected)
    return [scored(*row, value) for row, value in zip(rows, columns["people"], strict=True)]


def routed(case: Case, url: str, engine: str, chats: list[list[dict[str, Any]]]) -> list[float]:
    """What its worker makes of rows that it sends to a reward model's router, by the engine behind it."""
    named = Path("vlm_reward")  # it names the reward by the folder of its tokenizer
    if not named.exists():
        named.symlink_to(case.model)
    settings = (f"model_path={named}", f"rollout.name={engine}", "enable=true")
    config = configured(case, *(f"reward.reward_model.{setting}" for setting in settings))
    rows = batch(case, [(case.pictures[0], chat[-1]["content"]) for chat in chats])
    for number, chat in enumerate(chats):
        rows.non_tensor_batch["raw_prompt"][number] = chat[:-1]
    return of_worker(rows, config, url.removeprefix("http://"))


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
    return raised(lambda: by_function(case, case.away, case.rows()), "RewardError", case.away)


if __name__ == "__main__":
    begin_ray()
    main(
        {
            "guide": of_guide,
            "guide_manager": guide_manager,
            "equal": equal,
            "away": away,
            "equal_texts": equal_texts,
            "blind": blind,
            "ranks": ranks,
            "broken": broken,
            "gdpo": of_many,
        }
    )
