"""A data report as plain text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from vlmrm.conversation import Comparison, Message, Messages, Text
from vlmrm.data.check import LISTED, Report
from vlmrm.data.media import media_name

BAR = 40  # characters of the longest bar
CATEGORIES = 15  # listed by name


def format_report(report: Report) -> str:
    """The whole report, for a terminal: what is there, how the first row is read, and what is wrong."""
    sections = [_contents(report), *_histograms(report)]
    if report.example is not None:
        sections.append(f"the first row is read as\n{_comparison(report.example)}")
    if report.duplicates:
        head = f"{report.duplicates:,} rows repeat the prompt and answers of an earlier one"
        if report.contradictions:
            head += f", {report.contradictions:,} with another order"
        sections.append(_listed(head, [f"{row} = {first}" for row, first in report.duplicate_rows], report.duplicates))
    if report.wrong:
        head = f"{report.wrong:,} of {report.rows:,} rows are wrong"
        sections.append(_listed(head, [f"{row}: {why}" for row, why in report.wrong_rows], report.wrong))
    else:
        sections.append(f"all {report.rows:,} rows can be read")
    return "\n\n".join(sections)


def _contents(report: Report) -> str:
    lines = []
    for source in report.sources:
        lines.append(f"{source.name}: {source.rows:,} rows, read as {source.layout}")
        if source.unused:
            lines.append(f"  columns that are not read: {', '.join(source.unused)}")
    ties = f", {report.ties:,} of them ties" if report.ties else ""
    lists = f" ({report.ranked_lists:,} rows are ranked lists)" if report.ranked_lists else ""
    lines.append(f"{report.pairs:,} pairs{ties}{lists}")
    lines.append(f"{report.images:,} different images, {report.videos:,} videos")
    readable = report.rows - report.wrong
    if report.rows_with_opened_media < readable:
        lines.append(f"  opened for a sample of {report.rows_with_opened_media:,} rows")
    if set(report.categories) - {"(none)"}:
        common = report.categories.most_common(CATEGORIES)
        more = len(report.categories) - len(common)
        named = ", ".join(f"{name} {count:,}" for name, count in common)
        lines.append(f"categories: {named}" + (f" and {more:,} more" if more else ""))
    return "\n".join(lines)


def _histograms(report: Report) -> list[str]:
    sections = [
        _histogram("longer side of the images, pixels", [max(size) for size in report.image_sizes]),
        _histogram("prompt, characters", report.prompt_lengths),
        _histogram("answer, characters", report.answer_lengths),
        _histogram("conversation, tokens", report.token_counts),
    ]
    if report.max_seq_length and report.token_counts:
        over = sum(count > report.max_seq_length for count in report.token_counts)
        sections.append(f"{over:,} conversations are over max_seq_length {report.max_seq_length:,}")
    return [section for section in sections if section]


def _histogram(title: str, values: Sequence[int]) -> str:
    """Counts between powers of two, as bars."""
    if not any(values):
        return ""
    counts = Counter(value.bit_length() for value in values)
    most = max(counts.values())
    lines = [title]
    for bits in range(min(counts), max(counts) + 1):
        low, high = (1 << bits) >> 1, max((1 << bits) - 1, 0)
        label = f"{low}-{high}" if high > low else f"{low}"
        bar = "█" * max(round(counts[bits] / most * BAR), bool(counts[bits]))
        lines.append(f"  {label:>13} {counts[bits]:>9,} {bar}".rstrip())
    return "\n".join(lines)


def _comparison(comparison: Comparison) -> str:
    lines = [f"  id {comparison.id}"]
    extras = {"margin": comparison.judgement.margin, "category": comparison.category}
    lines += [f"  {name} {value}" for name, value in extras.items() if value is not None]
    if comparison.judgement.weight != 1.0:
        lines.append(f"  weight {comparison.judgement.weight:g}")
    lines += ["  prompt", *_messages(comparison.prompt)] if comparison.prompt else []
    for number, answer in enumerate(comparison.answers):
        lines += [f"  {_role(comparison, number)}", *_messages(answer)]
    return "\n".join(lines)


def _role(comparison: Comparison, number: int) -> str:
    if not comparison.is_pair():
        return f"answer of score {comparison.ratings[number]:g}"
    (pair,) = comparison.pairs()
    if pair.tie:
        return "one of two that tie"
    return "chosen" if number == pair.chosen else "rejected"


def _messages(messages: Messages) -> list[str]:
    return [f"    {message.role}: {_shown(message)}" for message in messages]


def _shown(message: Message) -> str:
    pieces = [
        part.text.replace("\n", "\n      ")
        if isinstance(part, Text)
        else f"[{part.kind} {media_name(part.reference)}]"
        for part in message.content
    ]
    return " ".join(pieces)


def _listed(head: str, lines: Sequence[str], total: int) -> str:
    rest = [f"  ... and {total - LISTED:,} more"] if total > LISTED else []
    return "\n".join([head, *(f"  {line}" for line in lines), *rest])
