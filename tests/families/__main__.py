"""Write the table of families into docs/models.md: `python -m tests.families`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vlmrm.modeling.families import BY_MODEL_TYPE

from .cases import CASES
from .table import FAMILIES
from .tiny import Tiny

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- families: python -m tests.families -->", "<!-- end of families -->"


def lines() -> Iterator[str]:
    """Yield the lines of the table: how batches are made and what tests show, each with the families it holds for."""
    families = list({family.model_type: family for family in reversed(FAMILIES)}.values())[::-1]
    scored = [family for family in families if family.refused is None]
    shared = sum(family.padded is None for family in scored)
    yield f"{shared} shared, {len(scored) - shared} padded, {len(families) - len(scored)} refused, by `model_type`."
    yield ""
    yield "| Batches | Tested with | Families |"
    yield "|---|---|---|"
    rows: dict[str, dict[str, list[str]]] = {}  # by what a row says: model types by the name of their family
    for family in sorted(families, key=lambda family: (family.refused is not None, family.padded is not None)):
        if family.refused is not None:
            row, name = f"refused: {family.refused} | ", ""
        else:
            how = "shared" if family.padded is None else f"padded: {family.padded}"
            row, name = f"{how} | {tested(family)} ", name_of(family)
        rows.setdefault(row, {}).setdefault(name, []).append(f"`{family.model_type}`")
    for row, names in rows.items():
        cells = [f"{name} {', '.join(types)}".strip() for name, types in sorted(names.items(), key=str)]
        yield f"| {row}| {'; '.join(cells)} |"


def name_of(family: Tiny) -> str:
    return BY_MODEL_TYPE[family.model_type].name


def tested(family: Tiny) -> str:
    """Return the cases of a family's tests: those that it lacks are named, with the reason."""
    kinds = ["text"] * ("text" not in family.lacks) + ["images"] * ("image" not in family.lacks)
    kinds += ["video"] * (family.video is not None and "video" not in family.lacks)
    lacking = [f"no {case}: {reason}" for case, reason in family.lacks.items() if case in CASES]
    needed = [f"needs {family.needs}"] if family.needs is not None else []
    return "; ".join([", ".join(kinds), *lacking, *needed])


def page() -> str:
    """Return docs/models.md with the table as it is now."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return "\n".join([f"{before}{BEGIN}", "", *lines(), "", END]) + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
