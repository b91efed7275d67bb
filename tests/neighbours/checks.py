"""What every driver shares: the case it is given, and the report that it prints. It runs in each environment.

    python drive_NAME.py CASE.json REPORT.json

A driver has checks by name. It returns conversations with the reward that the framework came to, which
`drive.py` compares with `load_scorer`, or what happened, in words; or it fails.
"""

from __future__ import annotations

import base64
import importlib
import json
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

QUESTION = "Which colour is this?"
ANSWERS = ("It is red.", "It may be blue, I think.")
NOT_DONE = {"proved": False, "what": "not done"}


@dataclass(frozen=True)
class Case:
    """What a driver is given: folders and addresses of this machine."""

    url: str  # of `vlmrm serve`
    model: str  # the checkpoint that it serves
    away: str  # where nothing listens
    policy: str  # a tiny vision-language model to be trained
    pictures: list[str]  # two that differ
    broken: str  # a file that is cut off
    folder: str  # an empty one

    def rows(self) -> list[tuple[str, str]]:
        """Return both answers to each picture."""
        return [(picture, answer) for picture in self.pictures for answer in ANSWERS]


def asked(picture: Any) -> list[dict[str, Any]]:
    """The user's turn, with a picture in it."""
    return [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": QUESTION}]}]


def scored(picture: str, answer: str, reward: Any) -> dict[str, Any]:
    """A conversation with the reward that a framework came to."""
    return {"messages": [*asked(picture), {"role": "assistant", "content": answer}], "reward": float(reward)}


def drawn(picture: str, reward: Any) -> dict[str, Any]:
    """A conversation whose answer is a picture, with the reward that a framework came to."""
    question = {"role": "user", "content": [{"type": "text", "text": QUESTION}]}
    answer = {"role": "assistant", "content": [{"type": "image", "image": picture}]}
    return {"messages": [question, answer], "reward": float(reward)}


def data_uri(picture: str) -> str:
    return "data:image/png;base64," + base64.b64encode(Path(picture).read_bytes()).decode()


def recipe(framework: str, url: str, folder: str) -> ModuleType:
    """The Python that docs/rewards.md has for a framework, as a module; with this address."""
    page = Path(__file__).parents[2].joinpath("docs", "rewards.md").read_text(encoding="utf-8")
    code = re.search(rf"^\*\*{re.escape(framework)}\.\*\*.*?^```text\n(.*?)^```", page, re.M | re.S)
    assert code, f"docs/rewards.md has no recipe for {framework}"
    name = f"recipe_{len(list(Path(folder).iterdir()))}"
    Path(folder, f"{name}.py").write_text(code[1].replace("http://host:8080", url), encoding="utf-8")
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    return importlib.import_module(name)


def raised(call: Callable[[], Any], *words: str) -> str:
    """Return what a call is refused with, all of it, which must have these words."""
    try:
        got = call()
    except BaseException as error:
        said = "\n".join(chain(error))  # without source lines, where these words stand themselves
        missing = [word for word in words if word not in said]
        assert not missing, f"its error does not say {missing}: {said[-600:]}"
        return f"the run ends with {type(error).__name__}"
    raise AssertionError(f"nothing was raised; it gave {got!r:.200}")


def chain(error: BaseException | None) -> list[str]:
    """Return what an error and those behind it say, with their types."""
    if error is None:
        return []
    parts = [one for part in getattr(error, "exceptions", ()) for one in chain(part)]
    return [f"{type(error).__name__}: {error}", *parts, *chain(error.__cause__ or error.__context__)]


def main(checks: Mapping[str, Callable[[Case], Any]]) -> None:
    """Run the checks one after another and write what came of each as soon as it did."""
    case = Case(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    report: dict[str, dict[str, Any]] = dict.fromkeys(checks, NOT_DONE)
    for name, check in checks.items():
        try:
            report[name] = {"proved": True, "what": check(case)}
        except BaseException as error:
            report[name] = {"proved": False, "what": f"{type(error).__name__}: {error}"[:600]}
            traceback.print_exc()
        written = Path(sys.argv[2] + ".part")
        written.write_text(json.dumps(report), encoding="utf-8")
        written.replace(sys.argv[2])  # whole at all times: the driver may be ended
