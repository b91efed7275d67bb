"""`vlm_reward`, `vlm_reward_group`, `vlm_reward_ensemble`: models trained with vlmrm as rewards.

A sample becomes the conversation of the training data by `vlmrm.formats.flow_factory.sample_to_conversation`. Where
the training rows had words around the prompt, `custom_prompt` holds them, with `{prompt}` in place of a prompt that is
a text; `system` is their column of that name.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from pydantic import Field

from vlmrm.conversation import Conversation, Message
from vlmrm.data.media import messages_key
from vlmrm.errors import ConfigError, RowError, finite_or_error
from vlmrm.formats.flow_factory import PROMPT_SLOT, PromptTemplate, read_sample, sample_to_conversation
from vlmrm.http import run
from vlmrm.libraries import needs
from vlmrm.outputs import ONE, Outputs
from vlmrm.rewards.contract import (
    BaseRewardModel,
    GroupwiseRewardModel,
    PointwiseRewardModel,
    Processes,
    RewardArguments,
    RewardModelOutput,
    Verdict,
    choice,
)
from vlmrm.rewards.judges.replies import without_thinking
from vlmrm.rewards.pictures import once_each
from vlmrm.rewards.remote import ClientSettings, connected
from vlmrm.rewards.servers import SILENCE
from vlmrm.scoring.loading import SCORER_OPTIONS, is_address, load_local_scorer
from vlmrm.scoring.protocol import Scorer
from vlmrm.scoring.remote import ROUTE, Chunk, read_scores, scores_of
from vlmrm.scoring.transforms import SCALED, transform_named
from vlmrm.settings import Strict, validate

CLIENT = tuple(ClientSettings.model_fields)
LOCAL = tuple(name for name in SCORER_OPTIONS if name not in ("model", "device", "dtype", "reward"))


class _SharedModel:
    """A scorer with a lock: rewards on several threads may share one."""

    def __init__(self, model: str | Scorer, *options: tuple[str, Any]):
        self.scorer: Any = load_local_scorer(model, **dict(options)) if isinstance(model, str) else model
        self.lock = threading.Lock()

    def score_each(self, conversations: Sequence[Conversation]) -> list[float | RowError]:
        with self.lock:
            return self.scorer.score_each(conversations)

    def score_outputs(self, conversations: Sequence[Conversation]) -> list[dict[str, float] | RowError]:
        with self.lock:
            return self.scorer.score_outputs(conversations)


class _ServedModel:
    """A model behind the service at `address`, which is asked by the client of all reward servers."""

    def __init__(self, config: RewardArguments, address: str):
        extra = config.extra_kwargs
        self.reward = extra.get("reward")
        given = {name: extra[name] for name in CLIENT if name in extra}
        settings = validate(ClientSettings, given, f"reward {config.name}")
        token = os.environ.get("VLMRM_TOKEN")
        self.servers = connected(config, [address], settings, 120.0, token=token, silence=SILENCE)

    def score_each(self, conversations: Sequence[Conversation]) -> list[float | RowError]:
        return run(scores_of([[it] for it in conversations], self._ask))

    async def _ask(self, request: Chunk) -> dict[int, float | RowError]:
        answer = await self.servers.ask(ROUTE, request.content(self.reward, self.servers.endpoints[0].timeout))
        return dict(zip(request.indices, read_scores(answer, len(request.indices)), strict=True))


class PolicySettings(Strict, strict=True):
    """What a policy says beside its answer, and a model may never have seen in training."""

    drop_system: bool = False
    drop_thinking: bool = False
    answer_tag: str | None = Field(None, pattern=r"^\w+$")

    def judged(self, conversation: Conversation) -> Conversation:
        """Return what is to be scored of a policy's conversation; raise RowError where it has no answer in it."""
        messages = conversation.messages
        if self.drop_system and messages[0].role == "system":
            messages = messages[1:]
        if self.drop_thinking or self.answer_tag:
            text = conversation.answer.text
            if self.drop_thinking:
                if "<think>" in text and "</think>" not in text:
                    raise RowError("its answer ends inside <think>: allow for longer answers")
                text = without_thinking(text).lstrip()
            if tag := self.answer_tag:
                if not (tagged := re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)):
                    raise RowError(f"its answer has no <{tag}>...</{tag}>")
                text = tagged[-1].strip()
            messages = (*messages[:-1], Message.of("assistant", text, *conversation.answer.media))
        return Conversation(messages)


POLICY = tuple(PolicySettings.model_fields)
SHOWN = ("transform", "output", "custom_prompt", "system", *POLICY)


class _TrainedReward(BaseRewardModel):
    """The common part: the model, the conversation of a sample, and the transform of the scores."""

    required_fields = ("prompt",)
    message_responses = True
    default_dtype = "auto"
    options = ("model_path", "model_name_or_path", "reward", *SHOWN, *LOCAL, *CLIENT)
    transforms: tuple[str, ...]
    loaded: _SharedModel | _ServedModel

    def __init__(self, config: RewardArguments, accelerator: Processes):
        super().__init__(config, accelerator)
        extra, where = config.extra_kwargs, f"reward {config.name}"
        paths = [extra[name] for name in ("model_path", "model_name_or_path") if name in extra]
        if len(paths) != 1:
            raise ConfigError(f"{where}: give the checkpoint once, as model_path.")
        self.output: str | None = extra.get("output")
        self.policy = validate(PolicySettings, {name: extra[name] for name in POLICY if name in extra}, where)
        try:
            self.template = PromptTemplate(extra.get("custom_prompt", PROMPT_SLOT), extra.get("system"))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        model = paths[0] if hasattr(paths[0], "score_each") else str(paths[0])
        name = choice(config, "transform", self.transforms[0], self.transforms)
        kind = "a Scorer" if not isinstance(model, str) else "an address" if is_address(model) else "a folder"
        for keys, needed in ((LOCAL, "a folder"), (("reward", *CLIENT), "an address")):
            if kind != needed and (key := next((key for key in keys if key in extra), None)):
                raise ConfigError(f"{where}: {key} is of {needed}, and model_path is {kind}: leave it out.")
        if kind == "an address" and self.output is not None:
            raise ConfigError(f"{where}: output is of a model here: let the service's reward name it, as an option.")
        if kind != "a folder":
            if name in SCALED:
                raise ConfigError(f"{where}: transform is {name}, which needs a checkpoint's folder.")
            self.transform = transform_named(name)
            self.loaded = _ServedModel(config, model) if isinstance(model, str) else _SharedModel(model)
            self.outputs.checked(self.output, f"{where}: ")
            return
        with needs("local", f"the reward {config.name}"):
            from vlmrm.modeling.manifest import read_reward_file
            from vlmrm.modeling.published_weights import shared
        info = read_reward_file(model) or {}
        Outputs.of(info.get("outputs")).checked(self.output, f"{where}: ")
        self.transform = transform_named(name, info, model, self.output)
        options = {name: extra[name] for name in LOCAL if name in extra}
        options |= {"dtype": str(self.dtype).removeprefix("torch."), "device": str(self.device)}
        self.loaded = shared(_SharedModel, model, *sorted(options.items()))
        self.model = self.loaded.scorer.model

    # Without **kwargs, so that no other columns are gathered from other ranks.
    def __call__(  # ty: ignore[incompatible-method-override]
        self,
        prompt: list[Any],
        image: list[Any] | None = None,
        video: list[Any] | None = None,
        condition_images: list[Any] | None = None,
        condition_videos: list[Any] | None = None,
        response: list[Any] | None = None,
    ) -> RewardModelOutput:
        columns = {"prompt": prompt, "image": image, "video": video, "response": response}
        columns |= {"condition_images": condition_images, "condition_videos": condition_videos}
        named = {name: column for name, column in columns.items() if column}
        conversations: dict[int, Conversation] = {}
        scores: dict[int, float] = {}
        verdicts = [Verdict() for _ in prompt]
        for index, values in enumerate(zip(*named.values(), strict=True)):
            try:
                sample = read_sample(dict(zip(named, values, strict=True)))
                conversations[index] = self.policy.judged(sample_to_conversation(sample, self.template))
            except RowError as error:
                verdicts[index] = Verdict(failure=error.reason)
        valid = list(conversations.values())
        outcomes = once_each((messages_key(it.messages) for it in valid), valid, self._score_each)
        named: dict[int, dict[str, float]] = {}
        for index, score in zip(conversations, outcomes, strict=True):
            if isinstance(score, dict):
                named[index], score = score, self.outputs.number(score, self.output)
            if not isinstance(score, RowError):
                score = finite_or_error(score)  # a user's own scorer may return NaN
            if isinstance(score, RowError):
                verdicts[index] = Verdict(failure=score.reason)
            else:
                scores[index] = score
        for (index, score), reward in zip(scores.items(), self.transform([*scores.values()]).tolist(), strict=True):
            outputs = {"outputs": named[index]} if index in named else {}
            verdicts[index] = Verdict(reward, {"score": score, **outputs})
        return RewardModelOutput.of(verdicts)

    @property
    def outputs(self) -> Outputs:
        """What the model answers; of a service, and of a user's own scorer, one number."""
        return getattr(getattr(self.loaded, "scorer", None), "outputs", ONE)

    def _score_each(self, conversations: Sequence[Conversation]) -> list[Any]:
        """Return the score of each conversation, of a model of several outputs all of them by name, or its error."""
        if self.outputs == ONE:
            return self.loaded.score_each(conversations)
        return cast(_SharedModel, self.loaded).score_outputs(conversations)


class VlmReward(_TrainedReward, PointwiseRewardModel):
    """The raw score s, of a model of several outputs its total or that of `output`.

    By `transform` it is σ(s), or by the held-out scores that the checkpoint carries: `normalized`, (s - mean) / std;
    `percentile`, the share of them that is lower; `probability`, with which people prefer the answer to their median.
    Only differences of logits within a prompt mean something (Bradley and Terry 1952).
    """

    transforms = ("raw", "sigmoid", *SCALED)


class VlmRewardGroup(_TrainedReward, GroupwiseRewardModel):
    """The logits of one prompt's candidates relative to each other; the prompt is computed once.

    `transform`: `win_rate`, the mean over the other candidates j of σ(s_i - s_j), the Bradley-Terry probability of
    winning against one of them; `zscore`; `rank`, the share of the group with a lower score, ties sharing their mean.
    A candidate that cannot be scored is in no statistic.
    """

    transforms = ("win_rate", "zscore", "rank")


COMBINATIONS = ("mean", "min")


class VlmRewardEnsemble(PointwiseRewardModel):
    """The mean of the models' rewards, or their least (Coste et al. 2023, arXiv:2310.02743).

    `std`, the population standard deviation over the models, is in the details: with `uncertainty_penalty: k` the
    reward is the mean less k of them. Models trained apart have scales of their own, so each score is normalised by
    the mean and deviation that its checkpoint carries, unless `transform` says otherwise. A sample that one of them
    cannot score has failed.
    """

    required_fields = VlmReward.required_fields
    message_responses = True
    default_dtype = VlmReward.default_dtype
    options = ("model_paths", "combine", *SHOWN, *LOCAL)

    def __init__(self, config: RewardArguments, accelerator: Processes):
        super().__init__(config, accelerator)
        extra = {name: value for name, value in config.extra_kwargs.items() if name not in ("model_paths", "combine")}
        paths = config.extra_kwargs.get("model_paths")
        if not isinstance(paths, (list, tuple)) or len(paths) < 2 or len({str(path) for path in paths}) < len(paths):
            raise ConfigError(f"reward {config.name}: model_paths is {paths!r}: list two or more that differ.")
        self.least = choice(config, "combine", "mean", COMBINATIONS) == "min"
        extra.setdefault("transform", "normalized")
        self.members = [
            VlmReward(replace(config, extra_kwargs={**extra, "model_path": str(path)}), accelerator) for path in paths
        ]

    def __call__(  # ty: ignore[incompatible-method-override]
        self,
        prompt: list[Any],
        image: list[Any] | None = None,
        video: list[Any] | None = None,
        condition_images: list[Any] | None = None,
        condition_videos: list[Any] | None = None,
        response: list[Any] | None = None,
    ) -> RewardModelOutput:
        columns = (prompt, image, video, condition_images, condition_videos, response)
        outputs = [member(*columns) for member in self.members]
        each = np.array([output.rewards for output in outputs], dtype=np.float64)  # [models, N]
        rewards = each.min(axis=0) if self.least else each.mean(axis=0)
        details = {"members": each.T.tolist(), "std": each.std(axis=0).tolist()}
        failures = {index: reason for output in outputs for index, reason in output.failures.items()}
        return RewardModelOutput(rewards, extra_info=details, failures=failures)
