"""Write what `drive.py` proved into docs/rewards.md.

    python drives/neighbours/table.py [--check]

Rows that differ by the date and the last digits alone are left as they are, and so are those of frameworks that were
not driven; --check fails where others differ.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from environments import FOLDER, ROOT

PAGE = ROOT / "docs" / "rewards.md"
NEIGHBOURS = ("<!-- neighbours: make neighbours -->\n", "<!-- end of the neighbours -->\n")
REQUESTS = ("<!-- judges' requests: make neighbours -->\n", "<!-- end of the judges' requests -->\n")
# The columns of the tables, each with the checks of drivers that belong to it.
REWARDS = {
    "`load_scorer`'s rewards": ("resolves", "equal", "equal_texts", "blind"),
    "a broken sample": ("broken",),
    "the service is away": ("away", "away_remote", "late"),
    "a group over two ranks": ("ranks", "ranks_broken"),
    "GDPO of two rewards": ("gdpo", "gdpo_broken"),
}
GUIDE = {
    "the blocks of the guide, as they stand": ("resolves", "guide", "guide_set", "guide_manager"),
    "seconds of all": ("seconds",),
}
FRAMES = {
    "episodes in its format": ("resolves", "written", "read", "video", "progress"),
    "frames as its reward": ("actor",),
}
# The judges' programs, with the rewards that send the same requests.
PROGRAMS = {
    "vllm_evaluate": ("Flow-Factory, `vllm_evaluate`", "`vllm_evaluate`"),
    "rational_rewards_t2i": ("Flow-Factory, `rational_rewards_t2i`", "the same"),
    "rational_rewards_edit": ("Flow-Factory, `rational_rewards_edit`", "the same"),
    "unified_reward_1": ("RationalRewards, its Flow-GRPO scorer of UnifiedReward 1", "`unified_reward`"),
    "edit_score": ("EditScore, its class over an API, 4 passes of two questions", "`edit_score`"),
    "unified_reward_2": ("UnifiedReward 2.0, `point_score_ACS_image_generation.py`", "`unified_reward`"),
    "unified_reward_2_pairs": ("UnifiedReward 2.0, `pair_score_image_generation.py`", "`pairwise_judge`"),
    "unified_reward_think": ("UnifiedReward-Think, `qwen3_infer_cot_image_generation.py`", "`pairwise_judge`"),
    "unified_reward_flex": ("UnifiedReward-Flex, `flex_pair_rank_image_generation.py`", "`pairwise_judge`"),
    "unified_reward_edit_instruction": (
        "UnifiedReward-Edit, `edit_pointwise_instruction_following.py`",
        "`unified_reward`",
    ),
    "unified_reward_edit_quality": ("UnifiedReward-Edit, `edit_pointwise_quality.py`", "`unified_reward`"),
    "unified_reward_edit_rank": ("UnifiedReward-Edit, `edit_pairwise_rank.py`", "`pairwise_judge`"),
    "unified_reward_edit_pair_score": ("UnifiedReward-Edit, `edit_paiwise_score.py`", "`pairwise_judge`"),
}


def cell(checks: dict[str, Any], names: tuple[str, ...]) -> str:
    """Return the verdicts on some checks in words."""
    said = []
    for check in (checks[name] for name in names if name in checks):
        what = (
            check["what"].splitlines()[0].removeprefix("AssertionError: ").replace("|", "/") if check["what"] else ""
        )
        said += [] if check["proved"] and not what else [what if check["proved"] else f"**not proved**: {what}"]
    return "; ".join(said) or "–"


def tables(results: dict[str, Any], written: str) -> str:
    """Return the results as tables of the guide, of rewards and of frames, in place of those that are `written`."""
    before = written.strip().split("\n\n")
    others = {name: one for name, one in results.items() if name != "judges"}
    for one in others.values():
        one["checks"]["seconds"] = {"proved": True, "what": str(one["seconds"])}
    return "\n".join(table(others, *one) for one in zip(before, (GUIDE, REWARDS, FRAMES), strict=True))


def requests(results: dict[str, Any], written: str) -> str:
    """Return a row each judge's program; all as they are `written` if none was run."""
    if "judges" not in results:
        return written.lstrip("\n").removesuffix("\n")
    rows = [("program", "reward", "equal, byte for byte"), ("---",) * 3]
    checks = results["judges"]["checks"]
    rows += [(*titles, cell(checks, (name,))) for name, titles in PROGRAMS.items()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def table(results: dict[str, Any], written: str, columns: dict[str, tuple[str, ...]]) -> str:
    """Return a row each framework that has these checks; one that was not driven keeps its row of `written`."""
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in written.splitlines()}
    lines = [["framework", "version", "driven on", *columns], ["---"] * (3 + len(columns))]
    shown = {name for names in columns.values() for name in names} - {"seconds", "resolves"}
    for one in results.values():
        cells = [cell(one["checks"], names) for names in columns.values()]
        if shown & one["checks"].keys() or not one["checks"]["resolves"]["proved"]:
            lines.append([one["title"], one["version"], one["date"], *cells])
    rows |= {line[0]: f"| {' | '.join(line)} |" for line in lines}
    return "".join(f"{row}\n" for row in rows.values())


def lasting(text: str) -> str:
    """Return the tables without what differs from run to run: dates, seconds, and how far off rewards are."""
    return re.sub(r"\d{4}-\d\d-\d\d|\d+e[+-]\d+|(?<=\| )\d+(?= \|)", "", text)


def main(arguments: list[str]) -> str | None:
    """Write the tables; with --check return what to do where the page has others."""
    page = PAGE.read_text(encoding="utf-8")
    results = json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))
    changed = ""
    for (start, end), made in ((NEIGHBOURS, tables), (REQUESTS, requests)):
        before, rest = page.split(start)
        written, after = rest.split(end)
        proved = f"\n{made(results, written)}\n"
        if lasting(proved) != lasting(written):
            page = before + start + proved + end + after
            changed += proved
    if changed and "--check" in arguments:
        return f"The tables in {PAGE} are not what was proved: run `make neighbours`.\n{changed}"
    PAGE.write_text(page, encoding="utf-8")
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
