"""The page of the results: one file without scripts, with figures and tables, that needs nothing but itself."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmarks.gpu.plots import FIGURES
from benchmarks.gpu.results import PAGE, Results
from vlmrm.files import write_file
from vlmrm.measures.plots import css_variables, drawing, save

TITLE = "vlmrm on a GPU"
# Figures have their colours as attributes of style.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
LEFT_OUT = (  # of a row's own columns
    "case",
    "measured",
    "unit",
    "target",
    "sense",
    "holds",
    "status",
    "attempt",
    "attempt_seconds",
    "failed",
)


def write_page(results: Results, about: Mapping[str, str]) -> Path:
    """Write the page beside the results, and return its path. `about` says what each part measures, in order."""
    parts = [shown(name, text, results) for name, text in about.items() if name in results.parts]
    lines = [line for name in about if name in results.parts for line in results.parts[name].report()]
    where = dict(results.where)
    page = _template().render(
        title=TITLE,
        policy=POLICY,
        light=css_variables(dark=False),
        dark=css_variables(dark=True),
        tiny=results.tiny,
        where=where,
        versions=where.pop("versions", {}),
        parts=parts,
        held=sum(line.get("holds") is True for line in lines),
        missed=[line["case"] for line in lines if line.get("holds") is False],
        failures=results.failures(about),
    )
    path = results.path.with_name(PAGE)
    write_file(path, page)
    return path


def shown(name: str, about: str, results: Results) -> dict[str, Any]:
    """Return what the template shows of a part."""
    part = results.parts[name]
    rows = part.report()
    names = dict.fromkeys(key for row in rows for key in row if key not in LEFT_OUT)
    columns = [name for name in names if any(row.get(name) is not None for row in rows)]
    table = [
        {
            "case": row["case"],
            "measured": row.get("status") or f"{number(row['measured'])} {row['unit']}",
            "target": "" if row.get("target") is None else f"{row['sense']} {number(row['target'])}",
            "verdict": {True: "held", False: "missed"}.get(None if results.tiny else row.get("holds"), ""),
            "style": "failed" if row.get("failed") else "status" if row.get("status") else "measured",
            "cells": [number(row.get(column)) for column in columns],
        }
        for row in rows
    ]
    heads = [column.replace("_", " ") for column in columns]
    return {"name": name, "about": about, "seconds": part.seconds, "heads": heads, "rows": table} | {
        "figures": figures(name, rows)
    }


def figures(name: str, rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the figures of a part as SVG elements."""
    measured = [row for row in rows if row["measured"] is not None]
    with drawing(), tempfile.TemporaryDirectory() as folder:
        drawn = [draw(measured) for draw in FIGURES.get(name, ())]
        return [save(figure, Path(folder), f"{name}-{n}") for n, figure in enumerate(drawn) if figure is not None]


def number(value: Any) -> str:
    """Return a figure in four digits, at most."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _template() -> Any:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.jinja")
