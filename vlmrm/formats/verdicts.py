"""Verdicts: rows of two answers in columns of their own, and who or what won in another column.

The answers are texts or conversations (`response_a`, `response_b`), images or videos. The verdict is a word (`a`,
`left`, `tie`), the winning column, model or answer, several of these from several raters, counts of votes, or a score
for each side. A number that could mean either answer is never read.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from vlmrm.conversation import Judgement, Message, shorten
from vlmrm.errors import RowError
from vlmrm.formats.layout import (
    MEDIA,
    Layout,
    ParsedRow,
    Row,
    first_of,
    image_turn,
    layout,
    prompt_turns,
    records,
    video_turn,
    with_media,
)
from vlmrm.formats.preferences import read_pair

Sides: TypeAlias = tuple[str, str]

FIRST, SECOND, TIE = (1.0, 0.0), (0.0, 1.0), (0.0, 0.0)

SUFFIXES = (("_a", "_b"), ("_A", "_B"), ("A", "B"), ("_1", "_2"), ("1", "2"), ("_0", "_1"))
STEMS = ("response", "answer", "output", "completion", "candidate", "conversation", "human_ref")


def _named(stems: Sequence[str]) -> list[Sides]:
    return [(stem + a, stem + b) for stem in stems for a, b in SUFFIXES]


TEXTS = [*_named(STEMS), ("left_response", "right_response")]
IMAGES = [*_named(("image", "img")), ("left_image", "right_image"), ("left_output_image", "right_output_image")]
VIDEOS = [*_named(("video",)), ("left_video", "right_video"), ("path_A", "path_B")]

INDEX = ("winner", "preferred", "choice", "better", "best")  # columns in which a number is that of an answer
SIGNED = ("overall_preference", "preference_strength")  # HelpSteer: -3 for the first to 3 for the second
RATERS = "individual_preference"  # beside the former what each rater said, as `score`
WORDS = (
    *(*INDEX, "preference", "label", "verdict", "vote", "vote_type", "chosen", "Overall", "overall"),
    *("preferences", "labels", "verdicts", "votes"),
)
ONE_HOT = ("winner_model_a", "winner_model_b", "winner_tie")  # LMSYS on Kaggle
DIMENSIONS = ("VQ", "MQ", "TA")  # VideoAlign: visual quality, motion quality and text alignment
LIMIT = 3  # of the SIGNED columns
# A name with `.responses` is Argilla's: the answers of all raters to that question.
VERDICTS = [f"{name}{end}" for end in ("", ".responses") for name in (*WORDS, *SIGNED)] + [ONE_HOT[0]]
COUNTS, SCORES = "votes", ("score", "rating")
NUMBERS = [tuple(stem + end for end in ends) for stem in (COUNTS, *SCORES) for ends in SUFFIXES]

PROMPTS = (
    *("prompt", "question", "instruction", "query", "context", "messages", "conversations", "history", "caption"),
    "instruct_prompt",
)
FIGURES = frozenset((*VERDICTS, *ONE_HOT, *DIMENSIONS, *(name for pair in NUMBERS for name in pair))) - {"chosen"}
EXTRAS = (*ONE_HOT, RATERS, "votes_tie", *(f"{name}.responses.{end}" for name in WORDS for end in ("status", "users")))


def _layout(
    name: str, sides: Sequence[Sides], more: Sequence[str] = (), optional: Sequence[str] = ()
) -> Callable[[Callable[[Row], ParsedRow]], Layout]:
    verdicts = [*((column,) for column in (*VERDICTS, *more)), *NUMBERS]
    # `chosen` and `rejected` answers are the answers, whatever else the row has: two images of the question, say.
    return layout(
        name, any_of=[sides, verdicts], optional=[*MEDIA, "system", *PROMPTS, *EXTRAS, *optional], without=["rejected"]
    )


@_layout("two answers and a verdict", TEXTS, optional=["input"])
def text_verdict(row: Row) -> ParsedRow:
    sides = _sides_of(row, TEXTS)
    if isinstance(row.get("instruction"), str) and isinstance(row.get("input"), str):  # Alpaca's
        row = {**row, "instruction": "\n".join(text for text in (row["instruction"], row["input"]) if text)}
    chat = _chat(row, sides) if ONE_HOT[0] in row else None
    parsed = read_pair(chat or row, sides, PROMPTS)
    if "instruction" not in row or "instruction" in parsed.skipped:
        parsed = replace(parsed, skipped=parsed.skipped | {"input"})
    return judged(replace(parsed, skipped=parsed.skipped - {"prompt"}) if chat else parsed, row, sides)


@_layout("two images and a verdict", IMAGES, optional=["source_image"])
def image_verdict(row: Row) -> ParsedRow:
    sides = _sides_of(row, IMAGES)
    return judged(media_pair(row, sides, image_turn), row, sides)


@_layout("two videos and a verdict", VIDEOS, more=DIMENSIONS)
def video_verdict(row: Row) -> ParsedRow:
    sides = _sides_of(row, VIDEOS)
    return judged(media_pair(row, sides, video_turn), row, sides)


def media_pair(row: Row, sides: Sides, turn: Callable[[Any], Message]) -> ParsedRow:
    """Return the images or videos of two columns as answers to the row's prompt, the first as the better."""
    column = first_of(row, ("instruct_prompt", *PROMPTS))  # of an edit; its `prompt` would describe a picture
    image = {"image": row["source_image"]} if "source_image" in row else {}
    before = with_media({**row, **image}, prompt_turns({**row, **image}, row.get(column) if column else None))
    answers = [(*before, turn(row[side])) for side in sides]
    skipped = frozenset(PROMPTS) - {column} | (frozenset({"image"}) if image and "image" in row else frozenset())
    return ParsedRow(answers, FIRST, len(before), skipped=skipped)


def _sides_of(row: Row, vocabulary: Sequence[Sides]) -> Sides:
    """Return the columns of the two answers."""
    complete = [sides for sides in vocabulary if sides[0] in row and sides[1] in row]
    extra = sorted({name for sides in vocabulary for name in sides if name in row} - set(complete[0]))
    if extra:
        raise RowError(
            f"it has `{complete[0][0]}`, `{complete[0][1]}` and `{extra[0]}`: a verdict is about two answers"
        )
    return complete[0]


def _chat(row: Row, sides: Sides) -> dict[str, Any] | None:
    """Read an LMSYS row with lists of turns as whole conversations; None for a row with a plain prompt."""
    prompts = _turns(row.get("prompt"))
    answers = {side: _turns(row[side]) for side in sides}
    if prompts is None:
        return None
    chat = {name: value for name, value in row.items() if name != "prompt"}
    for side, turns in answers.items():
        if turns is None or len(turns) != len(prompts) or not all(isinstance(text, str) for text in prompts + turns):
            raise RowError(f"`prompt` and `{side}` must hold one text for each turn: remove the row")
        chat[side] = [
            message
            for ask, reply in zip(prompts, turns, strict=True)
            for message in (Message.of("user", ask), Message.of("assistant", reply))
        ]
    return chat


def _turns(value: Any) -> list[Any] | None:
    if isinstance(value, str) and value.startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    is_turns = isinstance(value, list) and value and not any(isinstance(turn, Mapping) for turn in value)
    return value if is_turns else None


# Verdicts ------------------------------------------------------------------------------------------------------------


def judged(parsed: ParsedRow, row: Row, sides: Sides) -> ParsedRow:
    """Return two answers with the verdict of the row's other columns, or with the reason why it has none."""
    parsed = replace(parsed, figures=FIGURES)
    try:
        return _judged(parsed, row, sides)
    except RowError as error:
        return replace(parsed, unjudged=error.reason)


def _judged(parsed: ParsedRow, row: Row, sides: Sides) -> ParsedRow:
    verdicts, unread = _agreed(row, sides)
    if verdicts is not None:
        return with_raters(parsed, verdicts)
    a, b = (suffix_of(side, sides) for side in sides)
    if (counts := _numbers(row, COUNTS, (a, b))) is not None:
        return _with_counts(parsed, [*counts, row.get("votes_tie", 0)])
    for stem in SCORES:
        if (scores := _numbers(row, stem, (a, b))) is not None:
            return _with_scores(parsed, stem, scores)
    if criteria := [name for name in DIMENSIONS if name in row]:
        judgements = [
            Judgement((0, 1), read_word(row, name, row[name], sides), weight=1 / len(criteria), dimension=name)
            for name in criteria
        ]
        return with_judgements(parsed, judgements)
    raise unread or RowError(f"no column says which of `{sides[0]}` and `{sides[1]}` is better")


def verdicts_on(row: Row, name: str) -> list[Judgement]:
    """Return what the words in a column say of the row's two answers in one dimension, of each rater."""
    sides = next((it for them in (TEXTS, IMAGES, VIDEOS) for it in them if it[0] in row and it[1] in row), None)
    if sides is None:
        raise RowError(f"`{name}` holds {shorten(row[name])}: write a number for each answer")
    verdicts = read_verdicts(row, name, sides)
    return [Judgement((0, 1), values, weight=1 / len(verdicts), dimension=name) for values in verdicts]


def _agreed(row: Row, sides: Sides) -> tuple[list[tuple[float, float]] | None, RowError | None]:
    """Return what the columns of verdicts say, or why the first that is there says nothing.

    Beside one that says something, others (a `label` of another kind) need not.
    """
    verdicts: dict[str, list[tuple[float, float]]] = {}
    unread: RowError | None = None
    for name in VERDICTS:
        if name in row:
            try:
                verdicts[name] = read_verdicts(row, name, sides)
            except RowError as error:
                unread = unread or error
    names = list(verdicts)
    for name in names[1:]:
        if verdicts[name] != verdicts[names[0]]:
            raise RowError(f"`{names[0]}` and `{name}` do not agree on the better answer")
    return (verdicts[names[0]] if names else None), unread


def with_raters(parsed: ParsedRow, verdicts: Sequence[Sequence[float]]) -> ParsedRow:
    """Return answers with the verdicts of one rater or several, each the values of all answers.

    Equal verdicts are one judgement; its weight is the share of the raters. In the loss these are soft labels.
    """
    if not verdicts:
        raise RowError("nobody has judged its answers")
    counts = Counter(map(tuple, verdicts)).items()
    order = tuple(range(len(verdicts[0])))
    return with_judgements(
        parsed, [Judgement(order, values, parsed.kind, weight=count / len(verdicts)) for values, count in counts]
    )


def with_judgements(parsed: ParsedRow, judgements: Sequence[Judgement]) -> ParsedRow:
    """Return answers with judgements of all of them."""
    columns = zip(*(judgement.values for judgement in judgements), strict=True)
    means = [sum(j.weight * value for j, value in zip(judgements, column, strict=True)) for column in columns]
    return replace(parsed, values=means, judgements=tuple(judgements) if len(judgements) > 1 else ())


def _with_counts(parsed: ParsedRow, counts: Sequence[Any]) -> ParsedRow:
    if any(isinstance(count, bool) or not isinstance(count, (int, float)) or count < 0 for count in counts):
        raise RowError(f"its counts of votes are {shorten(list(counts))}: write numbers of 0 or more")
    total = sum(counts)
    if not total:
        raise RowError("it has no votes")
    judgements = [
        Judgement((0, 1), values, weight=count / total)
        for values, count in zip((FIRST, SECOND, TIE), counts, strict=True)
        if count
    ]
    return with_judgements(parsed, judgements)


def _with_scores(parsed: ParsedRow, stem: str, scores: Sequence[Any]) -> ParsedRow:
    lists = [value if isinstance(value, (list, tuple)) else [value] for value in scores]
    if len(lists[0]) != len(lists[1]) or not lists[0]:
        raise RowError(f"the answers have {len(lists[0])} and {len(lists[1])} {stem}s: give both those of all raters")
    for value in (*lists[0], *lists[1]):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise RowError(f"a {stem} is {shorten(value)}: write a number")
    return with_raters(replace(parsed, kind="rating"), list(zip(*lists, strict=True)))


def _numbers(row: Row, stem: str, suffixes: Sides) -> tuple[Any, Any] | None:
    """Return the cells of `score_a` and `score_b`, in any spelling of the suffixes that the answers have."""
    for join in ("_", ""):
        for change in (str, str.lower):
            names = [f"{stem}{join}{change(suffix)}" for suffix in suffixes]
            if all(name in row for name in names):
                return row[names[0]], row[names[1]]
    return None


def read_verdicts(row: Row, column: str, sides: Sides) -> list[tuple[float, float]]:
    """Return the values of the two answers that each rater in a column gives them."""
    if column == ONE_HOT[0]:
        marks = [row.get(name, 0) for name in ONE_HOT]
        if sorted(marks) != [0, 0, 1]:
            raise RowError(f"`{ONE_HOT[0]}`, `{ONE_HOT[1]}` and `{ONE_HOT[2]}` are {marks}: one of them must be 1")
        return [(FIRST, SECOND, TIE)[marks.index(1)]]
    value = row[column]
    if column == SIGNED[0] and row.get(RATERS):
        value = [answer.get("score") for answer in records(row[RATERS], RATERS)]
    if column == COUNTS and isinstance(value, Mapping) and all(type(count) is int for count in value.values()):
        value = [word for word, count in value.items() for _ in range(count)]
    if isinstance(value, Mapping) or (isinstance(value, (list, tuple)) and _is_records(value)):
        answers = records(value, column)
        if all("rank" in answer for answer in answers):
            return [_ranked(column, answers, sides)]
        value = [answer.get("value") for answer in answers if answer.get("status", "submitted") == "submitted"]
    elif isinstance(value, (list, tuple)):
        states = row.get(f"{column}.status") or ["submitted"] * len(value)
        if len(states) != len(value):
            raise RowError(f"`{column}` has {len(value)} answers and {len(states)} states")
        value = [answer for answer, state in zip(value, states, strict=True) if state == "submitted"]
    else:
        value = [value]
    column = column.removesuffix(".responses")
    return [_verdict(row, column, answer, sides) for answer in value]


def _is_records(value: Sequence[Any]) -> bool:
    return bool(value) and all(isinstance(item, Mapping) for item in value)


def _verdict(row: Row, column: str, value: Any, sides: Sides) -> tuple[float, float]:
    if isinstance(value, Mapping) or (isinstance(value, (list, tuple)) and _is_records(value)):
        return _ranked(column, records(value, column), sides)
    return read_word(row, column, value, sides)


def _ranked(column: str, ranking: Sequence[Mapping[str, Any]], sides: Sides) -> tuple[float, float]:
    """Return Argilla's ranking, `[{"rank": 1, "value": "response_a"}, ...]`, of two answers."""
    ranks: dict[Any, Any] = {item.get("value"): item.get("rank") for item in ranking}
    if set(ranks) != set(sides) or not all(isinstance(rank, int) for rank in ranks.values()):
        raise RowError(f"`{column}` must rank `{sides[0]}` and `{sides[1]}`, and is {shorten(list(ranking))}")
    return _better(ranks[sides[1]] - ranks[sides[0]])


def _better(difference: float) -> tuple[float, float]:
    """Return the values of two answers; the first is better by `difference`."""
    return FIRST if difference > 0 else SECOND if difference < 0 else TIE


# Words around a verdict that say nothing about it: `model_a`, `Response A is better`, `leftvote`.
FILLERS = frozenset(
    [
        *("model", "response", "answer", "assistant", "output", "completion", "candidate", "conversation", "option"),
        *("image", "img", "picture", "video", "path", "text", "choice", "vote"),
        *("the", "is", "was", "much", "slightly"),
        *("better", "wins", "win", "won", "preferred", "one"),
    ]
)
MEANINGS = {
    **dict.fromkeys(["a", "left", "first"], FIRST),
    **dict.fromkeys(["b", "right", "second"], SECOND),
    **dict.fromkeys(["tie", "tied", "ties", "same", "equal", "equally", "draw"], TIE),
    **dict.fromkeys(["both", "both bad", "both good", "bothbad", "bothgood", "tie bothbad", "tie both bad"], TIE),
    **dict.fromkeys(["equally good", "equally bad", "about same", "neither"], TIE),
}
ARENA = re.compile(r"\[*([ab])(>+|<+|=+)([ab])\]*")  # A>B, [[A>>B]], A=B


def read_word(row: Row, column: str, value: Any, sides: Sides) -> tuple[float, float]:
    """Return what one word or number says of the two answers."""
    suffixes = [suffix_of(side, sides).lower() for side in sides]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if column in SIGNED and isinstance(value, int) and not isinstance(value, bool):
        if suffixes == ["1", "2"] and abs(value) <= LIMIT:
            return _better(-value)
    elif isinstance(value, str) and value.strip():
        text = value.strip()
        meant = [
            text in (side, row.get(f"model_{suffix}"), str(row[side]).strip())
            for side, suffix in zip(sides, suffixes, strict=True)
        ]
        if meant[0] != meant[1] and text.lower() not in suffixes:
            return FIRST if meant[0] else SECOND
        if arena := ARENA.fullmatch(text.lower().replace(" ", "")):
            first, sign, second = arena.groups()
            if {first, second} == {"a", "b"}:
                better = {">": 1, "<": -1, "=": 0}[sign[0]]
                return _better(better if first == "a" else -better)
        words = re.findall(r"[a-z]+|\d+", re.sub(r"vote\b", " vote", text.lower()))
        words = [word for word in words if word not in FILLERS]
        if " ".join(words) in MEANINGS:
            return MEANINGS[" ".join(words)]
        if len(words) == 1 and (text.lower() not in suffixes or _counts(column, suffixes)) and words[0] in suffixes:
            return FIRST if words[0] == suffixes[0] else SECOND
    elif str(value) in suffixes and not isinstance(value, bool) and _counts(column, suffixes):
        return FIRST if str(value) == suffixes[0] else SECOND
    raise RowError(
        f"`{column}` is {shorten(value)}, which does not say whether `{sides[0]}` or `{sides[1]}` is better, as a, "
        "b or tie would"
    )


def _counts(column: str, suffixes: Sequence[str]) -> bool:
    """Return whether a bare number in the column is that of an answer, not a truth value or a probability."""
    return column in INDEX or (column == "preference" and suffixes == ["1", "2"])


def suffix_of(side: str, sides: Sides) -> str:
    """Return the part of a side's column that the other does not have: a of `response_a`, left of `left_image`."""
    match = re.fullmatch(r"(left|right)_.*|.*?_?([ABab]|\d+)", side)
    return next((group for group in match.groups() if group), side) if match else side
