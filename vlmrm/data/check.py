"""A report on preference data before training: contents, how rows are read, and which are wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import numpy as np

from vlmrm.conversation import Comparison, Conversation, Medium, Message, Text, Video, media_of, text_of
from vlmrm.data.arguments import DataArguments
from vlmrm.data.columns import IGNORE, SPECIAL
from vlmrm.data.comparisons import iterate_comparisons, load_comparisons, reader_of
from vlmrm.data.duplicates import Repeats
from vlmrm.data.media import media_key, media_name, open_image, open_video
from vlmrm.data.rows import is_noteworthy
from vlmrm.errors import DataError, MediaError, RowError
from vlmrm.formats import detect_layout
from vlmrm.logs import counted

if TYPE_CHECKING:
    from datasets import Dataset


MAX_LISTED = 20  # wrong rows and duplicates that are named; all are counted
MAX_CATEGORIES = 15  # listed by name


@dataclass
class SourceReport:
    """A table, its layout, and its columns that are not read."""

    name: str
    layout: str
    rows: int
    unused: list[str]


@dataclass
class Report:
    """The result of `check_data`. Lengths are in characters, sizes in pixels (width, height)."""

    sources: list[SourceReport] = field(default_factory=list)
    rows: int = 0
    pairs: int = 0
    ties: int = 0
    ranked_lists: int = 0
    disputed: int = 0  # rows whose raters differ
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


def check_data(
    arguments: DataArguments,
    count_tokens: Callable[[Conversation], int] | None = None,
    media_sample: int | None = None,
) -> Report:
    """Read every row of `dataset_path` and `eval_dataset_path` and open its images and videos.

    Args:
        count_tokens: returns the length of a conversation for the model, or raises RowError; without it tokens are
            not counted.
        media_sample: open media (and count tokens) of so many rows only, chosen by `split_seed`.
    """
    checker = _Checker(arguments, count_tokens)
    sources = [(path, arguments.dataset_split) for path in arguments.dataset_path]
    sources += [(path, arguments.eval_dataset_split) for path in arguments.eval_dataset_path]
    if not sources:
        raise DataError("nothing to check: name the preference data")
    for path, split in sources:
        checker.check(path, split, media_sample)
    return checker.finish()


class _Checker:
    """Fills a report, row by row."""

    def __init__(self, arguments: DataArguments, count_tokens: Callable[[Conversation], int] | None):
        self.arguments = arguments
        self.count_tokens = count_tokens
        self.report = Report(max_seq_length=arguments.max_seq_length)
        self.media: dict[str, tuple[int, int] | MediaError | None] = {}  # sizes or errors by key
        self.kinds: dict[str, str] = {}
        self.repeats = Repeats()

    def check(self, path: str, split: str, media_sample: int | None) -> None:
        # Wrong rows are listed even if training will stop at them.
        arguments = replace(self.arguments, bad_rows="skip")
        dataset = cast("Dataset", load_comparisons([path], arguments=arguments, split=split))
        rng = np.random.default_rng(self.arguments.split_seed)
        count = len(dataset) if media_sample is None else min(media_sample, len(dataset))
        sampled = set(rng.choice(len(dataset), count, replace=False).tolist())
        metadata: set[str] = set()
        texts: set[str] = set()
        for index, row in enumerate(iterate_comparisons(dataset)):
            self.report.rows += 1
            try:
                if isinstance(row, RowError):
                    raise row
                self.add(row, open_media=index in sampled)
                for name, value in row.columns.items():
                    (texts if is_noteworthy(value) else metadata).add(name)
            except RowError as error:
                self.report.wrong += 1
                if len(self.report.wrong_rows) < MAX_LISTED:
                    self.report.wrong_rows.append((error.row_id or getattr(row, "id", "?"), error.reason))
        for source in reader_of(dataset).sources:
            layout = detect_layout(source.columns)
            unused = [name for name in source.columns if name not in layout.columns() | SPECIAL | (metadata - texts)]
            unused += [name for name, new in source.names.items() if new == IGNORE]
            self.report.sources.append(
                SourceReport(source.name, layout.name, len(cast("Dataset", source.table)), unused)
            )

    def add(self, row: Comparison, open_media: bool) -> None:
        report = self.report
        pairs = row.agreed()
        report.example = report.example or row
        report.pairs += len(pairs)
        report.ties += sum(pair.tie for pair in pairs)
        report.ranked_lists += not row.is_pair()
        report.disputed += len({*row.pairs()}) > len(pairs)
        report.margins += margins_of(row)
        report.categories[row.category or "(none)"] += 1
        report.prompt_lengths.append(len(text_of(row.prompt)))
        report.answer_lengths += [len(text) for answer in row.answers if (text := text_of(answer))]
        if (repeat := self.repeats.find(row)) is not None:
            report.duplicates += 1
            report.contradictions += repeat.contradicts
            if len(report.duplicate_rows) < MAX_LISTED:
                report.duplicate_rows.append((row.id, repeat.first))
        media = media_of([*row.prompt, *(message for answer in row.answers for message in answer)])
        for medium in media:
            self.kinds[media_key(medium.reference)] = medium.kind
        if open_media:
            report.rows_with_opened_media += 1
            for medium in media:
                self.open(medium)
            if self.count_tokens:
                report.token_counts += [self.count_tokens(conversation) for conversation in row.conversations()]

    def open(self, medium: Medium) -> None:
        """Open each image and video once; a broken one is an error of every row that has it."""
        key = media_key(medium.reference)
        if key not in self.media:
            try:
                self.media[key] = self.size(medium)
            except MediaError as error:
                self.media[key] = error
        if isinstance(error := self.media[key], MediaError):
            raise MediaError(error.reason)

    def size(self, medium: Medium) -> tuple[int, int] | None:
        if not isinstance(medium, Video):
            return open_image(medium.reference).size
        open_video(medium, self.arguments.video_fps, self.arguments.video_max_frames)
        return None

    def finish(self) -> Report:
        kinds = Counter(self.kinds.values())
        self.report.images, self.report.videos = kinds["image"], kinds["video"]
        self.report.image_sizes = [size for size in self.media.values() if isinstance(size, tuple)]
        return self.report


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
    sections = [_format_contents(report)]
    if sizes := _format_sizes(report):
        sections.append(sizes)
    if report.example is not None:
        sections.append(f"the first row is read as\n{_format_comparison(report.example)}")
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
    return "\n\n".join(sections)


def _format_contents(report: Report) -> str:
    lines = []
    for source in report.sources:
        lines.append(f"{source.name}: {counted(source.rows, 'row')}, read as {source.layout}")
        if source.unused:
            lines.append(f"  columns that are not read: {', '.join(source.unused)}")
    ties = f", {report.ties:,} of them ties" if report.ties else ""
    lists = f" ({counted(report.ranked_lists, 'ranked list')})" if report.ranked_lists else ""
    lines.append(f"{counted(report.pairs, 'pair')}{ties}{lists}")
    if report.margins:
        lines.append(describe_margins(report.margins))
    if report.disputed:
        lines.append(f"rows whose raters differ, read as soft labels: {report.disputed:,}")
    lines.append(f"{counted(report.images, 'different image')}, {counted(report.videos, 'video')}")
    readable = report.rows - report.wrong
    if report.rows_with_opened_media < readable:
        lines.append(f"  opened for a sample of {counted(report.rows_with_opened_media, 'row')}")
    if set(report.categories) - {"(none)"}:
        common = report.categories.most_common(MAX_CATEGORIES)
        more = len(report.categories) - len(common)
        counts = ", ".join(f"{name} {count:,}" for name, count in common)
        lines.append(f"categories: {counts}" + (f" and {more:,} more" if more else ""))
    return "\n".join(lines)


def _format_sizes(report: Report) -> str:
    """Return a line on each kind of size, by which one chooses `max_pixels` and `max_seq_length`."""
    sizes = {
        "longer side of the images, pixels": [max(size) for size in report.image_sizes],
        "prompt, characters": report.prompt_lengths,
        "answer, characters": report.answer_lengths,
        "conversation, tokens": report.token_counts,
    }
    lines = [
        f"{name}: median {np.median(values):,.0f}, 95 % up to {np.percentile(values, 95):,.0f}, max {max(values):,}"
        for name, values in sizes.items()
        if any(values)
    ]
    if report.max_seq_length and report.token_counts:
        over = sum(count > report.max_seq_length for count in report.token_counts)
        lines.append(f"{over:,} conversations are over max_seq_length {report.max_seq_length:,}")
    return "\n".join(lines)


def _format_comparison(comparison: Comparison) -> str:
    lines = [f"  id {comparison.id}"]
    extras = {"margin": comparison.judgement.margin, "category": comparison.category}
    lines += [f"  {name} {value}" for name, value in extras.items() if value is not None]
    if comparison.judgement.weight != 1.0:
        lines.append(f"  weight {comparison.judgement.weight:g}")
    lines += ["  prompt", *map(_format_message, comparison.prompt)] if comparison.prompt else []
    for index, answer in enumerate(comparison.answers):
        lines += [f"  {_label(comparison, index)}", *map(_format_message, answer)]
    return "\n".join(lines)


def _label(comparison: Comparison, index: int) -> str:
    if not comparison.is_pair():
        return f"answer of score {comparison.ratings[index]:g}"
    (pair,) = comparison.agreed()
    if pair.tie:
        return "one of two that tie"
    return "chosen" if index == pair.chosen else "rejected"


def _format_message(message: Message) -> str:
    pieces = [
        part.text.replace("\n", "\n      ")
        if isinstance(part, Text)
        else f"[{part.kind} {media_name(part.reference)}]"
        for part in message.content
    ]
    return f"    {message.role}: {' '.join(pieces)}"


def _listed(head: str, lines: Sequence[str], total: int) -> str:
    more = [f"  ... and {total - MAX_LISTED:,} more"] if total > MAX_LISTED else []
    return "\n".join([head, *(f"  {line}" for line in lines), *more])
