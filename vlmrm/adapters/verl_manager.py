"""verl: a reward manager that sees a sample's messages and images. Importing this file needs verl.

reward.reward_manager.source=importlib
reward.reward_manager.name=VlmrmRewardManager
reward.reward_manager.module.path=pkg://vlmrm.adapters.verl_manager
+reward.custom_reward_function.reward_kwargs.model=http://host:8080
"""

from __future__ import annotations

from functools import partial
from typing import Any

from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase  # ty: ignore[import-not-found]

from vlmrm.adapters.rows import trained_model
from vlmrm.adapters.verl_reward import named, scored_with_others
from vlmrm.formats.rollouts import read_answer, read_verl_prompt


class VlmrmRewardManager(RewardManagerBase):
    """The raw logit of each response to the prompt that the policy saw."""

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any, **_: Any):
        super().__init__(config, tokenizer, compute_score)
        reward_kwargs = dict(config.reward.custom_reward_function.reward_kwargs)
        self.rewards = trained_model(reward_kwargs["model"], "vlmrm", "raise", **reward_kwargs.get("load", {}))

    async def run_single(self, data: Any) -> dict[str, Any]:
        """Return `{"reward_score": raw logit, "reward_extra_info"}` of one sample; of several turns, of the last."""
        item = data[-1]
        ids = item.batch["responses"]
        length = int(item.batch["attention_mask"][-len(ids) :].sum())
        decode = partial(self.tokenizer.decode, skip_special_tokens=True)
        answer = await self.loop.run_in_executor(None, decode, ids[:length])
        row = item.non_tensor_batch
        with named(row.get("data_source"), row.get("extra_info")):
            conversation = read_answer(read_verl_prompt(row["raw_prompt"]), answer)
            score = (await scored_with_others(self.rewards, conversation))["score"]
        return {"reward_score": score, "reward_extra_info": {"raw_score": score}}
