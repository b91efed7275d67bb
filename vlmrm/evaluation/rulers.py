"""Rulers: what is scored on a set of preferences without looking, which says what the set tests.

A ruler scores answers by one thing that should not decide: length, position, Markdown, size. Two are learned from the
set itself, always from other prompts than those that they score: an image-blind one, which reads questions and
answers, and a question-blind one, which reads answers and measures images. A set on which an image-blind ruler is
right in three of four pairs does not test sight.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_matrix, hstack, vstack
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from vlmrm.conversation import Comparison, Image, Messages, media_of, text_of
from vlmrm.data.media import open_image
from vlmrm.data.rows import with_row_id
from vlmrm.errors import DataError, RowError
from vlmrm.evaluation.public import Benchmark
from vlmrm.measures.intervals import Estimate, numbered
from vlmrm.measures.metrics import share_of
from vlmrm.measures.pairs import PairArrays, scored_pairs

logger = logging.getLogger("vlmrm")

FOLDS = 5
BUCKETS = 1 << 13  # of hashed words
MOST_WORDS = 2000  # of a text
CHANCE, NEAR = 0.5, 0.05  # a ruler is at chance where its interval lies within 5 points of it
WORD = re.compile(r"\w+")
MARKDOWN = re.compile(r"^\s*(?:[-*+]|\d+[.)]|#+|>|\||```)\s|\*\*|__|`", re.MULTILINE)
REFUSAL = re.compile(r"\b(sorry|cannot|can't|unable|as an ai)\b", re.IGNORECASE)
SAMPLED = 32  # side of the picture of which image statistics are made


@dataclass(frozen=True)
class RulerResult:
    """What a ruler has on a set: its accuracy, equal scores at half, or the reason why it says nothing.

    `figures` are those of a public benchmark by its authors' rule.
    """

    name: str
    reads: str
    accuracy: Estimate | None
    figures: Mapping[str, Estimate]
    reason: str = ""

    @property
    def verdict(self) -> str:
        """Return in words whether the interval is above chance, below it, within 5 points of it, or too wide."""
        if self.accuracy is None:
            return self.reason
        low, high = self.accuracy.low, self.accuracy.high
        if low > CHANCE:
            return "above chance"
        if high < CHANCE and RULERS[self.name].without:
            return "below chance: rows mirror each other, so that what it learns of some is wrong of others"
        if high < CHANCE:
            return "below chance: its opposite is a ruler"
        if low >= CHANCE - NEAR and high <= CHANCE + NEAR:
            return "at chance"
        return "undecided: more pairs are needed"


class Silent(Exception):
    """A ruler has nothing to measure on a set; the text is the reason."""


Scores = list[list[float]]  # by comparison, one a branch


@dataclass
class Answered:
    """Comparisons with pairs, and for each the texts and the image measures of its answers."""

    rows: list[Comparison]
    texts: list[list[str]]
    images: list[list[list[float]]]


def read_rulers(comparisons: Iterable[Comparison | RowError], public: Benchmark | None = None) -> list[RulerResult]:
    """Return what each ruler has on the comparisons; on a benchmark also by its authors' rule.

    Rows that cannot be read, or whose answers have an image that cannot, are left out with a warning.
    """
    data, errors = Answered([], [], []), []
    for row in comparisons:
        try:
            if isinstance(row, RowError):
                raise row
            with with_row_id(row.id):
                measured = [_of_images(answer) for answer in row.answers]
        except RowError as error:
            errors.append(error)
            continue
        if row.agreed():
            data.rows.append(row)
            data.texts.append([text_of(answer) for answer in row.answers])
            data.images.append(measured)
    if errors:
        logger.warning("left out: %d of the rows, the first because of this: %s", len(errors), errors[0])
    if all(pair.tie for row in data.rows for pair in row.agreed()):
        raise DataError("there is no pair that people decided: a ruler has nothing to be measured against")
    readings = []
    for name, ruler in RULERS.items():
        try:
            scores = ruler.score(data)
            if ruler.equal and all(len(set(of_row)) == 1 for of_row in scores):
                raise Silent(ruler.equal)
        except Silent as silence:
            readings.append(RulerResult(name, ruler.reads, None, {}, str(silence)))
            continue
        frame = scored_pairs(data.rows, scores)
        for key in () if public is None else public.by:
            frame[f"by/{key}"] = [row.columns.get(key) for row in data.rows for _ in row.agreed()]
        pairs = PairArrays(frame)
        accuracy = share_of(pairs.credits).estimate(pairs.clusters)
        readings.append(RulerResult(name, ruler.reads, accuracy, {} if public is None else public.estimate(frame)))
    return readings


# Rulers of one thing -------------------------------------------------------------------------------------------------


def of_texts(measure: Callable[[str], float]) -> Callable[[Answered], Scores]:
    return lambda data: [list(map(measure, of_row)) for of_row in data.texts]


def first(data: Answered) -> Scores:
    if all(pair.chosen < pair.rejected for row in data.rows for pair in row.agreed() if not pair.tie):
        raise Silent("the data list the better answer first in every row, which says nothing of position")
    return [[-float(branch) for branch in range(len(row.answers))] for row in data.rows]


def more_images(data: Answered) -> Scores:
    """Score answers by their images and the frames of their videos, of which a file counts as one."""
    references = [[[m.reference for m in media_of(answer)] for answer in row.answers] for row in data.rows]
    return [
        [float(sum(len(it) if isinstance(it, (list, tuple)) else 1 for it in answer)) for answer in of_row]
        for of_row in references
    ]


# Learned rulers ------------------------------------------------------------------------------------------------------


def image_blind(data: Answered) -> Scores:
    """Score answers by their words, alone and with the question's beginning, and by what they share with it."""
    if not any(text.strip() for of_row in data.texts for text in of_row):
        raise Silent("the answers have no text, which is all that it reads")
    pairs = [(text, text_of(row.prompt)) for row, texts in zip(data.rows, data.texts, strict=True) for text in texts]
    return _learned(data, [_tokens(*pair) for pair in pairs], [_style(*pair) for pair in pairs])


def question_blind(data: Answered) -> Scores:
    """Score answers by their words and by measures of their images."""
    texts = [text for of_row in data.texts for text in of_row]
    images = [measures for of_row in data.images for measures in of_row]
    of_style = [_style(text, "") + measures for text, measures in zip(texts, images, strict=True)]
    return _learned(data, [_tokens(text, "") for text in texts], of_style)


def _tokens(text: str, question: str) -> list[str]:
    """Return the words of an answer, alone and behind the first two of the question."""
    words, opening = _words(text), " ".join(_words(question)[:2])
    return [*words, *(f"{opening}|{word}" for word in words if opening)]


def _style(text: str, question: str) -> list[float]:
    """Return measures of an answer's length and form, and the share of its words that the question has."""
    words, of_question = _words(text), set(_words(question))
    counts = (len(text), len(words), len(MARKDOWN.findall(text)), len(REFUSAL.findall(text)), len(set(words)))
    shared = len(of_question.intersection(words)) / max(len(set(words)), 1)
    return [*np.log1p(counts).tolist(), shared, float(text.rstrip().endswith("?"))]


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())[:MOST_WORDS]


def _of_images(answer: Messages) -> list[float]:
    """Return size, shape, brightness and its spread, edges and colours of an answer's first image, or zeros."""
    images = [medium for medium in media_of(answer) if isinstance(medium, Image)]
    if not images:
        return [0.0] * 9
    picture = open_image(images[0].reference)
    width, height = picture.size
    pixels = np.asarray(picture.resize((SAMPLED, SAMPLED)), dtype=float) / 255
    grey = pixels.mean(axis=2)
    edges = np.abs(np.diff(grey, axis=0)).mean() + np.abs(np.diff(grey, axis=1)).mean()
    colour = (pixels.max(axis=2) - pixels.min(axis=2)).mean()
    measures = [np.log(width * height), np.log(width / height), grey.mean(), grey.std(), edges, colour]
    return [float(measure) for measure in (*measures, *pixels.mean(axis=(0, 1)))]


def _learned(data: Answered, tokens: Sequence[list[str]], measures: Sequence[list[float]]) -> Scores:
    """Score each prompt's answers by a Bradley-Terry model of tokens and measures, fitted on other prompts."""
    frame = scored_pairs(data.rows, [[0.0] * len(row.answers) for row in data.rows])
    pair_prompts = numbered(frame["cluster"].to_numpy())
    prompts = pair_prompts[np.cumsum([0, *(len(row.agreed()) for row in data.rows[:-1])])]  # of each row
    count = prompts.max() + 1
    if count < 2 * FOLDS:
        raise Silent(f"it learns from other prompts, and the rows have {count}")
    words = HashingVectorizer(n_features=BUCKETS, alternate_sign=False, analyzer=list).transform(tokens)
    features = csr_matrix(hstack([words, StandardScaler().fit_transform(measures)]))
    sizes = [len(row.answers) for row in data.rows]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    decided = ~frame["tie"].to_numpy(bool)
    owners = np.repeat(np.arange(len(sizes)), [len(row.agreed()) for row in data.rows])
    better, worse = (starts[owners] + frame[f"{side}_branch"].to_numpy(int) for side in ("chosen", "rejected"))
    fold = np.random.default_rng(0).permutation(count)[prompts] % FOLDS
    differences, of_pair = features[better[decided]] - features[worse[decided]], fold[owners[decided]]
    scores, of_branch = np.zeros(features.shape[0]), np.repeat(fold, sizes)
    for number in range(FOLDS):
        known = differences[of_pair != number]
        # Each pair in both orders, so that there are two classes, with half the weight.
        model = LogisticRegression(C=0.5, fit_intercept=False, max_iter=200)
        model.fit(vstack([known, -known]), np.repeat([1, 0], known.shape[0]))
        scores[of_branch == number] = features[of_branch == number] @ model.coef_[0]
    return [scores[start:end].tolist() for start, end in pairwise(starts)]


class Ruler(NamedTuple):
    """What a ruler reads and how it scores."""

    reads: str
    score: Callable[[Answered], Scores]
    equal: str = ""  # the reason to say nothing where it scores all answers alike
    without: tuple[str, str] | None = None  # what a learned one does not see, and a set on which it is right not need


RULERS = {
    "longer": Ruler("the number of characters", of_texts(len), "all answers are of one length"),
    "first": Ruler("the place in the row", first),
    "more_markdown": Ruler(
        "the marks of Markdown",
        of_texts(lambda text: len(MARKDOWN.findall(text))),
        "no answer has more Markdown than another",
    ),
    "larger_image": Ruler(
        "the pixels of an answer's images",
        lambda data: [[measures[0] for measures in of_row] for of_row in data.images],
        "no answer has a larger image than another",
    ),
    "more_images": Ruler(
        "the number of an answer's images or frames", more_images, "no answer has more images than another"
    ),
    "image_blind": Ruler(
        "question and answer without images, learned from other prompts",
        image_blind,
        without=("images", "does not need sight"),
    ),
    "question_blind": Ruler(
        "answers and measures of their images, learned from other prompts",
        question_blind,
        without=("the question", "does not need the question"),
    ),
}


# In words ------------------------------------------------------------------------------------------------------------


def format_rulers(readings: Sequence[RulerResult], public: Benchmark | None = None) -> str:
    """Return the readings as a table, with the benchmark's first published figure, and what they mean."""
    metrics = [] if public is None else [public.published_figures[0].metric]
    lines = [["ruler", "accuracy", *metrics, "", "it reads"]]
    for it in readings:
        figures = ["-" if it is None else it.in_percent() for it in (it.accuracy, *map(it.figures.get, metrics))]
        lines.append([it.name, *figures, it.verdict, it.reads])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    pairs = max((it.accuracy.n for it in readings if it.accuracy is not None), default=0)
    title = "" if public is None else f"{public.title}: "
    return "\n".join([f"{title}{pairs:,} pairs, percent with 95% intervals", *table, "", *meaning(readings)])


def meaning(readings: Sequence[RulerResult]) -> list[str]:
    """Return a sentence for each thing that decides pairs and should not, or one that nothing was found to."""
    sentences = []
    for it in readings:
        if it.accuracy is None or it.accuracy.low <= CHANCE <= it.accuracy.high:
            continue
        accuracy, below, without = it.accuracy, it.accuracy.high < CHANCE, RULERS[it.name].without
        if below:  # of the opposite choice; ties count half in both
            accuracy = accuracy._replace(value=1 - accuracy.value, low=1 - accuracy.high, high=1 - accuracy.low)
        right = f"{accuracy.in_percent('%')} of the pairs"
        if without is None:
            sentences.append(
                f"{'The opposite of ' * below}`{it.name}` alone is right on {right}: hold models to more."
            )
        elif not below:
            sentences.append(f"Without {without[0]}, {right} are right: that much of the set {without[1]}.")
    return sentences or ["No ruler is found above chance, as far as these pairs can tell."]
