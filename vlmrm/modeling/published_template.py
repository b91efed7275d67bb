"""The chat template of a published model that asks a question of its own about each conversation.

Its instruction is wording that vlmrm does not contain: it comes from a file. The imported chat template writes it as
the authors' code does, around the prompt and the answer, and ends where they read the score.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

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
