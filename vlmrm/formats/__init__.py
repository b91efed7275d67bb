"""Outside formats of conversations, comparisons and samples, one file per format, with their readers and writers.

`LAYOUTS` are those of preference data; `LAYOUTS_TO_SCORE` add rows of answers without preferences. A part that a
format cannot express is an error that names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vlmrm.errors import ConfigError, DataError
from vlmrm.formats import preferences, ratings, rollouts, steps, verdicts
from vlmrm.formats.layout import MEDIA, Layout

# The first match reads the row, so the specific layouts come before the general ones.
LAYOUTS: list[Layout] = [
    preferences.openai_preferences,
    *(steps.steps, steps.math_shepherd, steps.prm800k, steps.progress),
    *(preferences.pick_a_pic, preferences.image_reward, ratings.hpdv2, preferences.hpsv3, preferences.image_pair),
    *(ratings.ranked, ratings.ranking, ratings.completions),
    *(verdicts.text_verdict, verdicts.image_verdict, verdicts.video_verdict),
    *(preferences.alpaca, preferences.sharegpt, preferences.swift, preferences.pair, preferences.rlhf_v),
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


ONE_ANSWER = frozenset(["response", "answer", "completion", "output", "image", "video", "video link", "filename"])
RATING = ("rating", "score", "rank", "quality", "helpfulness", "correctness", "alignment", "label")
PROMPTS = MEDIA | {"prompt", "question", "instruction"}  # which say nothing about the layout


def _hint(names: frozenset[str], layouts: Sequence[Layout]) -> str:
    """Return the end of the error about columns that no layout has: the nearest layout, and what it lacks."""

    def nearness(layout: Layout) -> tuple[float, int]:
        needed = layout.needed(names)
        share = len(needed & names) / len(needed) if needed & names - PROMPTS and not layout.without & names else 0.0
        return share, len(layout.columns() & names)

    layout = max(layouts, key=nearness)
    single = rollouts.prompt_response
    rated = single not in layouts and single.matches(names) and names - single.columns()
    if rated or (ONE_ANSWER & names and any(name.lower().endswith(RATING) for name in names)):
        return ratings.ONE_ANSWER
    if nearness(layout)[0] < 0.5:
        such = "`prompt` and `response`" if single in layouts else "`prompt`, `chosen` and `rejected`"
        return f"rename them to those of one, such as {such}"
    return f"the nearest is `{layout.name}`, which also needs {layout.missing(names)}"
