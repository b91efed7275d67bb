"""Describe the layouts of published reward models: how to recognise each, and what its authors compute.

A score is always read at the last token of a conversation. Where the authors read it at a token in the middle, the
imported chat template ends with that token: attention is causal, so nothing after it changes the score.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from vlmrm.errors import CheckpointError, ConfigError
from vlmrm.modeling.manifest import HEAD_WEIGHTS

# Where the authors ask a question of their own, its wording comes from a file: vlmrm does not contain it. The imported
# chat template writes it as their code does, around the prompt and the answer.
MARK = "\ue000"  # private use: in no chat template
# Of a conversation: its media in reading order, the texts of its user, and those of its assistant in turn.
COLLECTED = """\
{%- set ns = namespace(media="", prompt="", answers=[]) -%}
{%- for message in messages -%}
  {%- set text = namespace(joined="") -%}
  {%- set parts = message["content"] -%}
  {%- for part in ([{"type": "text", "text": parts}] if parts is string else parts) -%}
    {%- if part["type"] == "text" -%}
      {%- set text.joined = text.joined + part["text"] -%}
    {%- elif part["type"] == "image" -%}
      {%- set ns.media = ns.media + IMAGE -%}
    {%- else -%}
      {%- set ns.media = ns.media + VIDEO -%}
    {%- endif -%}
  {%- endfor -%}
  {%- if message["role"] == "assistant" and text.joined -%}
    {%- set ns.answers = ns.answers + [text.joined] -%}
  {%- elif message["role"] == "user" and text.joined -%}
    {%- if ns.prompt -%}
      {{- raise_exception("this model reads one prompt, and the conversation has several turns") -}}
    {%- endif -%}
    {%- set ns.prompt = text.joined -%}
  {%- elif message["role"] == "system" -%}
    {{- raise_exception("this model has a system message of its own: leave it out") -}}
  {%- endif -%}
{%- endfor -%}
"""
NO_ANSWER = """\
{%- if ns.answers -%}
  {{- raise_exception("this model scores an image or a video as the answer to a text, and the answer has a text") -}}
{%- endif -%}
"""
# An answer, and the critique of it that the model wrote, if there is one.
ONE_ANSWER = """\
{%- if ns.answers | length not in (1, 2) -%}
  {{- raise_exception("this model scores an answer that is a text, with its critique as one more turn or without") -}}
{%- endif -%}
"""


@dataclass(frozen=True)
class TurnTemplate:
    """What stands around a user's turn: `before` its media, `after` its text, and `closed` after the assistant's.

    `media` has what stands for a medium, by kind; `line` comes after all of them.
    """

    before: str
    after: str
    closed: str
    media: Mapping[str, str]
    line: str = ""


def turn_of(processor: Any) -> TurnTemplate:
    """Return the turn of a processor's own chat template."""
    before, after = _written(processor, []).split(MARK)
    answer = {"role": "assistant", "content": [{"type": "text", "text": MARK}]}
    closed = _written(processor, [], answer, prompted=False).split(MARK)[2]
    media = {}
    for kind in ("image", "video"):
        with suppress(TemplateError):  # of a template that knows no videos
            start = _written(processor, [kind]).split(MARK)[0]
            if start != before and start.startswith(before):
                media[kind] = start.removeprefix(before)
    return TurnTemplate(before, after, closed, media)


def llava_turn(processor: Any) -> TurnTemplate:
    """Return the turn of LLaVA-NeXT's `qwen_1_5` conversations: transformers' processors cannot write it."""
    return TurnTemplate(
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|>\n",
        {"image": processor.image_token},
        "\n",
    )


def question_template(turn: TurnTemplate, instruction: str, placeholders: Sequence[str], token: str | None) -> str:
    """Return a chat template in Jinja: media first, then the instruction, in a user's turn.

    With a reward token it ends there. Without, the answer's critique follows as the assistant's turn; where there is
    none, it ends where one would begin.
    """
    collected = COLLECTED
    for name in ("IMAGE", "VIDEO"):
        medium = turn.media.get(name.lower())
        refused = f"raise_exception('this model takes no {name.lower()}')"
        collected = collected.replace(name, refused if medium is None else _literal(medium))
    values = {"{text_prompt}": "ns.prompt", "{question}": "ns.prompt", "{answer}": "ns.answers[0]"}
    body = _literal(instruction)
    for placeholder in placeholders:
        body = body.replace(placeholder, f'" ~ {values[placeholder]} ~ "')
    pieces = [_literal(turn.before), "ns.media", f'({_literal(turn.line)} if ns.media else "")', body]
    if token is None:
        critique = f'(ns.answers[1] ~ {_literal(turn.closed)} if ns.answers | length == 2 else "")'
        pieces += [_literal(turn.after), critique]
    checks = ONE_ANSWER if "{answer}" in placeholders else NO_ANSWER
    return f"{collected}{checks}{{{{- {' ~ '.join(pieces)} -}}}}"


def _literal(text: str) -> str:
    """Quote a text as a string of Jinja, without JSON's escapes: it reads a surrogate pair as two characters."""
    return json.dumps(text, ensure_ascii=False)


def _written(processor: Any, media: Sequence[str], *more: dict[str, Any], prompted: bool = True) -> str:
    content = [*({"type": kind} for kind in media), {"type": "text", "text": MARK}]
    messages = [{"role": "user", "content": content}, *more]
    return processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompted)


# Layouts -------------------------------------------------------------------------------------------------------------

KIND = r"(?P<kind>weight|bias)"


@dataclass(frozen=True)
class Output:
    """One of the scores of a published model."""

    token: str | None = None  # the reward token at which it is read; None for the last token of the conversation
    head: str | None = None  # its group in the name of the head's weights, where each output has a head of its own


@dataclass(frozen=True)
class PublishedLayout:
    """A layout: the names of its head's weights, and what its authors compute from them."""

    name: str
    head: str  # pattern of the whole names, with the groups `kind`, `layer` where there are several and `head`
    source: str  # where the arithmetic was read
    activation: str | None = None  # after each layer but the last
    layers: Sequence[str] = ()  # the names of its layers, where they are known
    bias: bool | None = None  # of all its layers; None where either may be
    rows: Sequence[int] = (1,)  # the numbers that the last layer may give at a token
    ids: Sequence[str] = ()  # beginnings of the names of repositories and folders, in lower case; none for any
    outputs: Mapping[str, Output] = field(default_factory=lambda: {"score": Output()})  # several need `--output-name`
    question: Sequence[str] = ()  # placeholders of `--template`; empty where the chat template is the checkpoint's own
    turn: Callable[[Any], TurnTemplate] | None = None  # around the instruction, where not the processor's own template
    pixels: int | None = None  # area of every image
    text_positions: bool = False  # its images had the positions of text
    model_types: Sequence[str] = ()  # of the backbones that its authors compute so; empty for any
    renamed: Mapping[str, str] = field(default_factory=dict)  # further patterns of names, and what replaces them
    base: str | None = None  # repository of its configuration and processor, where it comes without
    settings: str | None = None  # file with `peft_lora_config`, and `inference_config` to normalise each output

    @property
    def tokens(self) -> list[str]:
        """The reward tokens; the authors add them to the tokenizer in this order."""
        return list(dict.fromkeys(output.token for output in self.outputs.values() if output.token))

    def matches(self, name: str) -> re.Match[str] | None:
        """Return the match of a weight's name, if it is one of the head's."""
        return re.fullmatch(rf"(?:\w+\.)*?{self.head}", name)


VALUE_HEAD = PublishedLayout(
    "value_head",
    rf"v_head\.summary\.{KIND}",
    "TRL, AutoModelForCausalLMWithValueHead; LLaMA-Factory ff6d4d1, train/rm/trainer.py",
    bias=True,
)
# Two numbers at the token: the score μ, then log σ.
RANKNET = PublishedLayout(
    "",
    rf"rm_head\.(?P<layer>\d+)\.{KIND}",
    "",
    "relu",
    layers=["0", "3", "5"],
    bias=True,
    rows=[2],
    question=["{text_prompt}"],
    pixels=256 * 28 * 28,
    text_positions=True,
)
EDIT = replace(
    RANKNET,
    name="editreward",
    head=rf"rm_heads\.(?P<head>\w+)\.(?P<layer>\d+)\.{KIND}",
    source="TIGER-AI-Lab/EditReward edb027e, model/qwen2_5_vl_trainer.py",
    ids=["editreward"],
    outputs={"following": Output("<|Reward|>", "head_0"), "quality": Output("<|Reward|>", "head_1")},
    model_types=["qwen2_5_vl"],
)
# LLaVA-NeXT's names to transformers'.
LLAVA_NEXT = {
    r"^model\.vision_tower\.vision_tower\.": "model.vision_tower.",
    r"^model\.mm_projector\.0\.": "model.multi_modal_projector.linear_1.",
    r"^model\.mm_projector\.2\.": "model.multi_modal_projector.linear_2.",
    r"^model\.(layers|norm|embed_tokens)\b": r"model.language_model.\1",
}

LAYOUTS = (
    VALUE_HEAD,
    replace(
        VALUE_HEAD,
        name="skywork",
        ids=["skywork-vl-reward"],
        source="the model card of Skywork/Skywork-VL-Reward-7B; arXiv:2505.07263",
    ),
    PublishedLayout(
        "score",
        rf"score\.{KIND}",
        "transformers, GenericForSequenceClassification; TRL, RewardTrainer; ms-swift 3602360, model/patcher.py",
    ),
    PublishedLayout(
        "basereward",
        rf"(?:score|v_head|rm_head|reward_head|value_head)\.(?:\w+\.)??(?P<layer>\d+)\.{KIND}",
        "arXiv:2509.16127, section on the reward head; its code is not published",
        "silu",
        ids=["basereward"],
    ),
    replace(
        RANKNET,
        name="hpsv3",
        source="the package hpsv3 of MizzenAI; arXiv:2508.03789",
        ids=["hpsv3"],
        outputs={"mu": Output("<|Reward|>")},
        model_types=["qwen2_vl"],
        base="Qwen/Qwen2-VL-7B-Instruct",
    ),
    # Its program for Qwen3-VL leaves positions and sizes to the library, which that for Qwen2.5-VL does not.
    replace(
        EDIT,
        name="editreward_qwen3",
        ids=["editreward-qwen3"],
        text_positions=False,
        pixels=None,
        model_types=["qwen3_vl"],
        source="TIGER-AI-Lab/EditReward edb027e, model/qwen3_vl_trainer.py",
    ),
    EDIT,
    PublishedLayout(
        "videoalign",
        rf"rm_head\.{KIND}",
        "KwaiVGI/VideoAlign 219ab9d, trainer.py and inference.py",
        bias=False,
        rows=[1, 3],
        ids=["videoreward", "videoalign"],
        outputs={name: Output(f"<|{name}_reward|>") for name in ("VQ", "MQ", "TA")},
        question=["{text_prompt}"],
        text_positions=True,
        model_types=["qwen2_vl"],
        base="Qwen/Qwen2-VL-2B-Instruct",
        settings="model_config.json",
    ),
    PublishedLayout(
        "mm_rlhf",
        rf"rm_head\.(?P<layer>dense|out_proj)\.{KIND}",
        "Kwai-YuanQi/MM-RLHF 7c8af1d, llava/model/language_model/llava_qwen.py and llava/eval/eval_mm_reward_bench.py",
        "tanh",
        layers=["dense", "out_proj"],
        bias=True,
        ids=["mm-rlhf-reward"],
        question=["{question}", "{answer}"],
        turn=llava_turn,
        model_types=["llava_onevision"],
        renamed=LLAVA_NEXT,
        base="llava-hf/llava-onevision-qwen2-7b-ov-hf",
    ),
)
BY_NAME = {layout.name: layout for layout in LAYOUTS}


def named_layout(source: str | Path, name: str | None = None) -> PublishedLayout | None:
    """Return the layout called `name`, or else that of a source's own name; None where it has none."""
    if name is not None and name not in BY_NAME:
        raise ConfigError(f"--layout is {name!r}: choose one of {', '.join(BY_NAME)}.")
    names = [part.lower() for part in Path(source).parts[-2:]]  # of a file and its folder, or of a repository
    called = (layout for layout in LAYOUTS if any(part.startswith(tuple(layout.ids)) for part in names))
    return BY_NAME[name] if name else next(called, None)


def find_layout(source: str | Path, names: Iterable[str], named: PublishedLayout | None) -> PublishedLayout:
    """Return the layout of a source's head: the one that is `named`, or else that of the names of its weights."""
    names = list(names)
    matching = [layout for layout in LAYOUTS if any(map(layout.matches, names))]
    if named is None:
        general = [layout for layout in matching if not layout.ids]
        if len(general) != 1:
            raise CheckpointError(_unrecognised(source, [layout.name for layout in matching], names))
        return general[0]
    if named not in matching:
        raise CheckpointError(
            f"{source} has no head of layout {named.name}: none of its {len(names)} weights is called as one"
            + (f"; --layout {matching[0].name} fits" if matching else "")
            + "."
        )
    return named


def _unrecognised(source: str | Path, matching: Sequence[str], names: Sequence[str]) -> str:
    if matching:
        return (
            f"{source} has a head that several models have, and each reads it at another token: say which it is by "
            f"--layout {' or '.join(matching)}."
        )
    if heads := [name for name in names if HEAD_WEIGHTS.search(name)]:
        return f"{source} has a trained head in no layout that is known ({heads[0]}): score it with its own code."
    return f"{source} has no reward head in its {len(names)} weights: train one, with vlmrm train."
