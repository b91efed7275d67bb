"""The types of the domain: conversations of text, images and videos, judgements of answers, and scores.

They are frozen, validated on construction (a RowError says what is wrong) and need no torch. `vlmrm.formats` reads
them from every outside format and writes them back; the rest of the package takes only these.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import combinations
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias

from vlmrm.errors import MediaError, RowError
from vlmrm.settings import nearest

if TYPE_CHECKING:
    from PIL import Image as PillowImage

# `vlmrm.data.media` opens a path, a `file://` or `data:` URI, an encoded file, or an image in memory.
Reference: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview | PillowImage.Image"

# Other names of the roles, from ShareGPT and others.
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
STANDARD_ROLES = ("user", "assistant", "system", "developer", "tool")  # a chat template may know more
OPTION_RANGE = (1e-6, 1e12)  # far beyond what means anything, and safe to compute with
MOST_MARGIN = 10.0  # log-odds of 22,000 to 1: no rater is that sure, so a larger one is on another scale
FRAME_PIXELS = (128 * 28**2, 768 * 28**2)  # of a resized frame by default, as in qwen-vl-utils


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of text.

    >>> Text("What is this?")
    Text(text='What is this?')
    """

    kind: ClassVar[Literal["text"]] = "text"
    text: str

    def __post_init__(self):
        if not isinstance(self.text, str):
            raise RowError(f"the text of a content part must be a text, got {shorten(self.text)}")
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            half = self.text[error.start]
            raise RowError(f"a text holds {half!r}, half of a character: mend how it was decoded") from None


@dataclass(frozen=True, slots=True)
class Image:
    """An image by its reference; None is a slot that `vlmrm.formats.texts` fills.

    >>> Image("cat.png")
    Image(reference='cat.png')
    """

    kind: ClassVar[Literal["image"]] = "image"
    reference: Reference | None = None

    def __post_init__(self):
        _check_reference(self.reference, "image")


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoOptions:
    """Sampling and resizing of a video, by the names of qwen-vl-utils; None leaves it to the configuration.

    >>> VideoOptions(fps=1.0).as_dict()
    {'fps': 1.0}
    """

    fps: float | None = None
    nframes: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    sample_fps: float | None = None  # frames per second of a list of frames
    raw_fps: float | None = None
    video_start: float | None = None  # seconds
    video_end: float | None = None
    min_pixels: int | None = None  # of a frame
    max_pixels: int | None = None
    total_pixels: int | None = None
    resized_height: int | None = None
    resized_width: int | None = None

    def __post_init__(self):
        least, most = OPTION_RANGE
        for name, value in self.as_dict().items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if name == "video_start" and number and value == 0:  # the only option of which 0 means something
                continue
            if not (number and least <= value <= most):
                raise MediaError(f"{name} of a video is {value!r:.40}: give a number above 0")
        if (self.resized_height is None) != (self.resized_width is None):
            raise MediaError("resized_height and resized_width of a video go together: give both or neither")
        floor, ceiling = self.min_pixels or FRAME_PIXELS[0], self.max_pixels
        # A given size overrides both limits.
        if ceiling is not None and floor > ceiling and self.resized_height is None:
            raise MediaError(
                f"max_pixels of a video is {ceiling}, below its min_pixels of {floor}: raise it or lower that"
            )

    def as_dict(self) -> dict[str, float]:
        """Return the options that are set, by name."""
        return {option.name: value for option in fields(self) if (value := getattr(self, option.name)) is not None}


# Options that choose frames of a file; of a list of frames all are used.
SAMPLING = ("fps", "nframes", "min_frames", "max_frames", "video_start", "video_end")


@dataclass(frozen=True, slots=True)
class Video:
    """A video file, or the images that are its frames; None is a slot to fill, as in Image.

    >>> Video(["first.png", "second.png"]).reference
    ('first.png', 'second.png')
    """

    kind: ClassVar[Literal["video"]] = "video"
    reference: Reference | tuple[Reference, ...] | None = None
    options: VideoOptions = VideoOptions()

    def __post_init__(self):
        if isinstance(self.reference, (list, tuple)):
            object.__setattr__(self, "reference", tuple(self.reference))
            if unread := [name for name in SAMPLING if getattr(self.options, name) is not None]:
                raise MediaError(
                    f"{unread[0]} of a video that is a list of frames is not read, as all are taken: leave it out, or "
                    "say in sample_fps how many a second they are"
                )
            for frame in self.reference:
                _check_reference(frame, "frame of a video")
        else:
            _check_reference(self.reference, "video")


Medium: TypeAlias = Image | Video
Part: TypeAlias = Text | Image | Video


@dataclass(frozen=True, slots=True)
class Message:
    """A turn: the role of the speaker, and the parts of the content in reading order.

    >>> Message.of("user", Image("cat.png"), "What is this?").text
    'What is this?'
    """

    role: str
    content: tuple[Part, ...]

    def __post_init__(self):
        if not isinstance(self.role, str) or not self.role:
            raise RowError(f"the role of a message must be a text, got {shorten(self.role)}")
        if self.role in ROLES:
            raise RowError(f"the role {self.role} is called {ROLES[self.role]} here: write that")
        if self.role not in STANDARD_ROLES and (near := nearest(self.role, STANDARD_ROLES, 0.8)):
            raise RowError(f"the role {self.role:.40} is unknown: did you mean {near}?")
        object.__setattr__(self, "content", tuple(self.content))
        for part in self.content:
            if not isinstance(part, (Text, Image, Video)):
                raise RowError(
                    f"{with_article(self.role)} message holds {shorten(part)}: its parts are texts, images and videos"
                )

    @classmethod
    def of(cls, role: str, *parts: str | Part) -> Message:
        """Return a message of `parts`; a str becomes a Text."""
        return cls(role, tuple(Text(part) if isinstance(part, str) else part for part in parts))

    @property
    def text(self) -> str:
        """The texts of the message, concatenated."""
        return "".join(part.text for part in self.content if isinstance(part, Text))

    @property
    def media(self) -> tuple[Medium, ...]:
        """The images and videos of the message, in reading order."""
        return tuple(part for part in self.content if not isinstance(part, Text))


Messages: TypeAlias = tuple[Message, ...]


def media_of(messages: Sequence[Message]) -> list[Medium]:
    """Return the images and videos of messages, in reading order."""
    return [medium for message in messages for medium in message.media]


def text_of(messages: Sequence[Message]) -> str:
    """Return the text of messages without media, a newline between turns."""
    return "\n".join(message.text for message in messages)


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of a reward model: one message or more, without empty slots for media.

    >>> talk = Conversation((Message.of("user", "Hello?"), Message.of("assistant", "Hi!")))
    >>> talk.answer.text
    'Hi!'
    """

    messages: Messages

    def __post_init__(self):
        object.__setattr__(self, "messages", tuple(self.messages))
        if not self.messages:
            raise RowError("a conversation has no message: give a list of messages")
        for message in self.messages:
            if not isinstance(message, Message):
                raise RowError(f"a conversation holds {shorten(message)}: it is made of messages")
            for medium in message.media:
                if medium.reference is None:
                    raise RowError(
                        f"{with_article(message.role)} message has an empty {medium.kind} part: give it a path, bytes "
                        "or a data URI"
                    )

    @property
    def prompt(self) -> Messages:
        """All messages but the answer; raises as `answer` does."""
        _ = self.answer
        return self.messages[:-1]

    @property
    def answer(self) -> Message:
        """The last message."""
        if self.messages[-1].role != "assistant":
            raise RowError("it ends without an assistant message: there is no answer to score")
        return self.messages[-1]


class Pair(NamedTuple):
    """Indices of two answers of a comparison; with `tie` their order means nothing."""

    chosen: int
    rejected: int
    tie: bool


@dataclass(frozen=True, slots=True)
class Judgement:
    """A rater's values of answers in one dimension: the higher is the better, equal values tie.

    >>> Judgement((0, 1), (1.0, 0.0)).pairs()
    [Pair(chosen=0, rejected=1, tie=False)]
    """

    answers: tuple[int, ...]  # indices of the judged ones
    values: tuple[float, ...]  # one for each of them
    # Only of a preference do differences of values mean nothing. A correctness or a progress is from 0 to 1.
    kind: Literal["preference", "rating", "correctness", "progress"] = "preference"
    margin: float | None = None  # by how much the better was preferred, in log-odds: the loss subtracts it
    weight: float = 1.0  # in the loss and in means
    dimension: str | None = None  # the criterion, where the data say it
    rater: str | None = None  # the person, where the data say it

    def __post_init__(self):
        object.__setattr__(self, "answers", tuple(self.answers))
        numbered = enumerate(self.values, 1)
        values = tuple(_number(f"the score of answer {number}", value) for number, value in numbered)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "weight", _number("`weight`", self.weight, 0.0))
        if self.margin is not None:
            object.__setattr__(self, "margin", margin := _number("`margin`", self.margin, 0.0))
            if margin > MOST_MARGIN:
                raise RowError(
                    f"`margin` is {margin:g}, by which the loss would ask the scores to differ: rescale the column to "
                    f"at most {MOST_MARGIN:g}, or leave it out with --columns ignore=margin"
                )
        if len(self.answers) != len(self.values) or len(set(self.answers)) != len(self.answers):
            raise RowError(f"{len(self.values)} values judge the answers {list(self.answers)}: give each answer one")

    def pairs(self) -> list[Pair]:
        """Return the pairs of answers, the better first: K answers make K(K-1)/2 pairs."""
        both = combinations(zip(self.answers, self.values, strict=True), 2)
        return [Pair(i, j, tie=a == b) if a >= b else Pair(j, i, tie=False) for (i, a), (j, b) in both]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A prompt, its answers, and judgements of them.

    >>> question = Message.of("user", "2 + 2?")
    >>> answers = (Message.of("assistant", "4"),), (Message.of("assistant", "5"),)
    >>> Comparison("sum", (question,), answers, (Judgement((0, 1), (1, 0)),)).conversations()[0].answer.text
    '4'
    """

    id: str
    prompt: Messages  # that all answers share; empty if they differ from the first message (another image, say)
    answers: tuple[Messages, ...]  # the messages after the prompt, one or more for each answer
    judgements: tuple[Judgement, ...] = ()  # empty when the answers are only to be scored
    category: str | None = None  # groups results, as do `columns`
    columns: Mapping[str, str | int | float | bool] = field(default_factory=dict)  # the remaining scalars of the row
    critiques: tuple[str | None, ...] = ()  # a text about each answer, where the training asks for them

    def __post_init__(self):
        object.__setattr__(self, "prompt", tuple(self.prompt))
        object.__setattr__(self, "answers", tuple(map(tuple, self.answers)))
        object.__setattr__(self, "judgements", tuple(self.judgements))
        for judgement in self.judgements:
            if not all(0 <= answer < len(self.answers) for answer in judgement.answers):
                raise RowError(f"answers {list(judgement.answers)} are judged, and there are {len(self.answers)}")
        judged = {answer for judgement in self.judgements for answer in judgement.answers}
        if judged and len(judged) < len(self.answers):
            number = min({*range(len(self.answers))} - judged) + 1
            raise RowError(f"answer {number} is in none of its judgements: judge it, or remove it")

    def conversations(self) -> list[Conversation]:
        """Return the whole conversation of each answer."""
        return [Conversation((*self.prompt, *answer)) for answer in self.answers]

    @property
    def judgement(self) -> Judgement:
        """The only judgement, or the mean of several: of each answer, over those that judge it."""
        if not self.judgements:
            raise RowError("its answers are not judged: give a judgement of them")
        return self.judgements[0] if len(self.judgements) == 1 else _mean(self.judgements, len(self.answers))

    @property
    def ratings(self) -> tuple[float, ...]:
        """The value of each answer in `judgement`; higher is better, equal ones tie."""
        order = sorted(zip(self.judgement.answers, self.judgement.values, strict=True))
        return tuple(value for _, value in order)

    def pairs(self) -> list[Pair]:
        """Return the pairs of all judgements, the better answer first."""
        return [pair for judgement in self.judgements for pair in judgement.pairs()]

    def agreed(self) -> list[Pair]:
        """Return the pairs that some judgement compares, each once, as the judgements have it together."""
        return agreed_pairs(self.judgements)

    def is_pair(self) -> bool:
        """Return whether there are exactly two answers."""
        return len(self.answers) == 2


@dataclass(frozen=True, slots=True)
class Sample:
    """A conversation in the columns of Flow-Factory's rewards; `vlmrm.formats.flow_factory` converts both ways.

    >>> Sample("a cat", image="cat.png").image
    'cat.png'
    """

    prompt: str | Messages  # a text, or messages that the columns cannot express
    response: str | Messages | None = None  # of a text policy; without it, `image` or `video` is the answer
    image: Reference | None = None
    video: Reference | tuple[Reference, ...] | None = None
    condition_images: tuple[Reference, ...] = ()  # of the prompt
    condition_videos: tuple[Reference | tuple[Reference, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of scoring: a score, or the reason why there is none.

    >>> Outcome(0.5, extra={"score": 7}).score
    0.5
    """

    score: float | None = None
    error: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)  # further output of the reward
    decode_seconds: float = 0.0  # that a service took to decode latents

    def __post_init__(self):
        if (self.score is None) == (self.error is None):
            raise RowError("an outcome is a score or an error: give one of them")
        if self.score is not None and not (isinstance(self.score, (int, float)) and math.isfinite(self.score)):
            raise RowError(f"its score is {self.score}: look for broken weights")


def agreed_pairs(judgements: Sequence[Judgement]) -> list[Pair]:
    """Return the pairs that some of these compares, each once, as they have it together."""
    if len(judgements) == 1:
        return judgements[0].pairs()
    leads: dict[tuple[int, int], list[float]] = {}
    for judgement, share in zip(judgements, _shares(judgements), strict=True):
        rated = sorted(zip(judgement.answers, judgement.values, strict=True))
        for (i, a), (j, b) in combinations(rated, 2):
            leads.setdefault((i, j), []).append(share * (a - b))
    summed = {pair: round(math.fsum(parts), 9) for pair, parts in leads.items()}  # opposites of equal weight tie
    return [Pair(i, j, tie=not lead) if lead >= 0 else Pair(j, i, tie=False) for (i, j), lead in summed.items()]


def _mean(judgements: Sequence[Judgement], count: int) -> Judgement:
    """Return the weighted mean of judgements of `count` answers; its weight is the sum of theirs."""
    values = []
    for answer in range(count):
        those = [judgement for judgement in judgements if answer in judgement.answers]
        rated = [judgement.values[judgement.answers.index(answer)] for judgement in those]
        parts = (share * value for share, value in zip(_shares(those), rated, strict=True))
        values.append(round(math.fsum(parts), 9))  # the mean of a tie must tie
    kind = "rating" if all(judgement.kind == "rating" for judgement in judgements) else "preference"
    margins = {judgement.margin for judgement in judgements}
    margin = margins.pop() if len(margins) == 1 else None
    weight = math.fsum(judgement.weight for judgement in judgements)
    return Judgement(tuple(range(count)), tuple(values), kind, margin, weight)


def _shares(judgements: Sequence[Judgement]) -> list[float]:
    """Return the share of each judgement in the weight of all."""
    weight = math.fsum(judgement.weight for judgement in judgements)
    return [judgement.weight / weight if weight else 1 / len(judgements) for judgement in judgements]


def _number(name: str, value: object, least: float = -math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RowError(f"{name} is {value!r}: write a number")
    if not math.isfinite(value):
        raise RowError(f"{name} is {value}: write a finite number")
    if value < least:
        raise RowError(f"{name} is {value}: it must be at least {least:g}")
    return float(value)


def shorten(value: object) -> str:
    """Return the `repr` of a value for a message, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def with_article(noun: str) -> str:
    """Return a noun with its article: an image, a video."""
    return f"{'an' if noun[:1].lower() in tuple('aeio') else 'a'} {noun}"


def _check_reference(value: object, kind: str) -> None:
    # Without Pillow imported there is no image of its in memory; importing it for this check would be slow.
    picture = getattr(sys.modules.get("PIL.Image"), "Image", type(None))
    if value is not None and not isinstance(value, (str, os.PathLike, bytes, bytearray, memoryview, picture)):
        raise MediaError(f"{shorten(value)} is no reference to {with_article(kind)}: give a path, bytes or a data URI")
