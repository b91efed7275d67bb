"""Judges that score a sample by itself.

`edit_score`, `unified_reward` (Wang et al. 2025), `vllm_evaluate`, and `rational_rewards_t2i` and `_edit`, which are
TIGER-Lab/RationalRewards-8B-T2I and -Edit, which justify a score of each aspect from 1 to 4. The wording of all is our
own; RationalRewards' aspects, their order, the scale and the form of the reply are those that it was trained on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from vlmrm.errors import ConfigError, RewardError
from vlmrm.rewards.contract import Processes, RewardArguments, Verdict
from vlmrm.rewards.judges.judge import (
    Judge,
    JudgeSample,
    SampleSettings,
    fence,
    read_request_file,
    source_part,
    text_part,
)
from vlmrm.rewards.judges.replies import NOT_APPLICABLE, Question, Reply, read_score, without_thinking

SYSTEM = "You are a professional digital artist who judges generated pictures by rules."
FORM = """Reply in this form, with a short reasoning:
{"reasoning": "...", "score": [score1, score2]}"""
FOLLOWING = """The first image was edited into the second one by the instruction. The two may be alike, where the edit
failed. Give two scores from 0 to 25:
score1: is the instruction carried out? (0: not at all, 25: entirely)
score2: is all else as it was? (0: another scene, 25: no more is changed than was asked for)
The instruction:"""
QUALITY = """Give the image two scores from 0 to 25:
score1: does it look natural: distances, shadows, light? (0: not at all, 25: entirely)
score2: is it free of artifacts: distortions, watermarks, scratches, blurred faces, odd limbs? (0: full of them, 25: of
all)"""
BEST = 25.0
SCALE = 10.0  # of the score of a pass
# {"reasoning": "...", "score": [20, 15]} with any quotes, also where the reasoning breaks the JSON; or [20, 15] alone.
LIST = r"\[\s*([-+]?\d+(?:\.\d+)?)\s*,\s*([-+]?\d+(?:\.\d+)?)\s*,?\s*\]"
SCORES = re.compile(rf"""(?:["'“”‘’]score["'“”‘’]|\bscore)\s*[:=]\s*{LIST}""", re.IGNORECASE)
ALONE = re.compile(rf"\s*{LIST}\s*")
IMAGE = """A text caption and an image that was generated from it are given. Evaluate the image by two criteria:
1. Alignment with the Caption: are the objects, their attributes and their relations those of the caption?
2. Overall Image Quality: is it clear and detailed, are its colours right, and does it please the eye?
List the key elements of the caption in the format 'element (type): value', where value=1 means that the image shows
the element and value=0 that it does not, and then assign a score from 1 to 5 after 'Final Score:'.
Text Caption: [{prompt}]"""
VIDEO = """As an expert judge of AI-generated videos, look at the frames of a video and at the text prompt that it was
generated from. Score five dimensions by a number from 1 (bad) to 4 (perfect, like a real video), one a line:
visual quality: (clearness, resolution, brightness, colour)
temporal consistency: (do objects and people stay the same?)
dynamic degree: (how much changes?)
text-to-video alignment: (does it show what the prompt asks for?)
factual consistency: (does it agree with common sense and facts?)
Finally assign a score from 1 to 10 after 'Final Score:'.
Text Prompt: [{prompt}]"""
FINAL = re.compile(r"Final[ \t]+Score[\s*_]*(?:\([^)]{0,40}\)[\s*_]*)?(?::|：)(?P<value>.*)", re.IGNORECASE)
# UnifiedReward 2.0: several scores and no final one.
SEVERAL = re.compile(
    r"\b(?P<name>Alignment|Coherence|Physics|Style)[ \t]+Score[\s*_]*(?:\([^)]{0,40}\)[\s*_]*)?(?::|：)(?P<value>.*)",
    re.IGNORECASE,
)
YES_NO = (
    "Consider whether it looks natural, is free of artifacts, pleases the eye, shows fine detail, and hangs together "
    "as a whole{matches}. Is this of high quality? Answer Yes or No."
)
MATCHES = ", and whether it shows what the description above asks for"
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

WORST, PERFECT = 1.0, 4.0
JUDGEMENT = re.compile(r"^[\s#*_]*Detailed Judge?ment\b", re.IGNORECASE)
SUMMARY = re.compile(r"^\s*(?:#+[\s*_]*|\*\*\s*)Summary\b", re.IGNORECASE)
SCORE = re.compile(r"(?:^|[^A-Za-z0-9_])Score[\s*_]*(?:\([^)]*\)[\s*_]*)?(?:[:=]|：)(?P<value>.*)$", re.IGNORECASE)
NUMBERED = re.compile(r"^[\s#*_>-]*\d+\s*[.):]")

Score = float | str | None


class EditScoreSettings(SampleSettings):
    vlm_model: str = "EditScore"
    temperature: float = Field(0.7, ge=0)
    quality_request_file: str | None = None
    """File with the whole request of the second question; it goes with `request_file`, that of the first."""


class EditScore(Judge):
    """sqrt(min(SC) min(PQ)) of a pass, 0 to 10, and the mean over the passes: [N] (Luo et al. 2025, arXiv:2509.23909).

    SC are the judge's two scores of how the edit follows the instruction and keeps the rest, PQ those of how natural
    and clean the edited image looks, each 0 to 25; `replies` is the number of passes. Made for EditScore/EditScore-7B
    and its Qwen3-VL forms. A sample has one condition image, the source. A reply without two scores on the scale is
    asked again and then a failure; the published code guesses one at random, or takes the middle of the scale.
    """

    required_fields = ("prompt", "image", "condition_images")
    Settings = EditScoreSettings
    settings: EditScoreSettings
    original = "edit_score"
    shown = ("image", "source")

    def __init__(self, config: RewardArguments, accelerator: Processes):
        super().__init__(config, accelerator)
        path, where = self.settings.quality_request_file, f"reward {config.name}"
        if (path is None) != (self.request is None):
            raise ConfigError(
                f"{where}: request_file and quality_request_file are the two questions: give both or neither."
            )
        self.quality = None if path is None else read_request_file(path, where, ("image",))

    def chat(self, sample: JudgeSample) -> tuple[str, list[dict[str, Any]]]:
        pictures = [source_part(sample), *self.media(sample)]
        return SYSTEM, [*pictures, text_part(f"{FOLLOWING}\n{fence(sample.prompt)}\n{FORM}")]

    def questions(self, sample: JudgeSample) -> list[Question]:
        """Return the question how the edit follows the instruction, and that how the edited image looks."""
        if self.quality is None:
            quality = self.chat_question(SYSTEM, [*self.media(sample), text_part(f"{QUALITY}\n{FORM}")])
        else:
            quality = self.quality.question(sample.prompt, {"image": self.frames(sample)})
        return [*super().questions(sample), quality]

    def verdict(self, reply: Reply, sample: JudgeSample) -> Verdict:
        scores = read_scores(reply.text)
        return Verdict(min(scores) / (BEST / SCALE), {"scores": scores})

    def combined(self, verdicts: Sequence[Verdict]) -> Verdict:
        """Return the score of a pass."""
        scores = [verdict.details["scores"] for verdict in verdicts]
        return Verdict(math.sqrt(math.prod(verdict.reward for verdict in verdicts)), {"scores": scores})


def read_scores(text: str) -> list[float]:
    """Return the two scores of a reply, the last that it gives."""
    text = without_thinking(text)
    alone = ALONE.fullmatch(text)
    found = [match.groups() for match in SCORES.finditer(text)] or ([alone.groups()] if alone else [])
    if not found:
        raise RewardError('the reply has no "score": [score1, score2]')
    scores = [float(number) for number in found[-1]]
    if off := [score for score in scores if not 0 <= score <= BEST]:
        raise RewardError(f"it has the score {off[0]:g}, which is not from 0 to {BEST:g}")
    return scores


class UnifiedRewardSettings(SampleSettings):
    vlm_model: str = "UnifiedReward"


class UnifiedReward(Judge):
    """The judge's final score unchanged, 1 to 5 for an image, 1 to 10 for a video: [N].

    Made for CodeGoat24/UnifiedReward-7b-v1.5 and UnifiedReward-qwen-7b, served by vLLM under the name `UnifiedReward`.
    The questions follow the published ones of
    `inference_qwen/{image,video}_generation/qwen_point_score_*_generation.py` in our own words; a `request_file` has
    the published ones. Without a final score, the reward is the mean of UnifiedReward 2.0's scores, each 1 to 5, or
    the smaller of UnifiedReward-Edit's two, 0 to 25.
    """

    Settings = UnifiedRewardSettings
    settings: UnifiedRewardSettings
    original = "unified_reward_2"

    def chat(self, sample: JudgeSample) -> tuple[str, list[dict[str, Any]]]:
        template = IMAGE if sample.video is None else VIDEO
        question = template.replace("{prompt}", fence(sample.prompt))
        return "You are a helpful assistant.", [*self.media(sample), text_part(question)]

    def verdict(self, reply: Reply, sample: JudgeSample) -> Verdict:
        best = 5.0 if sample.video is None else 10.0
        text = without_thinking(reply.text)
        finals = [match["value"] for match in FINAL.finditer(text)]
        if not finals:
            return _without_final(text)
        score = read_score(finals[-1], best)
        if not isinstance(score, float) or not 1 <= score <= best:
            raise RewardError(f"its Final Score is {finals[-1].strip()[:40]!r}, which is no number from 1 to {best:g}")
        return Verdict(score)


def _without_final(text: str) -> Verdict:
    """Return the verdict in the forms of UnifiedReward 2.0 and UnifiedReward-Edit."""
    values = {match["name"].title(): match["value"] for match in SEVERAL.finditer(text)}
    if '"score"' in text and not values:
        scores = read_scores(text)
        return Verdict(min(scores), {"aspects": scores})
    aspects = {}
    for name, value in values.items():
        score = read_score(value, 5.0)
        if not isinstance(score, float) or not 1 <= score <= 5:
            raise RewardError(f"its {name} score is {value.strip()[:40]!r}, no number from 1 to 5")
        aspects[name] = score
    if len(aspects) < 2:
        raise RewardError("the reply has no Final Score, nor the several scores of UnifiedReward 2.0")
    return Verdict(sum(aspects.values()) / len(aspects), {"aspects": aspects})


class YesNoSettings(SampleSettings):
    vlm_model: str = "Qwen3-VL"
    max_concurrent: int = Field(100, ge=1)
    max_retries: int = Field(10, ge=0)
    malformed_retries: int = Field(0, ge=0)  # the probabilities of a first token are the same again
    timeout: float = Field(60.0, gt=0)
    max_tokens: int = Field(1, ge=1)
    """The answer is the first token."""
    top_logprobs: int = Field(20, ge=2)
    """Number of likeliest first tokens that the server returns."""
    canonicalize: bool = False
    """Sum the tokens that are Yes or No in any case and with spaces, not only `Yes` and `No`."""
    question: str | None = None
    """A question to be answered by Yes or No; default: about five aspects of quality."""
    send_prompt: bool = False
    """Send the prompt, fenced, before the question."""


class YesNo(Judge):
    """P(Yes) / (P(Yes) + P(No)) of the first token of the reply: [N] in [0, 1].

    With l the log-probabilities that the server returns: σ(l(Yes) - l(No)); where one of the two is not among the
    likeliest tokens, 1 or 0. A reply without either, or without log-probabilities, is a failure. The formula is
    Flow-Factory's; the score is VQAScore's (Lin et al. 2024), normalised over the two answers.
    """

    Settings = YesNoSettings
    settings: YesNoSettings
    cut_off: ClassVar[tuple[str, ...]] = ("content_filter",)

    def parameters(self) -> dict[str, Any]:
        return {"logprobs": True, "top_logprobs": self.settings.top_logprobs}

    def chat(self, sample: JudgeSample) -> tuple[str, list[dict[str, Any]]]:
        parts = self.media(sample)
        if self.settings.send_prompt:
            parts.append(text_part(f"It was made for this description:\n{fence(sample.prompt)}"))
        question = self.settings.question or YES_NO.format(matches=MATCHES if self.settings.send_prompt else "")
        return "You judge generated pictures and videos.", [*parts, text_part(question)]

    def verdict(self, reply: Reply, sample: JudgeSample) -> Verdict:
        if reply.top_logprobs is None:
            raise RewardError("the server sent no log-probabilities: it must support logprobs and top_logprobs")
        yes, no = (self._probability(reply.top_logprobs, answer) for answer in ("yes", "no"))
        if not yes + no > 0:
            first = ", ".join(repr(token) for token, _ in reply.top_logprobs[:5])
            raise RewardError(f"neither Yes nor No is among its likeliest first tokens ({first}, ...)")
        return Verdict(yes / (yes + no), {"yes": yes, "no": no})

    def _probability(self, tokens: list[tuple[str, float]], answer: str) -> float:
        if self.settings.canonicalize:
            return sum(math.exp(logprob) for token, logprob in tokens if token.strip().lower() == answer)
        return math.exp(dict(tokens).get(answer.capitalize(), -math.inf))


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
        found = (read_score(match["value"], PERFECT) for match in map(SCORE.search, lines) if match)
        scores[name] = next((score for score in found if score is not None), scores[name])
    return scores


def aggregate(scores: Mapping[str, Score]) -> float:
    """Return (m - 1) / 3 in [0, 1], with m the mean of the scores that apply, each clamped to [1, 4]."""
    missing = [name for name, score in scores.items() if score is None]
    if missing:
        raise RewardError(f"the reply has no score for {', '.join(missing)}")
    present = [
        min(PERFECT, max(WORST, float(score))) for score in scores.values() if score not in (None, NOT_APPLICABLE)
    ]
    if not present:
        raise RewardError("the reply has N/A for every aspect")
    return (sum(present) / len(present) - WORST) / (PERFECT - WORST)


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
