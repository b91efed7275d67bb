"""What every driver shares: the case it is given, and the report that it prints. It runs in each environment.

    python drive_NAME.py CASE.json REPORT.json

A driver has checks by name. `equal` returns conversations with the reward that the framework came to, which
`drive.py` compares with `load_scorer`; the others return what happened, in words, or fail.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

QUESTION = "Which colour is this?"
ANSWERS = ("It is red.", "It may be blue, I think.")


@dataclass(frozen=True)
class Case:
    """What a driver is given: folders and addresses of this machine."""

    url: str  # of `vlmrm serve`
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


def raised(call: Callable[[], Any], *words: str) -> str:
    """Return what a call is refused with, all of it, which must have these words."""
    try:
        got = call()
    except BaseException as error:
        said = "".join(traceback.format_exception(error))
        missing = [word for word in words if word not in said]
        assert not missing, f"its error does not say {missing}: {said[-600:]}"
        return f"the run ends with {type(error).__name__}"
    raise AssertionError(f"nothing was raised; it gave {got!r:.200}")


def main(checks: Mapping[str, Callable[[Case], Any]]) -> None:
    """Run the checks one after another and write what came of each."""
    case = Case(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    report = {}
    for name, check in checks.items():
        try:
            report[name] = {"proved": True, "what": check(case)}
        except BaseException as error:
            report[name] = {"proved": False, "what": f"{type(error).__name__}: {error}"[:600]}
            traceback.print_exc()
        Path(sys.argv[2]).write_text(json.dumps(report), encoding="utf-8")
