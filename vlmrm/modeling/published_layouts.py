"""Describe the layouts of published reward models: how to recognise each, and what its authors compute.

A score is always read at the last token of a branch. Where the authors read it at a token in the middle, the imported
chat template ends with that token: attention is causal, so nothing after it changes the score. Where they read several
at tokens, or under instructions, of their own, each has a branch; a shared batch computes their common tokens once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from vlmrm.errors import CheckpointError, ConfigError
from vlmrm.modeling.manifest import HEAD_WEIGHTS
from vlmrm.outputs import ONE, Output, Outputs

# Where the authors ask a question of their own, its wording comes from a file: vlmrm does not contain it. The imported
# chat template writes it as their code does, around the prompt.
MARK = "\ue000"  # private use: in no chat template
# Of a conversation: its media in reading order, and the text of its user.
COLLECTED = """\
{%- set ns = namespace(media="", prompt="") -%}
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
    {{- raise_exception("this model scores an image or a video as the answer to a text, and the answer has a text") -}}
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
PROMPT = "{text_prompt}"  # its place in an instruction
# Of an episode: the instruction, then each frame with its token, by the model's own template up to the last of them.
FRAMES = """\
{%- set ns.parts = [{"type": "text", "text": INSTRUCTION}] -%}
{%- for _ in ns.media -%}
  {%- set ns.parts = ns.parts + [{"type": "image"}, {"type": "text", "text": TOKEN}] -%}
{%- endfor -%}
{%- set messages = [{"role": "user", "content": ns.parts}] -%}
{%- set add_vision_id = true -%}
{%- set written -%}OWN{%- endset -%}
{{- written.rsplit(TOKEN, 1)[0] ~ TOKEN -}}
"""


def question_template(processor: Any, instructions: Mapping[str, str]) -> str:
    """Return a chat template in Jinja: a user's turn of the media, then the instruction, which ends in its token.

    The instruction is the one of the `output` that is asked for, by default the last.
    """
    before = _written(processor, []).split(MARK)[0]
    collected = COLLECTED
    for kind in ("image", "video"):
        medium = f"raise_exception('this model takes no {kind}')"
        with suppress(TemplateError):  # of a template that knows no videos
            start = _written(processor, [kind]).split(MARK)[0]
            if start != before and start.startswith(before):
                medium = _literal(start.removeprefix(before))
        collected = collected.replace(kind.upper(), medium)
    bodies = [
        f"{_literal(name)}: " + _literal(text).replace(PROMPT, '" ~ ns.prompt ~ "')
        for name, text in instructions.items()
    ]
    body = f"{{{', '.join(bodies)}}}[output | default({_literal([*instructions][-1])})]"
    return f"{collected}{{{{- {_literal(before)} ~ ns.media ~ {body} -}}}}"


def frames_template(processor: Any, instruction: str, token: str) -> str:
    """Return a chat template in Jinja: a user's turn of the instruction, then of each frame and its token."""
    no_video = "raise_exception('this model takes no video')"
    collected = COLLECTED.replace("IMAGE", _literal(MARK)).replace("VIDEO", no_video)
    body = _literal(instruction).replace(PROMPT, '" ~ ns.prompt ~ "')
    parts = {"INSTRUCTION": body, "TOKEN": _literal(token), "OWN": processor.chat_template}
    return collected + re.sub("|".join(parts), lambda match: parts[match[0]], FRAMES)


def _literal(text: str) -> str:
    """Quote a text as a string of Jinja, without JSON's escapes: it reads a surrogate pair as two characters."""
    return json.dumps(text, ensure_ascii=False)


def _written(processor: Any, media: Sequence[str]) -> str:
    content = [*({"type": kind} for kind in media), {"type": "text", "text": MARK}]
    messages = [{"role": "user", "content": content}]
    return processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


# Layouts -------------------------------------------------------------------------------------------------------------

KIND = r"(?P<kind>weight|bias)"


@dataclass(frozen=True)
class Place:
    """Where one of the outputs of a published model is read."""

    token: str  # the reward token
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
    ids: Sequence[str] = ()  # beginnings of the names of repositories and folders, in lower case; none for any
    outputs: Outputs = ONE
    # Of each output, where authors ask by an instruction, in `--template`; else the checkpoint's chat template asks.
    places: Mapping[str, Place] = field(default_factory=dict)
    pixels: int | None = None  # area of every image
    least_pixels: int | None = None  # of an image
    frames: bool = False  # the token follows each frame of an episode, and the last one is read
    norms: Sequence[str] = ()  # those of `layers` that normalise
    unread: str = r"(?!)"  # pattern of further weights that are no part of the backbone
    more_tokens: Sequence[str] = ()  # that the authors add to the tokenizer, before those at which they read
    text_positions: bool = False  # its images had the positions of text
    model_types: Sequence[str] = ()  # of the backbones that its authors compute so; empty for any
    base: str | None = None  # repository of its configuration and processor, where it comes without
    settings: str | None = None  # file with `peft_lora_config`, and `inference_config` to normalise each output

    @property
    def tokens(self) -> list[str]:
        """The reward tokens; the authors add them to the tokenizer in this order."""
        return list(dict.fromkeys([*self.more_tokens, *(place.token for place in self.places.values())]))

    @property
    def heads(self) -> list[str | None]:
        """The groups in the names of the head's weights, of each head that the outputs have."""
        return list(dict.fromkeys(place.head for place in self.places.values())) or [None]

    def matches(self, name: str) -> re.Match[str] | None:
        """Return the match of a weight's name, if it is one of the head's."""
        return re.fullmatch(rf"(?:\w+\.)*?{self.head}", name)


VALUE_HEAD = PublishedLayout(
    "value_head",
    rf"v_head\.summary\.{KIND}",
    "TRL, AutoModelForCausalLMWithValueHead; LLaMA-Factory ff6d4d1, train/rm/trainer.py",
    bias=True,
)
# Two numbers at the token: μ and log σ, as those of a Gaussian output.
RANKNET = PublishedLayout(
    "",
    rf"rm_head\.(?P<layer>\d+)\.{KIND}",
    "",
    "relu",
    layers=["0", "3", "5"],
    bias=True,
    outputs=Outputs((Output("mu", "gaussian"),)),
    places={"mu": Place("<|Reward|>")},
    pixels=256 * 28 * 28,
    text_positions=True,
)
EDIT = replace(
    RANKNET,
    name="editreward",
    head=rf"rm_heads\.(?P<head>\w+)\.(?P<layer>\d+)\.{KIND}",
    source="TIGER-AI-Lab/EditReward edb027e, model/qwen2_5_vl_trainer.py",
    ids=["editreward"],
    outputs=Outputs(tuple(Output(name, "gaussian", weight=0.5, apart=True) for name in ("following", "quality"))),
    places={"following": Place("<|Reward|>", "head_0"), "quality": Place("<|Reward|>", "head_1")},
    model_types=["qwen2_5_vl"],
)
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
        ids=["videoreward", "videoalign"],
        outputs=Outputs(tuple(Output(name, apart=True) for name in ("VQ", "MQ", "TA"))),
        places={name: Place(f"<|{name}_reward|>") for name in ("VQ", "MQ", "TA")},
        text_positions=True,
        model_types=["qwen2_vl"],
        base="Qwen/Qwen2-VL-2B-Instruct",
        settings="model_config.json",
    ),
    PublishedLayout(
        "robometer",
        rf"(?P<head>progress|success)_head\.(?P<layer>\d+)\.{KIND}",
        "robometer/robometer c7f38e2, models/heads.py and rbm.py",
        "gelu",
        layers=["0", "1", "4"],
        norms=["1"],
        bias=True,
        ids=["robometer"],
        outputs=Outputs((Output("done", "progress", bins=10), Output("success", "correctness", weight=0))),
        places={"done": Place("<|prog_token|>", "progress"), "success": Place("<|prog_token|>", "success")},
        frames=True,
        unread=r"(preference_head|frame_pool_attn)\..*",
        more_tokens=[f"<|{name}_token|>" for name in ("split", "reward", "pref", "sim")],
        least_pixels=4 * 32 * 32,
        model_types=["qwen3_vl"],
        base="Qwen/Qwen3-VL-4B-Instruct",
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
