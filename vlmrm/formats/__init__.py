"""Outside formats of conversations, comparisons and samples, one file per format, with their readers and writers.

`LAYOUTS` are those of preference data; `LAYOUTS_TO_SCORE` add rows of answers without preferences. A part that a
format cannot express is an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vlmrm.errors import ConfigError, DataError
from vlmrm.formats import annotation_tools, preferences, public_sets, ratings, rollouts, verdicts
from vlmrm.formats.layout import MEDIA, Layout
from vlmrm.settings import nearest

# The first match reads the row, so the specific layouts come before the general ones.
LAYOUTS: list[Layout] = [
    *(annotation_tools.label_studio, annotation_tools.argilla),
    *(public_sets.openai_preferences, public_sets.llava_rlhf, public_sets.povid),
    *(preferences.pick_a_pic, preferences.image_reward, ratings.hpdv2, preferences.hpsv3, preferences.image_pair),
    *(ratings.ranked, ratings.ranking, ratings.completions),
    *(verdicts.text_verdict, verdicts.image_verdict, verdicts.video_verdict),
    *(preferences.alpaca, preferences.sharegpt, preferences.swift, preferences.pair, public_sets.rlhf_v),
]
LAYOUTS_TO_SCORE = [*LAYOUTS, rollouts.prompt_response, rollouts.conversation]


def register(layout: Layout) -> None:
    """Add a layout before all others, as a plugin does: rows that it matches are read by it."""
    if any(known.name == layout.name for known in LAYOUTS_TO_SCORE):
        raise ConfigError(f"there is already a layout {layout.name}: give yours another name.")
    LAYOUTS.insert(0, layout)
    LAYOUTS_TO_SCORE.insert(0, layout)


def detect_layout(columns: Iterable[str], layouts: Sequence[Layout] = LAYOUTS) -> Layout:
    """Return the first of `layouts` that reads columns of these names."""
    names = frozenset(columns)
    for layout in layouts:
        if layout.matches(names):
            return layout
    raise DataError(
        f"no known layout has the columns {', '.join(sorted(names)) or '(none)'}: {_hint(names, layouts)} "
        "(docs/data.md shows every layout)"
    )


# What people call columns; a column of the same letters, or nearly, needs no entry.
SYNONYMS = {
    "chosen": (
        *("preferred", "accepted", "winner", "better", "positive", "good", "win", "best", "selected"),
        *("chosen_response", "chosen_answer", "response_chosen", "answer_chosen", "preferred_response", "y_w"),
    ),
    "rejected": (
        *("dispreferred", "reject", "refused", "loser", "worse", "negative", "bad", "lose", "worst", "unchosen"),
        *("rejected_response", "rejected_answer", "response_rejected", "answer_rejected", "dispreferred_response"),
        "y_l",
    ),
    "chosen_image": ("preferred_image", "winner_image", "image_chosen", "win_image", "better_image"),
    "rejected_image": ("dispreferred_image", "loser_image", "image_rejected", "lose_image", "worse_image"),
    "prompt": ("query", "question", "instruction", "prompts", "input", "caption"),
    "responses": ("candidates", "outputs", "generations", "replies"),
    "scores": ("rewards", "grades"),
}
SIDES = {"left": "a", "right": "b", "first": "a", "second": "b"}
# Stems of columns that are about two answers, and hold none.
NO_ANSWERS = frozenset(
    ["score", "rating", "rank", "label", "vote", "votes", "model", "image", "img", "picture", "video", "path"]
)
SIMILAR = 0.75  # of a column's name to the one that is needed
ONE_ANSWER = frozenset(["response", "answer", "completion", "output", "image", "video", "video link", "filename"])
RATING = ("rating", "score", "rank", "quality", "helpfulness", "correctness", "alignment", "label")


PROMPTS = MEDIA | {"prompt", "question", "instruction"}  # which say nothing about the layout


def _hint(names: frozenset[str], layouts: Sequence[Layout]) -> str:
    """Return the end of the error about columns that no layout has: the nearest layout, or what to rename."""
    guesses = [_Guess.of(layout, names) for layout in layouts]
    guess = max(guesses, key=lambda guess: (guess.share, -len(guess.mapping), len(guess.layout.columns() & names)))
    rated = any(name.lower().endswith(RATING) for name in names)
    if guess.share < 1 and rated and ONE_ANSWER & names:
        return ratings.ONE_ANSWER
    if guess.share < 0.5:
        such = (
            "`prompt` and `response`" if rollouts.prompt_response in layouts else "`prompt`, `chosen` and `rejected`"
        )
        return f"rename them to those of one, such as {such}"
    missing = guess.layout.missing(names.union(guess.mapping)) or guess.layout.missing(names)
    hint = f"the nearest is `{guess.layout.name}`, which also needs {missing}"
    if guess.mapping:
        listed = ", ".join(f"{name}: {column}" for name, column in sorted(guess.mapping.items()))
        hint += f"; `columns: {{{listed}}}` says what is what"
    return hint


@dataclass(frozen=True)
class _Guess:
    """Guess a layout: `mapping` from its columns to those meant, and the `share` of its columns that are there."""

    layout: Layout
    mapping: dict[str, str]
    share: float

    @classmethod
    def of(cls, layout: Layout, names: frozenset[str]) -> _Guess:
        unused = names - layout.columns()
        mapping: dict[str, str] = {}
        present: set[str] = set()
        needed = 0
        for group in ((layout.required,), *layout.groups):
            left = unused - {*mapping.values()}
            options = [(_meant(columns - names, left), columns) for columns in group]
            meant, columns = max(options, key=lambda it: (len(it[0]) + len(it[1] & names)) / max(len(it[1]), 1))
            mapping |= meant
            present |= columns & names
            needed += len(columns)
        share = (len(present) + len(mapping)) / needed if present.union(mapping) - PROMPTS else 0.0
        share = 0.0 if layout.without & names else share
        return cls(layout, mapping, share)


def _meant(missing: frozenset[str], unused: frozenset[str]) -> dict[str, str]:
    """Return unused columns that are probably meant as the missing ones, by the names of these."""
    mapping: dict[str, str] = {}
    for name in sorted(missing):
        left = sorted(unused - {*mapping.values()})
        column = next((it for it in left if _plain(it) == _plain(name)), None)
        known = {_plain(synonym) for synonym in SYNONYMS.get(name, ())}
        column = column or next((it for it in left if _plain(it) in known), None) or nearest(name, left, SIMILAR)
        # One answer or one score is no list of them.
        if column is not None and column.lower() + "s" != name:
            mapping[name] = column
    return mapping or (_two_answers(unused) if missing == {"response_a", "response_b"} else {})


def _two_answers(columns: frozenset[str]) -> dict[str, str]:
    """Return columns that differ in their side alone, such as `caption_left` and `caption_right`, as two answers."""
    pairs: dict[frozenset[str], dict[str, str]] = {}
    for column in sorted(columns):
        words = re.findall(r"[a-z]+|\d", with_sides(column))
        side = next((word for word in words[-1:] + words[:1] if word in ("a", "b", "1", "2")), "")
        name = "response_" + side.replace("1", "a").replace("2", "b")
        if side and not NO_ANSWERS.intersection(words):
            pairs.setdefault(frozenset(words) - {side}, {})[name] = column
    return next((pair for pair in pairs.values() if len(pair) == 2), {})


def _plain(name: str) -> str:
    return "".join(letter for letter in with_sides(name) if letter.isalnum())


def with_sides(name: str) -> str:
    """Return a column's name in small letters, with `left` and `right` as the sides `a` and `b`."""
    return re.sub("|".join(SIDES), lambda match: SIDES[match[0]], name.lower())
