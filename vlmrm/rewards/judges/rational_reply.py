"""Replies of RationalRewards judges: one section an aspect, each with a line `Score:`.

The published form is

    # Detailed Judgement
    1. Text Faithfulness:
    ## Justification: ...
    ## Score: 3.5
    2. ...
    # Summary: ...

Models also write titles and scores in bold, other headings, `3/4`, `3,5` or `n/a`; all of it is read alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from vlmrm.errors import RewardError
from vlmrm.rewards.judges.scores import NOT_APPLICABLE, read_score, without_thinking

WORST, BEST = 1.0, 4.0
JUDGEMENT = re.compile(r"^[\s#*_]*Detailed Judge?ment\b", re.IGNORECASE)
SUMMARY = re.compile(r"^\s*(?:#+[\s*_]*|\*\*\s*)Summary\b", re.IGNORECASE)
SCORE = re.compile(r"(?:^|[^A-Za-z0-9_])Score[\s*_]*(?:\([^)]*\)[\s*_]*)?(?:[:=]|：)(?P<value>.*)$", re.IGNORECASE)
NUMBERED = re.compile(r"^[\s#*_>-]*\d+\s*[.):]")

Score = float | str | None


def read_aspects(reply: str, titles: Mapping[str, str]) -> dict[str, Score]:
    """The score of each aspect, `"N/A"`, or None where the reply has none.

    Args:
        titles: of the aspects by their names, as they stand in the headings.
    """
    lines = _judgement(without_thinking(reply).splitlines())
    # A numbered heading may have more words than the title; one without a number has none, but may stand anywhere.
    sections = _sections(lines, titles, _numbered_heading)
    if not sections:
        title = "|".join(map(re.escape, titles.values()))
        parts = [part for line in lines for part in re.split(rf"(?i)(?=\b(?:{title})\s*[:：])", line)]
        sections = _sections(parts, titles, _plain_heading)
    return {name: _score(sections.get(name, ())) for name in titles}


def aggregate(scores: Mapping[str, Score]) -> float:
    """(m - 1) / 3 in [0, 1], with m the mean of the scores that apply, each clamped to [1, 4].

    Raises:
        RewardError: when an aspect has no score, so that the reply is not whole, or none applies.
    """
    missing = [name for name, score in scores.items() if score is None]
    if missing:
        raise RewardError(f"the reply has no score for {', '.join(missing)}")
    present = [min(BEST, max(WORST, float(score))) for score in scores.values() if score not in (None, NOT_APPLICABLE)]
    if not present:
        raise RewardError("the reply says of every aspect that it does not apply")
    return (sum(present) / len(present) - WORST) / (BEST - WORST)


def _judgement(lines: list[str]) -> list[str]:
    """Without the analysis before it, where a prompt may be quoted that looks like a judgement, and the summary."""
    start = max((number for number, line in enumerate(lines) if JUDGEMENT.match(line)), default=0)
    end = next((number for number in range(start, len(lines)) if SUMMARY.match(lines[number])), len(lines))
    return lines[start:end]


def _sections(
    lines: Sequence[str], titles: Mapping[str, str], heading: Callable[[str, str], bool]
) -> dict[str, list[list[str]]]:
    """The lines under each aspect's headings, from the heading itself."""
    found: dict[str, list[list[str]]] = {}
    current: list[str] = []
    for line in lines:
        name = next((name for name, title in titles.items() if heading(line, title)), None)
        if name is not None:
            current = []
            found.setdefault(name, []).append(current)
        current.append(line)
    return found


def _numbered_heading(line: str, title: str) -> bool:
    return NUMBERED.match(line) is not None and title.lower() in line.lower()


def _plain_heading(line: str, title: str) -> bool:
    return re.match(rf"^[\s#*_>-]*{re.escape(title)}[\s*_]*(?::|：|$)", line, re.IGNORECASE) is not None


def _score(sections: Sequence[Sequence[str]]) -> Score:
    """The first score of the last section that has one."""
    for lines in reversed(sections):
        for line in lines:
            found = SCORE.search(line)
            score = read_score(found["value"], BEST) if found else None
            if score is not None:
                return score
    return None
