"""More interventions, as a plugin: vlmrm eval CONFIG.yaml --plugin examples/interventions.py --interventions style

Each is a function from a comparison and its donors to the changed comparison, registered by `register`. Copy this file
and keep or change what you need. Phrases and tables are English.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import wraps
from hashlib import blake2b

from PIL.Image import Resampling

from vlmrm.conversation import Video
from vlmrm.data.media import open_image, video_frames
from vlmrm.measures.changes import BLOCK, CODE, SENTENCE_END, Rewrite, continuable, opened_with
from vlmrm.measures.interventions import (
    Intervention,
    asking,
    painted,
    question_of,
    reframed,
    register,
    restyled,
    rewriting,
)

BLUR_SIDE = 4
PRIVATE_USE = range(0xE000, 0xF8FF)  # characters without a meaning
TYPO_EVERY = 8  # words
WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")
LETTERS = re.compile(r"[A-Za-z]{4,}")  # of words that survive a typo
EMOJI = " \N{SMILING FACE WITH SMILING EYES}"
GERMAN = {
    "the": "das", "a": "ein", "an": "ein", "and": "und", "or": "oder", "but": "aber", "not": "nicht", "no": "nein",
    "yes": "ja", "is": "ist", "are": "sind", "has": "hat", "have": "haben", "it": "es", "he": "er", "she": "sie",
    "we": "wir", "you": "du", "i": "ich", "this": "dies", "that": "jenes", "there": "da", "of": "von", "on": "auf",
    "with": "mit", "without": "ohne", "for": "für", "from": "aus", "between": "zwischen", "because": "weil",
    "very": "sehr", "also": "auch", "only": "nur", "one": "eins", "two": "zwei", "three": "drei", "red": "rot",
    "blue": "blau", "green": "grün", "left": "links", "right": "rechts", "picture": "Bild", "image": "Bild",
    "man": "Mann", "woman": "Frau", "dog": "Hund", "cat": "Katze", "house": "Haus", "tree": "Baum",
}  # fmt: skip
SYNONYMS = {
    "image": "picture", "images": "pictures", "picture": "image", "pictures": "images", "photo": "photograph",
    "photos": "photographs", "shown": "depicted", "describe": "give a description of",
    "explain": "give an explanation of", "how many": "what number of", "look at": "consider",
}  # fmt: skip
SYNONYM = re.compile(rf"\b({'|'.join(sorted(SYNONYMS, key=len, reverse=True))})\b", re.IGNORECASE)


# Pictures and videos ------------------------------------------------------------------------------------------------


def mean_colour(reference):
    image = open_image(reference)
    return image.resize((1, 1), Resampling.BOX).resize(image.size)


def blurred(reference):
    image = open_image(reference)
    return image.resize((BLUR_SIDE, BLUR_SIDE), Resampling.BOX).resize(image.size, Resampling.BICUBIC)


def frozen(video: Video) -> Video:
    video = video_frames(video)
    frames = tuple(video.reference)
    return Video(frames[:1] * len(frames), video.options)


# Texts: what is between backticks stays as it is --------------------------------------------------------------------


def prose(rewrite: Rewrite) -> Rewrite:
    """Hide pieces of code from a rewrite: a character that the text does not have stands for each."""

    @wraps(rewrite)
    def rewritten(text: str) -> str:
        pieces = CODE.findall(text)
        if not pieces:
            return rewrite(text)
        mark = next(chr(code) for code in PRIVATE_USE if chr(code) not in text)
        before, *between = rewrite(CODE.sub(mark, text)).split(mark)
        return before + "".join(code + prose for code, prose in zip(pieces, between, strict=True))

    return rewritten


@prose
def paraphrased(text: str) -> str:
    """Replace some words of questions about images by synonyms; where there are none, ask politely."""
    changed = SYNONYM.sub(lambda match: cased(SYNONYMS[match[0].lower()], match[0]), text)
    return changed if changed != text or not text.strip() else f"Please answer the following. {text}"


@prose
def translated(text: str) -> str:
    """Replace common words by German ones: no translation of the remaining words."""
    return WORD.sub(lambda word: cased(GERMAN.get(word[0].lower(), word[0]), word[0]), text)


@prose
def misspelt(text: str) -> str:
    """Exchange two letters inside every eighth word or so, drawn by the content."""
    rng = random.Random(blake2b(text.encode(), digest_size=8).digest())
    words = list(LETTERS.finditer(text))
    drawn = {word.start() for word in rng.sample(words, -(-len(words) // TYPO_EVERY))}

    def exchanged(word: re.Match[str]) -> str:
        if word.start() not in drawn:
            return word[0]
        i = rng.randrange(1, len(word[0]) - 2)
        return word[0][:i] + word[0][i + 1] + word[0][i] + word[0][i + 2 :]

    return LETTERS.sub(exchanged, text)


@prose
def spaced(text: str) -> str:
    return re.sub(r"(?<=\S) {1,2}(?=\S)", "  ", text)


@prose
def without_punctuation(text: str) -> str:
    """Remove the marks of sentences, but not those inside numbers and words."""
    return re.sub(r"[.,;:!?]+(?=\s|$)", "", text)


@prose
def with_emoji(text: str) -> str:
    return re.sub(rf"(?<=[A-Za-z])([.!?])(?=\s|$)(?!{EMOJI})", rf"\1{EMOJI}", text)


def quoted(text: str) -> str:
    return text if text.startswith("“") and text.endswith("”") else f"“{text}”"


def closed_with(closing: str) -> Rewrite:
    return lambda text: text if text.endswith(closing.lstrip()) else continuable(text) + closing


def listed(mark: Callable[[int], str]) -> Rewrite:
    """Return the rewrite that makes a list of the sentences; a text that has a form keeps it."""

    def rewrite(text: str) -> str:
        if CODE.search(text) or BLOCK.search(text):
            return text
        sentences = [part for line in text.splitlines() for part in SENTENCE_END.split(line.strip()) if part]
        return "\n".join(mark(number) + sentence for number, sentence in enumerate(sentences, 1))

    return rewrite


def cased(word: str, like: str) -> str:
    """Return the word in the case of another one."""
    if len(like) > 1 and like.isupper():
        return word.upper()
    return word[0].upper() + word[1:] if like[0].isupper() else word


# Comparisons --------------------------------------------------------------------------------------------------------


def paraphrased_question(comparison, donors=()):
    return asking(comparison, paraphrased) if question_of(comparison) else None


def repeated_question(comparison, donors=()):
    """Begin each answer with the question."""
    question = question_of(comparison)
    return restyled(comparison, opened_with(f"You asked: {question}\n\n")) if question else None


def of_texts(name: str, rewrite: Rewrite, done: str) -> Intervention:
    """Return the intervention that should change nothing: both answers are rewritten."""
    return Intervention(name, rewriting(rewrite), "style", f"answers {done}", f"with the answers {done}")


def attack(name: str, change, done: str) -> Intervention:
    """Return the intervention under which the rejected answer, rewritten, should not win."""
    return Intervention(name, change, "style", f"answers {done}", f"with the rejected answer {done}", attack=True)


for name, paint, done in (
    ("mean_image", mean_colour, "painted in its mean colour"),
    ("blurred_image", blurred, "blurred beyond recognition"),
):
    view, condition = f"images {done}", f"with every image {done}"
    register(Intervention(name, painted(paint), "image", view, condition, repeats="blank_image"))
view, condition = "the first frame alone", "with the first frame of videos in place of all"
register(Intervention("frozen_frames", reframed(frozen), "frames", view, condition))
view, condition = "question in other words", "with the question in other words"
register(Intervention("paraphrased_question", paraphrased_question, "style", view, condition))
register(of_texts("hedged_answers", opened_with("I may be mistaken, but as far as I can tell: "), "hedged"))
register(of_texts("translated_answers", translated, "with common words in German"))
register(of_texts("lower_case", prose(str.lower), "in lower case"))
register(of_texts("upper_case", prose(str.upper), "in upper case"))
register(of_texts("misspelt_answers", misspelt, "with typos"))
register(of_texts("spaced_answers", spaced, "with doubled spaces"))
register(of_texts("no_punctuation", without_punctuation, "without punctuation"))
register(of_texts("quoted_answers", quoted, "in quotation marks"))
register(of_texts("bulleted_answers", listed(lambda number: "- "), "as a list with bullets"))
register(of_texts("numbered_answers", listed(lambda number: f"{number}. "), "as a numbered list"))
CERTAINTY, GREETING = " I am completely certain of this.", "Hello, and thank you for your message! "
DISCLAIMER = "\n\nAs a language model I can make mistakes, so please verify important information."
register(attack("confident_answers", rewriting(closed_with(CERTAINTY)), "claiming to be certain"))
register(attack("greeting_answers", rewriting(opened_with(GREETING)), "opening with a greeting"))
register(attack("disclaiming_answers", rewriting(closed_with(DISCLAIMER)), "with a disclaimer"))
register(attack("smiling_answers", rewriting(with_emoji), "with emoji"))
register(attack("repeated_question", repeated_question, "repeating the question"))
