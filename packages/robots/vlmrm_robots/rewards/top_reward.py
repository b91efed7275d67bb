"""`TOPReward`: how likely a vision-language model finds it that frames show a task done, without any training."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vlmrm.conversation import Conversation, Image, Message
from vlmrm.errors import CheckpointError, ConfigError, first_line
from vlmrm.modeling import LoadedReward
from vlmrm.modeling.checkpoint import load_for_training, load_processor
from vlmrm.modeling.manifest import local_folder
from vlmrm.modeling.published_weights import shared
from vlmrm.modeling.reward_model import RewardModel
from vlmrm.modeling.sight import prove_sight
from vlmrm.rendering import ProcessedMedia, Rendered, Renderer
from vlmrm.rewards.contract import PLACEHOLDER, RewardArguments, read_template
from vlmrm.scoring.scorer import LocalScorer
from vlmrm_robots.rewards.trajectory_model import TrajectoryModel, task_and_frames

MODEL = "Qwen/Qwen3-VL-8B-Instruct"
QUESTION = (
    "These are frames of a robot at work, in the order of time, and this is its task: {text_prompt}\n"
    "At the last frame the task is done. Is that true? Answer True or False. The answer is:"
)
ANSWERS = ("True", "False")
LANGUAGE_HEAD = "lm_head.weight"
SCALED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")  # of a configuration


class TOPReward(TrajectoryModel):
    """log P(True) of the next token after the frames and a question about the task (Chen et al. 2026, TOPReward).

    P is that of the model's own language head over its whole vocabulary. By default the question stands in the user's
    turn and the answer right after it, without the chat template's end of the turn, as published; with
    `chat_template: true` the answer begins the assistant's turn. The published code shows the frames as a video, whose
    frames Qwen's models merge in pairs; here they are images, of which every prefix is the beginning of the next.

    Settings:
        model_name_or_path: any vision-language checkpoint with a plain language head.
        template_file: the published wording as a text file; see docs/rewards.md.
        chat_template: whether the assistant answers.
        answers: the two words, of which the first is the event; each must be one token.
        max_frames: of a sample, evenly spaced.
        check_sight: of `load_scorer`.
    """

    options = ("model_name_or_path", "template_file", "chat_template", "answers", "max_frames", "check_sight")
    most_frames = 16

    def __init__(self, config: RewardArguments, accelerator: Accelerator | PartialState):
        super().__init__(config, accelerator)
        extra = config.extra_kwargs
        path = str(extra.get("model_name_or_path", MODEL))
        question = read_template(config) or QUESTION
        answers = tuple(extra.get("answers", ANSWERS))
        if (
            len(answers) != 2
            or answers[0] == answers[1]
            or not all(isinstance(word, str) and word for word in answers)
        ):
            raise ConfigError(f"reward {config.name}: answers is {extra['answers']!r}: write two different words.")
        form = Form(question, answers, bool(extra.get("chat_template", False)))
        self.scorer = shared(_load, path, form, self.dtype, self.device, bool(extra.get("check_sight", True)))
        self.model = self.scorer.model


@dataclass(frozen=True)
class Form:
    """The question, its two answers, and whether the answer is a turn of the assistant."""

    question: str
    answers: tuple[str, ...]
    chat: bool

    def conversation(self, task: str, images: list[Image], answer: str) -> Conversation:
        text = self.question.replace(PLACEHOLDER, task)
        if self.chat:
            return Conversation((Message.of("user", *images, text), Message.of("assistant", answer)))
        return Conversation((Message.of("user", *images, f"{text} {answer}"),))


@dataclass
class AnswerRenderer(Renderer):
    """Renders an episode up to where it answers True or False: there the two renderings differ for the first time."""

    form: Form | None = None

    def render(self, conversation: Conversation, cache: dict[str, ProcessedMedia] | None = None) -> Rendered:
        task, frames = task_and_frames(conversation)
        rendered, start, _ = self.answered(task, [Image(frame) for frame in frames], cache)
        return Rendered(rendered.input_ids[:start], rendered.type_ids[:start], rendered.media)

    def answered(
        self, task: str, images: list[Image], cache: dict[str, ProcessedMedia] | None = None
    ) -> tuple[Rendered, int, int]:
        """Return an episode with the first answer, and the places where that begins and ends."""
        assert self.form is not None
        first, second = (self.form.conversation(task, images, answer) for answer in self.form.answers)
        media = self.process(first.messages, cache)
        rendered = self.render_with(first, media)
        ids, others = rendered.input_ids, self.render_with(second, media).input_ids
        differ = [a != b for a, b in zip(ids, others, strict=False)]
        after = [a != b for a, b in zip(ids[::-1], others[::-1], strict=False)]
        return rendered, differ.index(True), len(ids) - after.index(True)


class AnswerHead(nn.Module):
    """log P of one token by a language head [V, H], of hidden states [N, H]: [N, 1], float32."""

    def __init__(self, weight: Tensor, token: int):
        super().__init__()
        self.weight, self.token = nn.Parameter(weight, requires_grad=False), token

    def forward(self, hidden: Tensor) -> Tensor:
        logits = nn.functional.linear(hidden.to(self.weight.dtype), self.weight).float()
        return logits.log_softmax(-1)[:, self.token : self.token + 1]


def _load(path: str, form: Form, dtype: torch.dtype, device: torch.device, check_sight: bool) -> LocalScorer:
    model, processor = load_for_training(path, dtype=dtype), load_processor(path)
    renderer = partial(AnswerRenderer, form=form)
    rendered, start, end = renderer(processor).answered("", [])
    if end - start != 1:
        raise CheckpointError(
            f"{path} writes {form.answers[0]!r} in {end - start} tokens, and the reward is of one: choose "
            "other answers."
        )
    model.set_submodule("score", AnswerHead(language_head(path, model), rendered.input_ids[start]))
    model.to(device).eval().requires_grad_(False)
    if check_sight:
        prove_sight(model, processor, name=path, batching="shared")
    loaded = LoadedReward(model, processor, {}, path, path)
    return LocalScorer(loaded, renderer=renderer)


def language_head(path: str, model: RewardModel) -> Tensor:
    """Return the weights [V, H] from hidden states to logits that a checkpoint has beside its backbone."""
    config = model.config.get_text_config()
    if scaled := [name for name in SCALED_LOGITS if getattr(config, name, None) not in (None, 1, 1.0)]:
        raise CheckpointError(f"{path} changes its logits by {scaled[0]}, which is not read here: take another model.")
    embeddings: Any = model.get_input_embeddings().weight
    for file in sorted(local_folder(path).glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as stored:
                if LANGUAGE_HEAD in stored.keys():  # noqa: SIM118 - no mapping
                    return stored.get_tensor(LANGUAGE_HEAD).to(embeddings.dtype)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"the weights of {path} cannot be read: {first_line(error)}") from error
    if getattr(config, "tie_word_embeddings", False) or getattr(model.config, "tie_word_embeddings", False):
        return embeddings.detach()
    raise CheckpointError(f"{path} has no language head ({LANGUAGE_HEAD}): name the model that it was trained from.")
