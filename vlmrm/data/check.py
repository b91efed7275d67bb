"""A report on preference data before training: contents, how rows are read, and which are wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from vlmrm.conversation import Comparison, Conversation, Medium, Message, Text, Video, media_of, text_of
from vlmrm.data.arguments import DataArguments
from vlmrm.data.columns import IGNORE, SPECIAL
from vlmrm.data.comparisons import iterate_comparisons, load_comparisons, reader_of
from vlmrm.data.duplicates import Repeat, Repeats
from vlmrm.data.media import media_key, media_name, open_image, open_video
from vlmrm.data.tables import Source
from vlmrm.errors import DataError, MediaError, RowError
from vlmrm.formats import LAYOUTS, LAYOUTS_TO_SCORE, detect_layout
from vlmrm.logs import counted
from vlmrm.outputs import ONE, Outputs

MAX_LISTED = 20  # wrong rows, duplicates and categories that are named; all are counted
RANKED = ("preference", "rating")  # kinds of judgements whose values are only compared


@dataclass
class Report:
    """The result of `check_data`. Lengths are in characters, sizes in pixels (width, height)."""

    sources: list[str] = field(default_factory=list)  # in words: layouts, and columns that are not read
    rows: int = 0
    pairs: int = 0
    ties: int = 0
    ranked_lists: int = 0
    disputed: int = 0  # rows whose raters differ
    outputs: Outputs = ONE
    judged: Counter[str] = field(default_factory=Counter)  # answers, by output
    margins: list[float] = field(default_factory=list)
    categories: Counter[str] = field(default_factory=Counter)
    images: int = 0
    videos: int = 0
    image_sizes: list[tuple[int, int]] = field(default_factory=list)
    rows_with_opened_media: int = 0
    prompt_lengths: list[int] = field(default_factory=list)
    answer_lengths: list[int] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    max_seq_length: int | None = None
    wrong: int = 0
    wrong_rows: list[tuple[str, str]] = field(default_factory=list)  # (id, reason)
    duplicates: int = 0
    duplicate_rows: list[tuple[str, str]] = field(default_factory=list)  # (id, id of the first one)
    contradictions: int = 0
    example: Comparison | None = None

    @property
    def exit_status(self) -> int:
        """The exit status of the process: 3 (a data error) if any row is wrong."""
        return DataError.exit_code if self.wrong else 0

    def add(self, row: Comparison, repeat: Repeat | None) -> None:
        """Count a row that can be read, and what it repeats."""
        pairs = row.agreed() if any(it.kind in RANKED for it in row.judgements) else []  # of steps there are none
        self.example = self.example or row
        self.pairs += len(pairs)
        self.ties += sum(pair.tie for pair in pairs)
        self.ranked_lists += len(row.answers) > 2 and bool(pairs)
        for judgement in row.judgements if self.outputs != ONE else ():
            self.judged[self.outputs.names[self.outputs.index(judgement)]] += len(judgement.answers)
        self.disputed += bool(pairs) and len({*row.pairs()}) > len(pairs)
        self.margins += margins_of(row)
        self.categories[row.category or "(none)"] += 1
        self.prompt_lengths.append(len(text_of(row.prompt)))
        self.answer_lengths += [len(text) for answer in row.answers if (text := text_of(answer))]
        if repeat is not None:
            self.duplicates += 1
            self.contradictions += repeat.contradicts
            if len(self.duplicate_rows) < MAX_LISTED:
                self.duplicate_rows.append((row.id, repeat.first))


def check_data(
    arguments: DataArguments,
    count_tokens: Callable[[Conversation], int] | None = None,
    media_sample: int | None = None,
) -> Report:
    """Read every row of `dataset_path` and `eval_dataset_path` and open its images and videos.

    `count_tokens` returns the length of a conversation for the model, or raises RowError. Media are opened, and tokens
    counted, of `media_sample` rows, chosen by `split_seed`, or of all.
    """
    outputs = arguments.named_outputs
    report, repeats = Report(max_seq_length=arguments.max_seq_length, outputs=outputs), Repeats()
    opened: dict[str, tuple[int, int] | MediaError | None] = {}  # sizes or errors by key
    kinds: dict[str, str] = {}
    sources = [(path, arguments.dataset_split) for path in arguments.dataset_path]
    sources += [(path, arguments.eval_dataset_split) for path in arguments.eval_dataset_path]
    if not sources:
        raise DataError("nothing to check: name the preference data")
    for path, split in sources:
        # Wrong rows are listed even if training will stop at them.
        reading = replace(arguments, bad_rows="skip")
        dataset = load_comparisons([path], arguments=reading, split=split)
        count = len(dataset) if media_sample is None else min(media_sample, len(dataset))
        sampled = {*np.random.default_rng(arguments.split_seed).choice(len(dataset), count, replace=False).tolist()}
        for index, row in enumerate(iterate_comparisons(dataset)):
            report.rows += 1
            try:
                if isinstance(row, RowError):
                    raise row
                report.add(row, repeats.find(row))
                media = media_of([*row.prompt, *(message for answer in row.answers for message in answer)])
                kinds |= {media_key(medium.reference): medium.kind for medium in media}
                if index in sampled:
                    report.rows_with_opened_media += 1
                    for medium in media:
                        _open(medium, opened, arguments)
                    if count_tokens:
                        report.token_counts += [count_tokens(conversation) for conversation in row.conversations()]
            except RowError as error:
                report.wrong += 1
                if len(report.wrong_rows) < MAX_LISTED:
                    report.wrong_rows.append((error.row_id or getattr(row, "id", "?"), error.reason))
        report.sources += [_describe_source(it, outputs.named) for it in reader_of(dataset).sources]
    report.images, report.videos = (sum(kind == it for it in kinds.values()) for kind in ("image", "video"))
    report.image_sizes = [size for size in opened.values() if isinstance(size, tuple)]
    return report


def _open(medium: Medium, opened: dict[str, tuple[int, int] | MediaError | None], arguments: DataArguments) -> None:
    """Open each image and video once; a broken one is an error of every row that has it."""
    key = media_key(medium.reference)
    if key not in opened:
        try:
            if isinstance(medium, Video):
                open_video(medium, arguments.video_fps, arguments.video_max_frames)
            opened[key] = None if isinstance(medium, Video) else open_image(medium.reference).size
        except MediaError as error:
            opened[key] = error
    if isinstance(error := opened[key], MediaError):
        raise MediaError(error.reason)


def _describe_source(source: Source, outputs: frozenset[str]) -> str:
    layout = detect_layout(source.columns, LAYOUTS_TO_SCORE if outputs else LAYOUTS)
    unread = [name for name in source.columns if name not in layout.columns() | SPECIAL | outputs]
    unread += [name for name, new in source.names.items() if new == IGNORE]
    read = f"{source.name}: {counted(len(source.table), 'row')}, read as {layout.name}"
    return f"{read}\n  columns that are not read: {', '.join(unread)}" if unread else read


def margins_of(row: Comparison) -> set[float]:
    """Return the margins that the loss subtracts: those of judgements that are no ties."""
    decided = (judgement for judgement in row.judgements if not all(pair.tie for pair in judgement.pairs()))
    return {judgement.margin for judgement in decided if judgement.margin is not None}


def describe_margins(margins: Sequence[float]) -> str:
    """Return in words how margins are distributed, and what is done with them."""
    return (
        f"{counted(len(margins), 'margin')} from {min(margins):g} to {max(margins):g}, median {np.median(margins):g}, "
        "which the loss subtracts"
    )


def format_report(report: Report) -> str:
    """Return the report as plain text: the contents, the first row as it is read, and the errors."""
    sections = ["\n".join(_contents(report)), "\n".join(_sizes(report))]
    if report.example is not None:
        sections.append("\n  ".join(["the first row is read as", *_describe_row(report.example)]))
    if report.duplicates:
        head = f"{counted(report.duplicates, 'row')} with the prompt and answers of an earlier one"
        if report.contradictions:
            head += f", {report.contradictions:,} with another order"
        sections.append(_listed(head, [f"{row} = {first}" for row, first in report.duplicate_rows], report.duplicates))
    if report.wrong:
        head = f"{report.wrong:,} of {counted(report.rows, 'row')} cannot be read"
        sections.append(_listed(head, [f"{row}: {reason}" for row, reason in report.wrong_rows], report.wrong))
    else:
        sections.append("the only row can be read" if report.rows == 1 else f"all {report.rows:,} rows can be read")
    return "\n\n".join(filter(None, sections))


def _contents(report: Report) -> Iterator[str]:
    yield from report.sources
    ties = f", {report.ties:,} of them ties" if report.ties else ""
    lists = f" ({counted(report.ranked_lists, 'ranked list')})" if report.ranked_lists else ""
    if report.pairs or not report.judged:
        yield f"{counted(report.pairs, 'pair')}{ties}{lists}"
    if named := sorted(report.outputs.named, key=report.outputs.names.index):
        yield "answers judged: " + ", ".join(f"{name} {report.judged[name]:,}" for name in named)
        if idle := [name for name in named if not report.judged[name]]:
            yield f"  no row judges {idle[0]}: map its column to this name, or remove it"
    if report.margins:
        yield describe_margins(report.margins)
    if report.disputed:
        yield f"rows whose raters differ, read as soft labels: {report.disputed:,}"
    yield f"{counted(report.images, 'different image')}, {counted(report.videos, 'video')}"
    if report.rows_with_opened_media < report.rows - report.wrong:
        yield f"  opened for a sample of {counted(report.rows_with_opened_media, 'row')}"
    if {*report.categories} - {"(none)"}:
        counts = [f"{name} {count:,}" for name, count in report.categories.most_common(MAX_LISTED)]
        more = len(report.categories) - len(counts)
        yield f"categories: {', '.join([*counts, *([f'and {more:,} more'] if more else [])])}"


def _sizes(report: Report) -> Iterator[str]:
    """Yield a line on each kind of size, by which one chooses `max_pixels` and `max_seq_length`."""
    sizes = {
        "longer side of the images, pixels": [max(size) for size in report.image_sizes],
        "prompt, characters": report.prompt_lengths,
        "answer, characters": report.answer_lengths,
        "conversation, tokens": report.token_counts,
    }
    for name, values in sizes.items():
        if any(values):
            median, high = np.percentile(values, [50, 95])
            yield f"{name}: median {median:,.0f}, 95 % up to {high:,.0f}, max {max(values):,}"
    if report.max_seq_length and report.token_counts:
        over = sum(count > report.max_seq_length for count in report.token_counts)
        yield f"{over:,} conversations are over max_seq_length {report.max_seq_length:,}"


def _describe_row(row: Comparison) -> Iterator[str]:
    yield f"id {row.id}"
    weights = {judgement.weight for judgement in row.judgements}
    weight = row.judgement.weight if len(weights) > 1 else weights.pop()
    extras = {"margin": row.judgement.margin, "category": row.category, "weight": weight}
    yield from (f"{name} {it}" for name, it in extras.items() if it is not None and (name, it) != ("weight", 1.0))
    if row.prompt:
        yield from ("prompt", *map(_describe_message, row.prompt))
    for number, (rating, answer) in enumerate(zip(row.ratings, row.answers, strict=True)):
        if values := _named_values(row, number):
            yield ", ".join(f"{name} {value:g}" for name, value in values.items())
            yield from map(_describe_message, answer)
            continue
        labels = {max(row.ratings): "chosen", min(row.ratings): "rejected"} if row.is_pair() else {}
        yield (
            labels.get(rating, f"answer of score {rating:g}") if len({*row.ratings}) > 1 else "one of several that tie"
        )
        yield from map(_describe_message, answer)


def _named_values(row: Comparison, answer: int) -> dict[str, float]:
    """Return what judgements of a dimension, of steps or of progress say of an answer, by its name."""
    named = {it.dimension or it.kind: it for it in row.judgements if it.dimension or it.kind not in RANKED}
    return {name: it.values[it.answers.index(answer)] for name, it in named.items() if answer in it.answers}


def _describe_message(message: Message) -> str:
    pieces = (
        part.text if isinstance(part, Text) else f"[{part.kind} {media_name(part.reference)}]"
        for part in message.content
    )
    return f"  {message.role}: {' '.join(pieces)}".replace("\n", "\n      ")


def _listed(head: str, lines: Sequence[str], total: int) -> str:
    more = [f"... and {total - MAX_LISTED:,} more"] if total > MAX_LISTED else []
    return "\n  ".join([head, *lines, *more])
