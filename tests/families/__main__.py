"""Print the table of families for docs/models.md: `python -m tests.families`."""

from __future__ import annotations

from collections.abc import Iterator

from vlmrm.modeling.families import BY_MODEL_TYPE

from .cases import CASES
from .table import FAMILIES
from .tiny import Tiny


def lines() -> Iterator[str]:
    """Yield the lines of the table: each model type with how it is batched, and what tests show of it or why not."""
    scored = [family for family in FAMILIES if family.refused is None]
    shared = sum(family.padded is None for family in scored)
    yield f"{shared} shared, {len(scored) - shared} padded, {len(FAMILIES) - len(scored)} refused."
    yield ""
    yield "| Family | `model_type` | Batches | Tested with |"
    yield "|---|---|---|---|"
    for family in sorted(scored, key=lambda family: (name_of(family).lower(), family.model_type)):
        how = "shared" if family.padded is None else f"padded: {family.padded}"
        yield f"| {name_of(family)} | `{family.model_type}` | {how} | {tested(family)} |"
    for family in FAMILIES:
        if family.refused is not None:
            yield f"| – | `{family.model_type}` | refused: {family.refused} | |"


def name_of(family: Tiny) -> str:
    return BY_MODEL_TYPE[family.model_type].name


def tested(family: Tiny) -> str:
    """Return the cases of a family's tests: those that it lacks are named, with the reason."""
    kinds = ["text"] * ("text" not in family.lacks) + ["images"] * ("image" not in family.lacks)
    kinds += ["video"] * (family.video is not None and "video" not in family.lacks)
    lacking = [f"no {case}: {reason}" for case, reason in family.lacks.items() if case in CASES]
    needed = [f"needs {family.needs}"] if family.needs is not None else []
    return "; ".join([", ".join(kinds), *lacking, *needed])


if __name__ == "__main__":
    print("\n".join(lines()))  # noqa: T201
