"""`vlmrm report`: a self-contained page about scored pairs, its figures as files; and `vlmrm card`."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

import vlmrm
from vlmrm.errors import ConfigError
from vlmrm.evaluation.report import audit
from vlmrm.evaluation.report.checkpoints import (
    Checkpoint,
    Choice,
    choose,
    interval,
    number,
    percent,
    read_frames,
    read_sweeps,
    split,
    without_figures,
)
from vlmrm.evaluation.report.explorer import pack_pairs
from vlmrm.evaluation.report.sections import curve, of_outputs, sections
from vlmrm.files import make_folder, require_own_file, write_file
from vlmrm.measures.interventions import INTERVENTIONS
from vlmrm.measures.plots import css_variables, drawing, save

PAGE, PLOTS = "report.html", "plots"
CARD = "README.md"
CARDS = ("<!-- Written by vlmrm card", "[More Information Needed]")  # ours, and PEFT's empty form


def build_report(
    sources: Sequence[pd.DataFrame | str | Path], output_dir: str | Path, title: str = "Reward model report"
) -> Path:
    """Write `report.html` and `plots/*.svg|png` to `output_dir`, and return the page's path.

        build_report(["results/mine.csv"], "results/report")

    Args:
        sources: frames of scored pairs, `.scores.parquet` files, or the results (.csv, .json) beside them. The
            report is about the best checkpoint of the .json, or without one about the most accurate.
    """
    checkpoints, left_out = split(read_frames(sources))
    sweeps = read_sweeps(sources)
    choice = choose(checkpoints, sweeps)
    best, chips = choice.best, audit.chips(choice) if checkpoints else []
    if choice.leakage and choice.leakage["leaked_rows"]:
        left_out.append("{leaked_rows:,} of {rows:,} rows were trained on.".format_map(choice.leakage))
    folder = Path(output_dir)
    require_own_file(folder / PAGE, 'content="vlmrm report"')
    make_folder(folder / PLOTS)
    with drawing():
        first, page_sections = curve(checkpoints, best), sections(checkpoints, choice)
        drawings = [*first, *(drawing for section in page_sections for drawing in section.drawings)]
        drawn = {it.name: save(it.figure, folder / PLOTS, it.name) for it in drawings}
    dark = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {css_variables(dark=True)} }} }}"
    style = f":root {{ {css_variables(dark=False)} }}\n{dark}\n{_beside('page.css')}"
    script = _beside("explorer.js")
    html = (
        templates()
        .get_template("report/page.html.jinja")
        .render(
            title=title,
            label=best.label,
            path=choice.path,
            use=audit.use(choice) if checkpoints else "Use",
            peers=audit.peers(choice),
            chips=chips,
            trust=audit.trust(choice, chips) if checkpoints else {},
            best=best,
            left_out=[*left_out, *without_figures(sweeps)],
            first=first,
            sections=page_sections,
            drawn=drawn,
            pairs=pack_pairs(checkpoints, best) if checkpoints else None,
            group="category" if "category" in best.rows else "",
            style=style,
            script=script,
            # Nothing is loaded, and nothing runs but the script by its digest. Attributes of style are allowed, as
            # matplotlib's drawings have them; nothing of the data is in one.
            policy=f"default-src 'none'; script-src 'sha256-{digest_of(script)}'; "
            f"style-src-elem 'sha256-{digest_of(style)}'; style-src-attr 'unsafe-inline'; img-src data:; "
            "base-uri 'none'; form-action 'none'",
            version=vlmrm.__version__,
            date=now(),
        )
    )
    write_file(folder / PAGE, html)
    return folder / PAGE


def _beside(name: str) -> str:
    """Return a file of this folder."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def templates(*, escape: bool = True) -> Environment:
    """Return the templates of the evaluation; in HTML, texts of the data are escaped."""
    loader = PackageLoader("vlmrm.evaluation", ".")
    return Environment(
        loader=loader, autoescape=escape, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def digest_of(text: str) -> str:
    """Return a text's SHA-256, as a content security policy has it."""
    return b64encode(sha256(text.encode()).digest()).decode()


def now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"


def summary(sources: Sequence[pd.DataFrame | str | Path]) -> str:
    """Return what the report of these sources begins with, as lines of text."""
    return audit.summary(choose(split(read_frames(sources))[0], read_sweeps(sources)))


def write_card(model_dir: str | Path, results: pd.DataFrame | str | Path, *, data: str) -> Path:
    """Write README.md into a complete checkpoint, in place of an earlier card, and return its path.

    Args:
        results: scored pairs of this checkpoint, possibly among others, or the results of a sweep with them.
        data: the name of the evaluation data in the card; a hub id if they have one.
    """
    from vlmrm.modeling.manifest import read_reward_file, verify_complete, write_complete  # a report needs no torch

    folder = Path(model_dir)
    manifest = verify_complete(folder)
    require_own_file(folder / CARD, *CARDS)
    info = read_reward_file(folder) or {}
    checkpoints, sweeps = split(read_frames([results]))[0], read_sweeps([results])
    choice = choose(checkpoints, sweeps)
    measured, shares = _find(folder, checkpoints or [choice.best]), {}
    if choice.best is not measured:
        choice = Choice(measured, "", "", measured.accuracy, None, None, outputs=choice.outputs)
    rows = (row for sweep in sweeps for row in sweep["results"] if "provenance" in row)
    row: Any = next((it for it in rows if (it["model"], it["checkpoint"]) == (measured.model, measured.name)), {})
    if checkpoints:
        altered = {it.view: measured.altered(name) for name, it in INTERVENTIONS.items()}
        shares = {"all pairs": measured.accuracy, **{name: share for name, share in altered.items() if share.n}}
    base = info.get("provenance", {}).get("base_model")
    environment = templates(escape=False)  # in Markdown, texts of the data are cells of tables, which `cell` escapes
    environment.filters["cell"] = lambda text: " ".join(str(text).replace("|", "\\|").split())
    text = environment.get_template("card.md.jinja").render(
        metadata=_metadata(folder, base, choice, data),
        name=_name(folder),
        base=Path(base).name if base is not None and Path(base).exists() else base,  # a hub id, or a folder's name
        data=data,
        chips=(chips := audit.chips(choice) if checkpoints else []),
        trust=audit.trust(choice, chips) if checkpoints else {},
        tables=of_outputs(choice.outputs, [row]).tables if "outputs" in row else [],
        rows=[(name, percent(it.value), interval(it), f"{it.n:,}") for name, it in shares.items()],
        length=percent(measured.figures["length_baseline_accuracy"]["value"]) if checkpoints else "–",
        correlation=number(measured.figures["margin_length_correlation"]["value"], 2) if checkpoints else "–",
        scored=row.get("provenance"),  # scored pairs alone have none
        info=info,
        provenance=info.get("provenance", {}),
    )
    write_file(folder / CARD, text)
    write_complete(folder, manifest["world_size"], manifest["step"])  # which listed an earlier card
    return folder / CARD


def _find(folder: Path, measured: Sequence[Checkpoint]) -> Checkpoint:
    """Return the checkpoint with the names of the folder and its parent: paths may have changed since the sweep."""
    path = folder.resolve()
    names = (path.parent.name, path.name)
    matching = [it for it in measured if (Path(it.model).resolve().name, it.name) == names]
    if len(matching) != 1:
        raise ConfigError(
            f"the results hold {len(matching)} checkpoints named {path.parent.name}/{path.name}: evaluate {folder} by "
            "itself, and give those results."
        )
    return matching[0]


def _metadata(folder: Path, base: str | None, choice: Choice, data: str) -> str:
    """Return the metadata that the hub reads from a card, with the results, as YAML."""
    from huggingface_hub import EvalResult, ModelCardData

    result = EvalResult(
        task_type="preference-evaluation",
        task_name="Preference evaluation",
        dataset_type=data,
        dataset_name=data,
        metric_type=choice.metric,
        metric_name="Preference accuracy" if choice.metric == "accuracy" else choice.metric,
        metric_value=round(choice.accuracy.value, 6),
    )
    base_entry: dict[str, Any] = {} if base is None or Path(base).exists() else {"base_model": base}
    return ModelCardData(
        model_name=_name(folder),
        library_name="transformers",
        tags=["reward-model", "vision-language", "vlmrm"],
        eval_results=[result],
        **base_entry,
    ).to_yaml()


def _name(folder: Path) -> str:
    """Return the names of the training and the checkpoint, as `best` alone is ambiguous."""
    path = folder.resolve()
    return f"{path.parent.name}-{path.name}"
