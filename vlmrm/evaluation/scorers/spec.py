"""What `scorer` names: KIND:BODY?key=value&key=value, an address, a folder or a hub id."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import yaml

from vlmrm.errors import ConfigError
from vlmrm.settings import did_you_mean, nearest, nearest_file

FORMS = {
    "hf": "hf:ID, the id or folder of a sequence classifier",
    "reward": "reward:NAME, a registered reward, or reward:FILE.yaml",
    "judge": "judge:MODEL@http://host:port/v1",
    "python": "python:module.function",
}
SECRETS = ("api_key", "token", "password")
CREDENTIALS = re.compile(rf"(?<=//)[^/?#@]*@|(?<=[?&])((?:{'|'.join(SECRETS)})=)[^&]*")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Spec:
    """One scorer as it was written."""

    kind: str  # a key of `FORMS`, `http`, or `checkpoint` for a folder or hub id of ours
    body: str  # what stands between the kind and the options
    options: Mapping[str, str]  # the values after `?`
    text: str  # all of it, without the credentials of an address

    @property
    def suffix(self) -> str:
        """Return the options as they are written, to tell apart scorers of one body."""
        return self.text[self.text.index("?") :] if self.options else ""

    def take(self, names: Collection[str]) -> dict[str, str]:
        """Return the options, all of which must be among `names`."""
        for name in self.options:
            if name in SECRETS:
                raise ConfigError(
                    f"scorer {self.kind}: {name} would be written into the results: name the environment variable "
                    "that holds it, as api_key_env."
                )
            if name not in names:
                choose = f": it takes {', '.join(names)}." if names else ": it takes no options."
                raise ConfigError(f"scorer {self.text} has no option {name}{did_you_mean(name, names, choose)}")
        return dict(self.options)

    def typed(self) -> dict[str, Any]:
        """Return the options as YAML reads them: numbers, true and false."""
        return {name: yaml.safe_load(value) for name, value in self.options.items()}


def read_spec(text: str) -> Spec:
    """Return a scorer's specification."""
    if Path(text).is_dir():
        return Spec("checkpoint", text, {}, text)
    head, mark, query = text.partition("?")
    kind, colon, body = head.partition(":")
    text = CREDENTIALS.sub(lambda match: f"{match[1]}***" if match[1] else "", text)
    if kind in ("http", "https") and colon:
        return Spec("http", head, _options(text, query), text)
    if kind in FORMS and colon:
        if not body:
            raise ConfigError(f"scorer {text} names nothing: write {FORMS[kind]}.")
        return Spec(kind, body, _options(text, query), text)
    if colon and re.fullmatch(r"\w+", kind):
        near = nearest(kind.lower(), (*FORMS, "http"), 0.5)
        hint = (
            f"did you mean {near}:?" if near else f"write {', '.join(FORMS.values())}, http://host:port or a folder."
        )
        raise ConfigError(f"scorer {text} begins with {kind}:, which is no kind of scorer: {hint}")
    if not mark and HUB_ID.fullmatch(text) and not Path(text).parent.is_dir():
        return Spec("checkpoint", text, {}, text)
    raise ConfigError(f"scorer {text} does not exist{nearest_file(Path(text), ': check the path.')}")


def _options(text: str, query: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(query, strict_parsing=bool(query)))
    except ValueError:
        raise ConfigError(f"scorer {text}: write its options as ?key=value&key=value.") from None
