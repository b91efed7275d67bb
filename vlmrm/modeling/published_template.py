"""The chat template of a published model that asks a question of its own about each conversation.

Its instruction is wording that vlmrm does not contain: it comes from a file. The imported chat template writes it as
the authors' code does, around the prompt and the answer, and ends where they read the score.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from vlmrm.errors import ConfigError

MARK = "\ue000"  # private use: in no chat template
# Of a conversation: its media in reading order, the texts of its user, and those of its assistant in turn.
COLLECTED = """\
{%- set ns = namespace(media="", prompt="", answers=[]) -%}
{%- for message in messages -%}
  {%- set text = namespace(joined="") -%}
  {%- for part in message["content"] -%}
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


def read_instruction(text: str, placeholders: Sequence[str], token: str | None, where: str) -> str:
    """Return an instruction up to the reward token, if there is one.

    Raises:
        ConfigError: when a placeholder or the token is not in it once.
    """
    for part in (*placeholders, *([token] if token else [])):
        if text.count(part) != 1:
            raise ConfigError(f"--template {where} has {part} {text.count(part)} times: write it once.")
    return text[: text.index(token) + len(token)] if token else text


def question_template(processor: Any, instruction: str, placeholders: Sequence[str], token: str | None) -> str:
    """Return a chat template in Jinja: media first, then the instruction, in the user's turn of the processor's own.

    With a reward token it ends there. Without, the answer's critique follows as the assistant's turn; where there is
    none, it ends where one would begin.
    """
    before, after = _turn(processor, []).split(MARK)
    pieces = {"IMAGE": _medium(processor, "image", before), "VIDEO": _medium(processor, "video", before)}
    collected = COLLECTED
    for name, written in pieces.items():
        refused = f"raise_exception('this model takes no {name.lower()}')"
        collected = collected.replace(name, json.dumps(written) if written else refused)
    values = {"{text_prompt}": "ns.prompt", "{question}": "ns.prompt", "{answer}": "ns.answers[0]"}
    body = json.dumps(instruction)
    for placeholder in placeholders:
        body = body.replace(placeholder, f'" ~ {values[placeholder]} ~ "')
    line_after_media = ' ~ ("\\n" if ns.media else "")' if "{answer}" in placeholders else ""
    ended = ""
    if token is None:
        closed = _closed(processor, after)
        ended = f' ~ {json.dumps(after)} ~ (ns.answers[1] ~ {json.dumps(closed)} if ns.answers | length == 2 else "")'
    checks = ONE_ANSWER if "{answer}" in placeholders else NO_ANSWER
    return f"{collected}{checks}{{{{- {json.dumps(before)} ~ ns.media{line_after_media} ~ {body}{ended} -}}}}"


def _turn(processor: Any, media: Sequence[str], *more: dict[str, Any], prompted: bool = True) -> str:
    content = [*({"type": kind} for kind in media), {"type": "text", "text": MARK}]
    messages = [{"role": "user", "content": content}, *more]
    return processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompted)


def _medium(processor: Any, kind: str, before: str) -> str | None:
    """Return what the processor's template writes for a medium; None where it writes nothing."""
    try:
        written = _turn(processor, [kind]).split(MARK)[0]
    except Exception:  # a template that knows no videos may raise anything
        return None
    return written.removeprefix(before) if written.startswith(before) and written != before else None


def _closed(processor: Any, after: str) -> str:
    """Return what the processor's template writes after the assistant's turn."""
    answer = {"role": "assistant", "content": [{"type": "text", "text": MARK}]}
    return _turn(processor, [], answer, prompted=False).split(MARK)[2]
