"""Rewrites of texts that keep their meaning: length, markdown, tone, case, typos, and so on.

Each is a deterministic function of a text, in the spirit of reWordBench (arXiv 2503.11751), and leaves code between
backticks alone. A text to which it does not apply comes back as it is. Phrases are English, and so is what is
replaced by table: on other languages such a rewrite is an insertion of English words.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import wraps
from hashlib import blake2b
from itertools import cycle

Rewrite = Callable[[str], str]

CODE = re.compile(r"(```.*?(?:```|\Z)|`[^`\n]+`)", re.DOTALL)
BLOCK = re.compile(r"^\s*(?:```|(?:[-*+]|\d+\.|#+|>|\|)\s)", re.MULTILINE)  # a line that is markdown
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")
LETTERS = re.compile(r"[A-Za-z]{4,}")  # of words that survive a typo
# Of each mark of markdown, with what is left of it; bold before italics.
MARKDOWN = {
    r"^([-*_])(?: ?\1){2,} *(?:\n|\Z)": "",
    r"^ {0,3}(?:#{1,6}|>|[-*+]|\d+\.)[ \t]+(?=\S)": "",
    r"(\*\*|__)(?=\S)([^*_\n]+?)(?<=\S)\1": r"\2",
    r"(?<![\w*])([*_])(?=\S)([^*_\n]+?)(?<=\S)\1(?![\w*])": r"\2",
}
TYPO_EVERY = 8  # words
PRIVATE_USE = range(0xE000, 0xF8FF)  # characters without a meaning

# True of any answer, and of no use to anybody.
FILLERS = (
    "There is more than one way to put this, but the point stays the same.",
    "It helps to look at the question carefully before answering it.",
    "The above is meant as an answer to what was asked.",
    "Taking everything into account, this is how the matter presents itself.",
    "Further words would not change the substance of this reply.",
)
HEADING = "## Answer\n\n"
HEDGE = "I may be mistaken, but as far as I can tell: "
AGREEMENT = "You are absolutely right, and this is an excellent question! "
CERTAINTY = " I am completely certain of this."
GREETING = "Hello, and thank you for your message! "
DISCLAIMER = "\n\nAs a language model I can make mistakes, so please verify important information."
REPETITION = "You asked: {question}\n\n"
EMOJI = " \N{SMILING FACE WITH SMILING EYES}"

# The commonest words of English, without regard to gender, case or order: enough that a text looks foreign.
GERMAN = {
    "the": "das", "a": "ein", "an": "ein", "and": "und", "or": "oder", "but": "aber", "not": "nicht", "no": "nein",
    "yes": "ja", "is": "ist", "are": "sind", "has": "hat", "have": "haben", "it": "es", "he": "er",
    "she": "sie", "we": "wir", "you": "du", "i": "ich", "this": "dies", "that": "jenes", "there": "da", "of": "von",
    "on": "auf", "with": "mit", "without": "ohne", "for": "für", "from": "aus", "under": "unter", "behind": "hinter",
    "between": "zwischen", "because": "weil", "if": "wenn", "very": "sehr", "also": "auch", "only": "nur",
    "one": "eins", "two": "zwei", "three": "drei", "four": "vier", "five": "fünf", "six": "sechs",
    "red": "rot", "blue": "blau", "green": "grün", "yellow": "gelb", "black": "schwarz", "white": "weiß",
    "left": "links", "right": "rechts", "large": "groß", "small": "klein", "many": "viele", "picture": "Bild",
    "image": "Bild", "man": "Mann", "woman": "Frau", "dog": "Hund", "cat": "Katze", "house": "Haus", "tree": "Baum",
}  # fmt: skip
SYNONYMS = {
    "image": "picture", "images": "pictures", "picture": "image", "pictures": "images", "photo": "photograph",
    "photos": "photographs", "shown": "depicted", "describe": "give a description of",
    "explain": "give an explanation of", "how many": "what number of", "look at": "consider",
}  # fmt: skip
SYNONYM = re.compile(rf"\b({'|'.join(sorted(SYNONYMS, key=len, reverse=True))})\b", re.IGNORECASE)


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


def padded(text: str) -> str:
    """Add sentences that say nothing, until the text is twice as long."""
    longer = _to_continue(text)
    for filler in cycle(FILLERS):
        longer += f" {filler}"
        if len(longer) >= 2 * len(text):
            return longer
    raise AssertionError


def of_length(length: int) -> Rewrite:
    """Return the rewrite that adds such sentences word by word, up to nearly `length` characters."""

    def lengthened(text: str) -> str:
        longer = start = _to_continue(text)
        for word in cycle(" ".join(FILLERS).split()):
            if len(longer) + 1 + len(word) > length:
                return text if longer == start else longer
            longer += f" {word}"
        raise AssertionError

    return lengthened


def with_markdown(text: str) -> str:
    """Add a heading, and set the first sentence in bold."""
    if text.startswith(HEADING):
        return text
    first, *further = SENTENCE_END.split(text.strip(), maxsplit=1)
    plain = "\n" in first or CODE.search(first) or "*" in first
    return HEADING + (text if plain else "\n\n".join([f"**{first}**", *further]))


@prose
def without_markdown(text: str) -> str:
    """Remove headings, bullets, rules, bold and italics, also inside each other."""
    stripped = text
    for pattern, content in MARKDOWN.items():
        stripped = re.sub(pattern, content, stripped, flags=re.MULTILINE)
    return text if stripped == text else without_markdown(stripped)


def opened_with(opening: str) -> Rewrite:
    """Return the rewrite that begins a text with `opening`."""
    return lambda text: text if text.startswith(opening.strip()) else opening + _of_its_own(text)


def closed_with(closing: str) -> Rewrite:
    """Return the rewrite that ends a text with `closing`."""
    return lambda text: text if text.endswith(closing.lstrip()) else _to_continue(text) + closing


hedged = opened_with(HEDGE)
agreeing = opened_with(AGREEMENT)
greeting = opened_with(GREETING)
confident = closed_with(CERTAINTY)
disclaiming = closed_with(DISCLAIMER)


@prose
def translated(text: str) -> str:
    """Replace common words by German ones, by table: crude, and no translation of the remaining words."""
    return WORD.sub(lambda word: _cased(GERMAN.get(word[0].lower(), word[0]), word[0]), text)


lower = prose(str.lower)
upper = prose(str.upper)


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
    """Double the spaces between words."""
    return re.sub(r"(?<=\S) {1,2}(?=\S)", "  ", text)


@prose
def without_punctuation(text: str) -> str:
    """Remove the marks of sentences, but not those inside numbers and words."""
    return re.sub(r"[.,;:!?]+(?=\s|$)", "", text)


def quoted(text: str) -> str:
    """Put the text between quotation marks."""
    return text if text.startswith("“") and text.endswith("”") else f"“{text}”"


def bulleted(text: str) -> str:
    """Make a list of the sentences, with bullets."""
    return _listed(text, lambda number: "- ")


def numbered(text: str) -> str:
    """Make a list of the sentences, with numbers."""
    return _listed(text, lambda number: f"{number}. ")


@prose
def with_emoji(text: str) -> str:
    """Add a smile to each sentence."""
    return re.sub(rf"(?<=[A-Za-z])([.!?])(?=\s|$)(?!{EMOJI})", rf"\1{EMOJI}", text)


def repeating(question: str) -> Rewrite:
    """Return the rewrite that begins a text with the question."""
    return opened_with(REPETITION.format(question=question.strip())) if question.strip() else lambda text: text


@prose
def paraphrased(text: str) -> str:
    """Replace some words of questions about images by synonyms, by table; where there are none, ask politely."""
    if not text.strip():
        return text
    changed = SYNONYM.sub(lambda match: _cased(SYNONYMS[match[0].lower()], match[0]), text)
    return changed if changed != text else f"Please answer the following. {text}"


def _to_continue(text: str) -> str:
    """Return a text that can go on: a line that closes a piece of code must end."""
    text = text.rstrip()
    return f"{text}\n" if text.endswith("```") else text


def _of_its_own(text: str) -> str:
    """Return a text that can follow another: a line that is markdown must begin."""
    return f"\n\n{text}" if BLOCK.match(text) else text


def _listed(text: str, mark: Callable[[int], str]) -> str:
    if CODE.search(text) or BLOCK.search(text):
        return text  # it has a form that would be lost
    sentences = [sentence for line in text.splitlines() for sentence in SENTENCE_END.split(line.strip()) if sentence]
    return "\n".join(mark(number) + sentence for number, sentence in enumerate(sentences, 1))


def _cased(word: str, like: str) -> str:
    """Return the word in the case of another one."""
    if len(like) > 1 and like.isupper():
        return word.upper()
    return word[0].upper() + word[1:] if like[0].isupper() else word
