"""Wordings that are not in vlmrm, which a reward reads from a text file: its setting `template_file`."""

from __future__ import annotations

from pathlib import Path

from vlmrm.errors import ConfigError
from vlmrm.rewards.contract import RewardArguments

# What hpsv3 prints when it is imported: where its instruction was printed into a file, so was this.
PRINTED = "Flash Attention is not installed"


def read_template(config: RewardArguments, path: str, *places: str) -> str:
    """The text of a file, with each of `places` in it once.

    Raises:
        ConfigError: when it cannot be read, has not those, or has a line that a program printed into it.
    """
    where = f"reward {config.name}: template_file {path}"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} cannot be read ({error}): check it.") from error
    if PRINTED in text:
        raise ConfigError(
            f"{where} has the line {PRINTED!r}, which hpsv3 printed into it: write it as docs/rewards.md says."
        )
    for place in places:
        if text.count(place) != 1:
            raise ConfigError(f"{where} has {place} {text.count(place)} times: write it once.")
    return text
