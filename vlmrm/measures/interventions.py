"""Interventions: comparisons with one thing changed, to see what a model's preference rests on.

Each is declared once, in INTERVENTIONS, a plugin's by `register`; what is scored, the columns of the scored pairs, the
metrics, the report and the guide all read it from there. An intervention returns a comparison with as many answers in
the same order (but for the family `order`), to be scored beside the original, or None where it does not apply. It is a
pure function of the comparison and its donors, other comparisons of the data set (see `donors_of`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any, Literal, TypeAlias

from vlmrm.conversation import Comparison, Image, Medium, Message, Messages, Text, Video, media_of
from vlmrm.errors import ConfigError, RowError
from vlmrm.measures import changes
from vlmrm.measures.changes import Rewrite
from vlmrm.plugins import load_plugins
from vlmrm.settings import did_you_mean

logger = logging.getLogger("vlmrm")

Donors: TypeAlias = Sequence[Comparison]
Change: TypeAlias = Callable[[Comparison, Donors], Comparison | None]
Family: TypeAlias = Literal["image", "part", "question", "prompt", "frames", "quality", "style", "order"]

# Under the first five, a model that uses what is gone loses accuracy; under the others it should lose none.
FAMILIES: Mapping[Family, str] = {
    "image": "images and videos blank or exchanged",
    "part": "a part of what images show: all but the first, shapes, their arrangement, colours",
    "question": "the question alone exchanged or left out",
    "prompt": "question and images together exchanged or left out",
    "frames": "the frames of videos in another order, or one for all",
    "quality": "the same images in other files",
    "style": "texts reworded or decorated, with the same meaning",
    "order": "the answers in another order, for scorers that see all of them at once",
}
SCATTERED, PATCHES = 48, 4  # tiles along an edge: of the first no shape is left, in the second whole things are
SAME = "same_image"  # of which the images are the row's own: beside those of other rows, it steadies what they cost
REFRAMING: tuple[Family, ...] = ("image", "frames")  # video files then become lists of frames
REMOVING: tuple[Family, ...] = ("image", "part", "question", "prompt", "frames")


@dataclass(frozen=True)
class Intervention:
    """A change of a comparison, and how the metrics and the report call it.

    Of an `attack` the margin that counts is that of the chosen answer as it is over the rejected one changed:
    decorating the rejected answer should not make it win.
    """

    name: str
    change: Change  # a function of the comparison and its donors
    family: Family
    view: str  # what the model saw, in the report
    condition: str  # completes "accuracy ..."
    attack: bool = False
    repeats: str | None = None  # that of which this is another donor or neutral picture; their credits are averaged
    decides: bool = False  # it speaks for its family: something that the model knows takes the place of what is gone
    sampled: bool = True  # scored on a sample of the comparisons alone
    standard: bool = False  # scored unless the key `interventions` names others
    loss: str = ""  # the metric of the accuracy that is lost under it; by default made from the name

    def __post_init__(self):
        if not self.loss:
            object.__setattr__(self, "loss", f"{self.name}_{'reliance' if self.removes else 'loss'}")

    @property
    def removes(self) -> bool:
        """Whether a part is removed or exchanged, so that a model that uses it loses accuracy, as it should."""
        return self.family in REMOVING

    def __call__(self, comparison: Comparison, donors: Donors = ()) -> Comparison | None:
        """Return the changed comparison, None where the change does not apply."""
        return self.change(comparison, donors)

    def __reduce__(self):
        return _declared, (self.name,)  # by name, to the workers of a DataLoader: its function may be a closure

    def in_branches(self, scores: Sequence[float]) -> list[float]:
        """Return scores of the changed comparison's answers in the order of the original ones."""
        return list(reversed(scores)) if self.family == "order" else list(scores)


def swapped_image(comparison: Comparison, donors: Donors, number: int = 0) -> Comparison | None:
    """Ask the question about the donor's images and videos: a model that looks should find neither answer better.

    Answers that are images stay as they are: they are what is judged.
    """
    if len(donors) <= number:
        return None
    kinds = {medium.kind for medium in media_of(comparison.prompt)}
    media = media_of(donors[number].prompt)
    of_kind = {kind: [medium for medium in media if medium.kind == kind] for kind in kinds}
    if not kinds or not all(of_kind.values()):
        return None
    next_of = {kind: cycle(of_one_kind) for kind, of_one_kind in of_kind.items()}
    return replace(comparison, prompt=_with_media(comparison.prompt, lambda medium: next(next_of[medium.kind])))


def other_images(comparison: Comparison, donors: Donors) -> Comparison | None:
    """Exchange all images of the prompt but the first: a model that looks at all of them should miss the others."""
    pictures = [medium for donor in donors[:1] for medium in media_of(donor.prompt) if medium.kind == "image"]
    if not pictures or sum(medium.kind == "image" for medium in media_of(comparison.prompt)) < 2:
        return None
    first, others = iter([True]), cycle(pictures)
    return replace(
        comparison,
        prompt=_with_media(
            comparison.prompt, lambda m: m if m.kind != "image" or next(first, False) else next(others)
        ),
    )


def swapped_prompt(comparison: Comparison, donors: Donors) -> Comparison | None:
    """Put the answers under the donor's prompt, question and images at once, where neither should win."""
    if not donors or not comparison.prompt or not donors[0].prompt:
        return None
    return replace(comparison, prompt=donors[0].prompt)


def response_only(comparison: Comparison, donors: Donors = ()) -> Comparison | None:
    """Leave out the prompt: a preference that remains does not depend on the question."""
    return replace(comparison, prompt=()) if comparison.prompt else None


def swapped_question(comparison: Comparison, donors: Donors) -> Comparison | None:
    """Ask a donor's last question about the same images; of a prompt without media, `swapped_prompt` does that."""
    question = question_of(comparison)
    questions = [text for donor in donors if (text := question_of(donor)) not in ("", question)]
    if not question or not questions or not media_of(comparison.prompt):
        return None
    return asking(comparison, lambda text: questions[0])


def no_question(comparison: Comparison, donors: Donors = ()) -> Comparison | None:
    """Show the images and videos alone, in one turn; of a prompt without media, `response_only` does that."""
    media = media_of(comparison.prompt)
    if not media or not any(message.text.strip() for message in comparison.prompt if message.role != "system"):
        return None
    system = [message for message in comparison.prompt if message.role == "system"]
    return replace(comparison, prompt=(*system, Message("user", tuple(media))))


def question_of(comparison: Comparison) -> str:
    """Return the text of the last message of the user, which answers are to; empty if it has none."""
    texts = [message.text for message in comparison.prompt if message.role == "user"]
    return texts[-1].strip() if texts else ""


def reversed_answers(comparison: Comparison, donors: Donors = ()) -> Comparison | None:
    """Give the answers in reversed order, with their judgements."""
    last = len(comparison.answers) - 1
    judgements = tuple(
        replace(judgement, answers=tuple(last - answer for answer in judgement.answers))
        for judgement in comparison.judgements
    )
    return replace(comparison, answers=comparison.answers[::-1], judgements=judgements) if last else None


def asking(comparison: Comparison, rewrite: Rewrite) -> Comparison:
    """Return the comparison with the text of the user's last message rewritten as one, where its first text stands."""
    prompt = list(comparison.prompt)
    last = max(i for i, message in enumerate(prompt) if message.role == "user")
    message = prompt[last]
    first = next(i for i, part in enumerate(message.content) if isinstance(part, Text))
    before, after = message.content[:first], [part for part in message.content[first:] if not isinstance(part, Text)]
    prompt[last] = Message(message.role, (*before, Text(rewrite(message.text)), *after))
    return replace(comparison, prompt=tuple(prompt))


def restyled(comparison: Comparison, rewrite: Rewrite) -> Comparison | None:
    """Return the comparison with the text of each answer rewritten; None where that leaves all as they are."""
    answers = tuple(_restyled_answer(answer, rewrite) for answer in comparison.answers)
    return None if answers == comparison.answers else replace(comparison, answers=answers)


def _restyled_answer(answer: Messages, rewrite: Rewrite) -> Messages:
    """Return the answer with the longest of its texts rewritten: of one with pictures between, most are captions."""
    texts = [
        (len(part.text), part.text, i, j)
        for i, message in enumerate(answer)
        for j, part in enumerate(message.content)
        if message.role == "assistant" and isinstance(part, Text) and part.text.strip()
    ]
    if not texts:
        return answer
    _, text, i, j = max(texts)
    content = (*answer[i].content[:j], Text(rewrite(text)), *answer[i].content[j + 1 :])
    return (*answer[:i], Message(answer[i].role, content), *answer[i + 1 :])


def painted(paint: Callable[[Any], Any], videos: bool = True) -> Change:
    """Return the change of every image, in prompt and answers, and of every frame if it is of `videos` too."""

    def change(comparison: Comparison, donors: Donors = ()) -> Comparison | None:
        def painted(medium: Medium) -> Medium:
            if isinstance(medium, Video):
                return changes.painted(medium, paint) if videos else medium
            return Image(paint(medium.reference))

        kinds = ("image", "video") if videos else ("image",)
        return _with_all_media(comparison, painted, kinds)

    return change


def reframed(edit: Callable[[Video], Video]) -> Change:
    """Return the change of every video, in prompt and answers."""

    def change(comparison: Comparison, donors: Donors = ()) -> Comparison | None:
        return _with_all_media(comparison, lambda m: edit(m) if isinstance(m, Video) else m, ("video",))

    return change


def _with_all_media(
    comparison: Comparison, change: Callable[[Medium], Medium], kinds: Sequence[str]
) -> Comparison | None:
    pieces = (comparison.prompt, *comparison.answers)
    if not any(medium.kind in kinds for messages in pieces for medium in media_of(messages)):
        return None
    prompt, *answers = (_with_media(messages, change) for messages in pieces)
    return replace(comparison, prompt=prompt, answers=tuple(answers))


def _with_media(messages: Messages, change: Callable[[Medium], Medium]) -> Messages:
    return tuple(
        Message(message.role, tuple(part if isinstance(part, Text) else change(part) for part in message.content))
        for message in messages
    )


def _picture(name: str, paint: Callable[[Any], Any], done: str, **options: Any) -> Intervention:
    return Intervention(name, painted(paint), "image", f"images {done}", f"with every image {done}", **options)


def _part(name: str, paint: Callable[[Any], Any], done: str, **options: Any) -> Intervention:
    change = painted(paint, videos=False)
    return Intervention(name, change, "part", f"images {done}", f"with every image {done}", **options)


def _attack(name: str, rewrite: Rewrite, done: str) -> Intervention:
    condition = f"with the rejected answer {done}"
    return Intervention(name, rewriting(rewrite), "style", f"answers {done}", condition, attack=True, standard=True)


def rewriting(rewrite: Rewrite) -> Change:
    return lambda comparison, donors=(): restyled(comparison, rewrite)


def _removing(family: Family, name: str, change: Change, view: str, condition: str, **options: Any) -> Intervention:
    return Intervention(name, change, family, view, condition, standard=True, **options)


# Declared here and nowhere else; the guide has the table of them.
_DECLARED = (
    _picture("blank_image", changes.grey, "painted grey", standard=True, loss="image_reliance"),
    _removing(
        "image", "swapped_image", swapped_image, "another row's image", "with the images of another row", decides=True
    ),
    _removing(
        "image",
        "swapped_image_again",
        lambda comparison, donors=(): swapped_image(comparison, donors, 1),
        "a third row's image",
        "with the images of a third row",
        repeats="swapped_image",
    ),
    _removing(
        "part", "other_images", other_images, "all images but the first exchanged", "with the first image alone"
    ),
    _part("scattered_image", changes.in_tiles(SCATTERED), "cut into tiny tiles and mixed", standard=True),
    _part("shuffled_patches", changes.in_tiles(PATCHES), "cut into 16 tiles and mixed"),
    _part("grey_scale", changes.colourless, "without colours"),
    _removing(
        "question",
        "swapped_question",
        swapped_question,
        "another row's question",
        "with the question of another row about its own images",
        decides=True,
    ),
    _removing("question", "no_question", no_question, "images without a question", "without the question"),
    _removing(
        "prompt",
        "swapped_prompt",
        swapped_prompt,
        "another question and image",
        "under the prompt of another row",
        decides=True,
    ),
    _removing("prompt", "response_only", response_only, "no prompt at all", "of the answers alone", sampled=False),
    _removing(
        "frames",
        "shuffled_frames",
        reframed(changes.shuffled),
        "frames shuffled",
        "with the frames of videos shuffled",
        decides=True,
    ),
    Intervention(
        SAME,
        painted(changes.filed_anew, videos=False),
        "quality",
        "the same images in other files",
        "with every image in a file of another name, encoding and size",
        standard=True,
    ),
    _attack("padded_answers", changes.padded, "padded with empty sentences"),
    _attack("added_markdown", changes.with_markdown, "set in markdown"),
    _attack("agreeing_answers", changes.agreeing, "flattering the user"),
    Intervention(
        "reversed_answers",
        reversed_answers,
        "order",
        "answers in reversed order",
        "with the answers in reversed order",
    ),
)
INTERVENTIONS: dict[str, Intervention] = {intervention.name: intervention for intervention in _DECLARED}
FOLLOWERS: list[Callable[[Intervention], None]] = []  # called with each that is registered
GROUPS = ("standard", "all", "none", *FAMILIES)  # words of the key `interventions` beside the names


def register(intervention: Intervention) -> None:
    """Add an intervention, as a plugin does, and with it the two metrics that follow from each."""
    if intervention.name in INTERVENTIONS or intervention.name in GROUPS:
        raise ConfigError(f"there is already an intervention {intervention.name}: give yours another name.")
    INTERVENTIONS[intervention.name] = intervention
    for follow in FOLLOWERS:
        follow(intervention)


def _declared(name: str) -> Intervention:
    if name not in INTERVENTIONS:  # in a process that was started afresh
        load_plugins()
    return INTERVENTIONS[name]


def named(words: Iterable[str]) -> list[str]:
    """Return the names that the key `interventions` means: names, families, `standard`, `all` or `none`."""
    chosen: set[str] = set()
    for word in words:
        if word not in INTERVENTIONS and word not in GROUPS:
            names = [*GROUPS, *INTERVENTIONS]
            advice = did_you_mean(word, names, f": choose from {', '.join(names)}.")
            raise ConfigError(f"interventions names {word!r}, which there is not{advice}")
        chosen |= {
            name
            for name, intervention in INTERVENTIONS.items()
            if word in (name, intervention.family, "all") or (word == "standard" and intervention.standard)
        }
    return [name for name in INTERVENTIONS if name in chosen]


def alterations(
    comparison: Comparison,
    donors: Donors,
    interventions: Iterable[Intervention],
    *,
    sampled: bool = True,
    together: bool = False,
    frames: tuple[float | None, int | None] = (None, None),
) -> Iterator[tuple[Intervention, Comparison]]:
    """Yield the interventions that apply to a comparison, with the changed comparison.

    Some are for a comparison that is `sampled`, and some for a scorer that sees all answers `together`. `frames` is
    how video files are sampled: frames per second, and at most so many.
    """
    sampling = _with_sampling(comparison, *frames)
    for intervention in interventions:
        if (intervention.sampled and not sampled) or (intervention.family == "order" and not together):
            continue
        try:
            changed = intervention(sampling if intervention.family in REFRAMING else comparison, donors)
        except RowError as error:  # an image of the donor, or of the row, whose own scoring says so
            logger.debug("row %s has no %s: %s", comparison.id, intervention.name, error)
            continue
        if changed is not None:
            yield intervention, changed


def _with_sampling(comparison: Comparison, fps: float | None, max_frames: int | None) -> Comparison:
    """Return the comparison with this sampling on the video files that have none of their own."""

    def with_options(medium: Medium) -> Medium:
        if not isinstance(medium, Video) or isinstance(medium.reference, tuple) or medium.options.nframes:
            return medium
        options = medium.options
        return replace(
            medium, options=replace(options, fps=options.fps or fps, max_frames=options.max_frames or max_frames)
        )

    return _with_all_media(comparison, with_options, ("video",)) or comparison
