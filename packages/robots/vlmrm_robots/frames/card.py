"""The card of a frame classifier: what it tells apart, how well, and whether that makes it a reward."""

from __future__ import annotations

from math import isnan
from pathlib import Path

from vlmrm.files import require_own_file, write_file
from vlmrm_robots.frames.classifier import ClassifierConfig
from vlmrm_robots.frames.settings import QUESTION

MARK = "<!-- Written by vlmrm frames"
# Shares of frames, with the ends of their 95 % intervals by episode.
FRAMES = {
    "auc": "AUC",
    "episode_auc": "AUC within an episode",
    "step_auc": "AUC at the same step",
    "precision": "precision",
    "recall": "recall",
    "false_positive_rate": "failures above the threshold",
}
USE = """\
```python
from vlmrm_robots.frames.checkpoint import load_classifier
from vlmrm_robots.frames.frame_reward import FrameScorer

scorer = FrameScorer(load_classifier("{name}"))
scorer.probabilities({{{frames}}})  # [N,C,H,W] of {size}, uint8 or floats in [0, 1]
```
"""


def card_path(checkpoint: Path) -> Path:
    """Return where the card of a checkpoint lies: beside it."""
    return checkpoint.with_name(f"{checkpoint.name}.md")


def check_card(checkpoint: Path) -> None:
    """Refuse a checkpoint whose card would replace a file of another kind; ConfigError names it."""
    require_own_file(card_path(checkpoint), MARK)


def write_card(checkpoint: Path, config: ClassifierConfig) -> Path:
    """Write the card beside a checkpoint, in place of an earlier one, and return its path."""
    check_card(checkpoint)
    path = card_path(checkpoint)
    write_file(path, card(checkpoint.name, config))
    return path


def card(name: str, config: ClassifierConfig) -> str:
    """Return the card as Markdown."""
    played = f" of `{config.environment}`" if config.environment else ""
    sections = [
        f"{MARK} -->\n# {name}\n",
        f"Tells from a frame{played} whether the task is done.\n",
        f"**{verdict(config)}**\n",
        *([_figures(config)] if config.metrics else []),
        f"## Use\n\n{_use(name, config)}",
        f"## Made of\n\n{_made_of(config)}",
    ]
    return "\n".join(sections)


def verdict(config: ClassifierConfig) -> str:
    """Return in a sentence whether the classifier qualifies as a reward."""
    if config.qualified is None:
        return "Nobody has measured whether it qualifies as a reward: `vlmrm frames eval` does."
    if config.qualified:
        return "It qualifies as a reward."
    return (
        f"It does not qualify as a reward: {config.unqualified_because}. A policy takes it with `accept_unqualified` "
        "alone."
    )


def _figures(config: ClassifierConfig) -> str:
    measured = config.metrics
    lines = ["| frames held out | | 95 % interval |", "|---|---|---|"]
    for key, title in FRAMES.items():
        ends = f"{measured[f'{key}_low']:.4f} to {measured[f'{key}_high']:.4f}"
        lines.append(f"| {title} | {'unknown' if isnan(measured[key]) else f'{measured[key]:.4f}'} | {ends} |")
    lines += [
        "",
        f"Of {measured['validation_frames']:.0f} frames, {measured['validation_successes']:.0f} of them successes, by "
        f"episode; precision and recall above the threshold {config.threshold:.4g}.",
        "",
        "| episodes held out | | with 95 % confidence of all |",
        "|---|---|---|",
        f"| failed ones with a frame above it | {measured['false_fires']:.0f} of {measured['failed_episodes']:.0f} | "
        f"at most {measured['false_fires_high']:.0%} |",
        f"| successful ones in which it sees the success | {measured['rewarded_episodes']:.0f} of "
        f"{measured['successful_episodes']:.0f} | at least {measured['rewarded_episodes_low']:.0%} |",
        "",
    ]
    return "\n".join(lines)


def _use(name: str, config: ClassifierConfig) -> str:
    frames = ", ".join(f'"{key}": {key}' for key in config.image_keys)
    return USE.format(name=name, frames=frames, size=list(config.image_size))


def _made_of(config: ClassifierConfig) -> str:
    encoder = "a frozen pretrained encoder" if config.freeze_encoder else "an encoder that was trained too"
    prompt = {} if config.prompt == QUESTION else {"prompt": config.prompt}
    values = {
        "architecture": f"{config.architecture}, {encoder}, pooling {config.pooling}",
        **({"reward model": config.reward_model} if config.reward_model else {}),
        **prompt,
        "cameras": ", ".join(config.image_keys),
        "frames [C,H,W]": list(config.image_size),
        **({"crop": config.crop} if config.crop else {}),
        "episodes, trained on or held out": len(config.episodes),
        "fingerprint of the data": config.data_fingerprint or "unknown",
    }
    return "".join(f"- {key}: {value}\n" for key, value in values.items())
