"""`vlmrm score`: answers to one prompt, from the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlmrm.errors import ConfigError
from vlmrm.scoring.scorer import load_scorer


def score_command(
    model: str,
    prompt: str,
    responses: Sequence[str],
    images: Sequence[Path],
    response_images: Sequence[Path],
    device: str | None,
    dtype: str,
) -> list[dict[str, Any]]:
    """`{"answer", "score"}` of each answer, in the order given: texts first, then images."""
    if not responses and not response_images:
        raise ConfigError(
            "there is no answer to score: give --response TEXT (or --response-image FILE) once for each."
        )
    question = [
        {
            "role": "user",
            "content": [*({"type": "image", "image": str(path)} for path in images), {"type": "text", "text": prompt}],
        }
    ]
    pictures = [{"role": "assistant", "content": [{"type": "image", "image": str(path)}]} for path in response_images]
    scorer = load_scorer(model, device=device, dtype=dtype)
    [scores] = scorer.score_groups([(question, [*responses, *pictures])])
    names = [*responses, *map(str, response_images)]
    return [{"answer": name, "score": value} for name, value in zip(names, scores, strict=True)]
