"""Numbers as judges write them: `3.5`, `**3**`, `3/4`, `2 out of 4`, `[3,5]`, `N/A (no text)`."""

from __future__ import annotations

import re

NOT_APPLICABLE = "N/A"
DECORATION = r"[\s*_`\[\](){}<>\"']*"
NUMBER = r"[-+]?(?:\d+(?:[.,]\d+)?|\.\d+)"
VALUE = re.compile(
    rf"^{DECORATION}(?:(?P<none>n\s*/\s*a|not applicable)\b|"
    rf"(?P<number>{NUMBER})(?![\d%])(?:{DECORATION}(?:/|out\s+of){DECORATION}(?P<of>\d+(?:\.\d+)?))?)",
    re.IGNORECASE,
)


def read_score(text: str, best: float) -> float | str | None:
    """The score that `text` begins with, `"N/A"`, or None where there is none or it is not out of `best`.

    A comma is taken for a decimal point. The number may lie outside the scale; that is for the caller to judge.
    """
    found = VALUE.match(text)
    if found is None:
        return None
    if found["none"]:
        return NOT_APPLICABLE
    if found["of"] is not None and float(found["of"]) != best:
        return None
    return float(found["number"].replace(",", "."))


def without_thinking(text: str) -> str:
    """The reply after what the model thought aloud, where there may be scores that it then dropped."""
    return text.rpartition("</think>")[2]
