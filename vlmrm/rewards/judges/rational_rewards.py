"""`rational_rewards_t2i` and `rational_rewards_edit`: the RationalRewards rubric for generated and edited images.

The judges are TIGER-Lab/RationalRewards-8B-T2I and TIGER-Lab/RationalRewards-8B-Edit (TIGER-AI-Lab/RationalRewards),
which justify a score of each aspect from 1 to 4. The rubric's wording here is our own; its aspects, their order, the
scale and the form of the reply are those that the judges were trained on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from vlmrm.errors import ConfigError, RewardError
from vlmrm.rewards.contract import Processes, RewardArguments, Verdict
from vlmrm.rewards.judges.judge import Judge, JudgeSample, SampleSettings, fence, source_part, text_part
from vlmrm.rewards.judges.replies import NOT_APPLICABLE, Reply, read_score, without_thinking

TITLES = {
    "text_faithfulness": "Text Faithfulness",
    "image_faithfulness": "Image Faithfulness",
    "physical_quality": "Physical and Visual Quality",
    "text_rendering": "Text Rendering",
}
MEANINGS = {
    "text_faithfulness": "does the {image} show everything that the instruction asks for, and nothing against it: "
    "objects, counts, attributes, relations, style?",
    "image_faithfulness": "is everything that the instruction does not ask to change the same as in the source image: "
    "identities, layout, background, style?",
    "physical_quality": "are shapes, anatomy, light and perspective plausible, and is the picture clean, sharp and "
    "free of artifacts?",
    "text_rendering": "is the writing that was asked for legible, spelt right and well placed? N/A if the instruction "
    "asks for no writing.",
}
RUBRIC = """Judge the {image} in the following aspects. Each gets a score from 1 to 4, decimals such as 2.7 allowed:
4 is without fault, 3 has small faults, 2 clear ones, and 1 fails. Write N/A where an aspect does not apply.
{aspects}

Reply in exactly this form:
# User Request Analysis:
(what was asked for)
# Detailed Judgement
{form}
# Summary:
(the judgement in brief)
# User Request Refinement:
(how the instruction could be put better)"""

WORST, BEST = 1.0, 4.0
JUDGEMENT = re.compile(r"^[\s#*_]*Detailed Judge?ment\b", re.IGNORECASE)
SUMMARY = re.compile(r"^\s*(?:#+[\s*_]*|\*\*\s*)Summary\b", re.IGNORECASE)
SCORE = re.compile(r"(?:^|[^A-Za-z0-9_])Score[\s*_]*(?:\([^)]*\)[\s*_]*)?(?:[:=]|：)(?P<value>.*)$", re.IGNORECASE)
NUMBERED = re.compile(r"^[\s#*_>-]*\d+\s*[.):]")

Score = float | str | None


class T2ISettings(SampleSettings):
    vlm_model: str = "RationalRewards-8B-T2I"
    temperature: float = Field(0.1, ge=0)
    aspects: list[str] | None = None
    """Aspects in the reward; the judge is always asked about all of them."""


class EditSettings(T2ISettings):
    vlm_model: str = "RationalRewards-8B-Edit"


class RationalRewardsT2I(Judge):
    """(m - 1) / 3 with m the mean over text faithfulness, physical quality and text rendering: [N] in [0, 1].

    An aspect that does not apply is left out of the mean. A reply that lacks an aspect is a failure; the published
    code takes the mean of the aspects that it has, so that a reply that breaks off is scored on its first aspect
    alone.
    """

    Settings = T2ISettings
    settings: T2ISettings
    original = "rational_rewards_t2i"
    aspects: ClassVar[tuple[str, ...]] = ("text_faithfulness", "physical_quality", "text_rendering")
    subject: ClassVar[str] = "generated image"

    def __init__(self, config: RewardArguments, accelerator: Processes):
        super().__init__(config, accelerator)
        self.counted = self.aspects if self.settings.aspects is None else tuple(self.settings.aspects)
        unknown = sorted(set(self.counted) - set(self.aspects))
        if unknown or not self.counted:
            raise ConfigError(
                f"reward {config.name}: aspects is {list(self.counted)}: choose from {', '.join(self.aspects)}."
            )

    def chat(self, sample: JudgeSample) -> tuple[str, list[dict[str, Any]]]:
        meanings = [f"{TITLES[name]}: {MEANINGS[name].format(image=self.subject)}" for name in self.aspects]
        form = [f"{TITLES[name]}:\n## Justification: (why)\n## Score: (a number, or N/A)" for name in self.aspects]
        rubric = RUBRIC.format(image=self.subject, aspects=_numbered(meanings), form=_numbered(form))
        instruction = text_part(f"User Instruction:\n{fence(sample.prompt)}")
        return f"You are an expert judge of {self.subject}s.", [instruction, *self.pictures(sample), text_part(rubric)]

    def pictures(self, sample: JudgeSample) -> list[dict[str, Any]]:
        """Return the images to judge as parts of the message."""
        return self.media(sample)

    def verdict(self, reply: Reply, sample: JudgeSample) -> Verdict:
        scores = read_aspects(reply.text, {name: TITLES[name] for name in self.aspects})
        reward = aggregate({name: scores[name] for name in self.counted})
        return Verdict(reward, {"aspects": scores})


class RationalRewardsEdit(RationalRewardsT2I):
    """The same for an edited image beside its source, with image faithfulness as a fourth aspect."""

    Settings = EditSettings
    original = "rational_rewards_edit"
    shown = ("image", "source")
    aspects = ("text_faithfulness", "image_faithfulness", "physical_quality", "text_rendering")
    subject = "edited image"

    def pictures(self, sample: JudgeSample) -> list[dict[str, Any]]:
        source = [text_part("Source image:"), source_part(sample)]
        return [*source, text_part("Edited image:"), *self.media(sample)]


def _numbered(items: list[str]) -> str:
    return "\n".join(f"{number}. {item}" for number, item in enumerate(items, start=1))


def read_aspects(reply: str, titles: Mapping[str, str]) -> dict[str, Score]:
    """Return the score of each aspect, `"N/A"`, or None where the reply has none; `titles` are by name.

    The published form is `1. Text Faithfulness:`, `## Justification: ...`, `## Score: 3.5` for each aspect. Models
    also write titles and scores in bold, other headings, `3/4`, `3,5` or `n/a`; all of it is read.
    """
    lines = _judgement(without_thinking(reply).splitlines())
    # A numbered heading may have words beside the title; without a number only the title alone is a heading, but
    # anywhere in a line.
    sections = _sections(lines, titles, _numbered_heading)
    if not sections:
        title = "|".join(map(re.escape, titles.values()))
        parts = [part for line in lines for part in re.split(rf"(?i)(?=\b(?:{title})\s*[:：])", line)]
        sections = _sections(parts, titles, _plain_heading)
    scores: dict[str, Score] = dict.fromkeys(titles)
    for name, lines in sections:  # the first score of the last section that has one
        found = (read_score(match["value"], BEST) for match in map(SCORE.search, lines) if match)
        scores[name] = next((score for score in found if score is not None), scores[name])
    return scores


def aggregate(scores: Mapping[str, Score]) -> float:
    """Return (m - 1) / 3 in [0, 1], with m the mean of the scores that apply, each clamped to [1, 4]."""
    missing = [name for name, score in scores.items() if score is None]
    if missing:
        raise RewardError(f"the reply has no score for {', '.join(missing)}")
    present = [min(BEST, max(WORST, float(score))) for score in scores.values() if score not in (None, NOT_APPLICABLE)]
    if not present:
        raise RewardError("the reply has N/A for every aspect")
    return (sum(present) / len(present) - WORST) / (BEST - WORST)


def _judgement(lines: list[str]) -> list[str]:
    """Return the lines between the analysis, where a quoted prompt may look like a judgement, and the summary."""
    start = max((number for number, line in enumerate(lines) if JUDGEMENT.match(line)), default=0)
    end = next((number for number in range(start, len(lines)) if SUMMARY.match(lines[number])), len(lines))
    return lines[start:end]


def _sections(
    lines: Sequence[str], titles: Mapping[str, str], heading: Callable[[str, str], bool]
) -> list[tuple[str, list[str]]]:
    """Return the headings' aspects, each with its lines, heading included."""
    sections: list[tuple[str, list[str]]] = []
    for line in lines:
        if (name := next((name for name, title in titles.items() if heading(line, title)), None)) is not None:
            sections.append((name, []))
        if sections:
            sections[-1][1].append(line)
    return sections


def _numbered_heading(line: str, title: str) -> bool:
    return NUMBERED.match(line) is not None and title.lower() in line.lower()


def _plain_heading(line: str, title: str) -> bool:
    return re.match(rf"^[\s#*_>-]*{re.escape(title)}[\s*_]*(?::|：|$)", line, re.IGNORECASE) is not None
