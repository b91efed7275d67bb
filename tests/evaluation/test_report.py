"""The report: one page that opens offline, says what the pairs say, and is refused where they say nothing."""

from __future__ import annotations

import json
import math
import re
import shlex
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest

from tests.evaluation.scored import scored
from vlmrm import cli
from vlmrm.errors import ConfigError, DataError
from vlmrm.evaluation.choosing import Criterion
from vlmrm.evaluation.report import build_report
from vlmrm.evaluation.report.checkpoints import choose, read_frames, read_sweeps, split
from vlmrm.evaluation.report.sections import of_audit, of_checkpoints
from vlmrm.evaluation.schema import SCHEMA_VERSION, dump_results
from vlmrm.measures.analysis import figures
from vlmrm.measures.differences import compare
from vlmrm.measures.intervals import Estimate

VOID = {"meta", "link", "img", "br", "wbr", "input"}


class Page(HTMLParser):
    """Checks that elements nest, and keeps what the tests ask for."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.headings: list[str] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if "id" in attributes:
            self.ids.append(attributes["id"])
        self.links += [attributes[name] for name in ("href", "src", "xlink:href") if name in attributes]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)
        if not {"style", "svg", "script"} & set(self.open):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def page_of(path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """The report of two trainings with three checkpoints each, and its folder."""
    folder = tmp_path_factory.mktemp("report")
    frames = [
        scored(360, skill=skill, looks=looks, folder=folder / "images", model=model, step=step)
        for model, looks in (("outputs/mine", 1.0), ("outputs/other", 0.1))
        for step, skill in ((100, 0.3), (200, 2.0), (300, 1.0))
    ]
    return frames, build_report(frames, folder / "out", title="Dots & <more>")


def test_a_page_of_somebody_else_is_kept(tmp_path):
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(ConfigError, match=r"report\.html was not written by this command"):
        build_report([scored(30)], tmp_path)
    (tmp_path / "report.html").unlink()
    assert build_report([scored(30)], tmp_path) == build_report([scored(30)], tmp_path)


def test_the_page_is_one_file_without_outside_links(sweep):
    page = page_of(sweep[1])
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)


def test_every_figure_is_inlined_and_saved_as_files(sweep):
    html = sweep[1].read_text()
    plots = sorted(path.stem for path in (sweep[1].parent / "plots").glob("*.svg"))
    assert plots == sorted(path.stem for path in (sweep[1].parent / "plots").glob("*.png"))
    assert html.count("<svg") == len(plots) == html.count('role="img"')
    assert all(label for label in re.findall(r'role="img" aria-label="([^"]*)"', html))
    for path in (sweep[1].parent / "plots").glob("*.svg"):
        ElementTree.parse(path)


def test_the_first_screen_says_which_checkpoint_to_use(sweep):
    frames, path = sweep
    checkpoints, _ = split(frames)
    best = max(checkpoints, key=lambda it: it.accuracy.value)
    tests = compare({it.label: it.rows for it in (best, *(it for it in checkpoints if it is not best))})[:5]
    found = Criterion().without_luck(frames)
    text = page_of(path).text
    assert f"Use {best.label} outputs/ {best.label.replace('/', '/ ')} " in text
    equal = ", ".join(test.second for test in tests if test.difference.low < 0 < test.difference.high)
    assert equal and f"Of 6, best by preference accuracy. As good, as far as 347 pairs can tell: {equal}. " in text
    assert found is not None and f"Accurate? yes {found.value:.1%} {found.low:.1%} to {found.high:.1%}, 347" in text
    assert f"{best.accuracy.value:.1%} on these pairs, less" in text
    for test in tests:
        low, high = (f"{100 * end:.1f}".replace("-", "−") for end in (test.difference.low, test.difference.high))
        assert f"{low} to {high} {'< 0.001' if test.p_value < 0.001 else f'{test.p_value:.3f}'} 347" in text


def test_differences_on_the_page_add_up(sweep):
    checkpoints, _ = split(sweep[0])
    choice = choose(checkpoints, [])
    _, accuracies, _, behind, *_ = zip(*of_checkpoints(checkpoints, choice).tables[0].rows, strict=True)
    best, *others = (float(cell.rstrip("%")) for cell in accuracies)
    assert others == sorted(others, reverse=True)
    assert [f"{best - other:.1f}" for other in others] == list(behind[1:])
    for _, _, plain, changed, lost, *_ in of_audit(choice.best, {}).tables[0].rows:
        assert float(plain[:-1]) - float(changed[:-1]) == pytest.approx(float(lost.replace("−", "-")))


@pytest.mark.parametrize(("looks", "answer"), [(1.0, "yes"), (0.0, "no")])
def test_the_first_screen_says_what_not_to_trust(tmp_path, looks, answer):
    frame = scored(900, skill=3.0, looks=looks)
    weak = (frame["category"] == "ocr").to_numpy()
    frame.loc[weak, "chosen_score"] = frame["rejected_score"][weak] + np.where(np.arange(weak.sum()) % 2, 1.0, -1.0)
    if looks == 0.0:
        frame["swapped_image_chosen"] = frame["chosen_score"] - frame["rejected_score"]
    text = page_of(build_report([frame], tmp_path)).text
    assert f"Looks at the image? {answer}" in text
    assert re.search(f"{'Trust it for' if looks else 'Not for'} [^%]*what the image decides", text)
    assert re.search(r"Not for [^%]*the category ocr \(", text)


def results_beside(
    folder: Path,
    name: str,
    frames: list[pd.DataFrame],
    best: int | None,
    benchmark: dict[str, Any] | None = None,
    **fields: Any,
) -> Path:
    """What a sweep leaves: the pairs of `frames`, and results that choose one of them; returns the table's path."""
    names = [(frame["model"][0], frame["checkpoint"][0]) for frame in frames]
    rows = [{"model": it, "checkpoint": name, "path": f"{it}/{name}", "error": None} for it, name in names]
    more = {"seconds": 1.0} | ({"benchmark": benchmark} if benchmark else {})
    rows = [row | more for row in rows]
    chosen = None
    if best is not None:
        chosen = {name: rows[best][name] for name in ("model", "checkpoint", "path")}
        chosen |= {"metric": "loss", "value": 0.5} | fields.pop("how", {})
    content = {"schema_version": SCHEMA_VERSION, "settings": {}, "leakage": None, "best": chosen, "results": rows}
    (folder / f"{name}.json").write_text(dump_results(cast("Any", content | fields)))
    pd.concat(frames).to_parquet(folder / f"{name}.scores.parquet")
    return folder / f"{name}.csv"


def test_the_page_names_untried_interventions_and_failed_checkpoints(tmp_path):
    table = results_beside(tmp_path, "mine", [scored(30)], best=0)
    results = json.loads(table.with_suffix(".json").read_text())
    [row] = results["results"]
    results["results"] = [
        row | {"limits": dict.fromkeys(("blank_image", "swapped_image"), "it is shown no images")},
        row | {"checkpoint": "broken", "path": "mine/broken", "error": "it is <gone>"},
    ]
    table.with_suffix(".json").write_text(json.dumps(results))
    text = page_of(build_report([table], tmp_path)).text
    assert "Not tried: images painted grey, another row's image (it is shown no images)." in text
    assert "mine/broken has no figures: it is <gone>" in text


def chosen(*sources: Path) -> tuple[str, str]:
    """The label of the report's best checkpoint, and why it is."""
    choice = choose(split(read_frames(sources))[0], read_sweeps(sources))
    return choice.best.label, choice.reason


def test_the_best_checkpoint_is_the_sweep_s(tmp_path):
    frames = [scored(90, skill=skill, step=step) for step, skill in ((100, 0.5), (200, 4.0))]
    assert chosen(results_beside(tmp_path, "mine", frames, best=0)) == ("checkpoint-100", "best by loss")
    mine = results_beside(tmp_path, "mine", frames, best=None)
    assert chosen(mine) == ("checkpoint-200", "best by preference accuracy")


def test_leaked_rows_are_counted_and_measured_apart(tmp_path):
    frame = scored(90)
    leaked = np.arange(90) < 30
    frame["by/leaked"] = np.where(leaked, "yes", "no")
    right = (frame["chosen_score"] > frame["rejected_score"])[~frame["tie"]]
    some = {"rows": 30, "total": 90, "share": 1 / 3, "pairs": [["train-7", "row-3"]]}
    kinds = dict.fromkeys(("prompt", "answer", "image"), some)
    found = {"rows": 90, "leaked_rows": 30, "exact": kinds, "near": kinds, "unreadable_rows": 2, "unreadable": []}
    page = build_report([results_beside(tmp_path, "mine", [frame], best=0, leakage=found)], tmp_path)
    assert "30 of 90 rows have a prompt or an image that was trained on, such as row-3" in page_of(page).text
    [alt] = re.findall(r'aria-label="(Accuracy on rows[^"]*)"', page.read_text())
    groups = right.groupby(leaked[~frame["tie"]]).mean()
    assert alt == f"Accuracy on rows trained on: {groups[True]:.1%}, new: {groups[False]:.1%}."


def test_public_benchmark_figures_stand_above_published_ones(tmp_path):
    measured = Estimate(0.5125, 0.4462, 0.5784, 0.033, 240, 60)
    ours = {"accuracy": measured._asdict(), "threshold": Estimate(0.1, *[math.nan] * 3, n=0, clusters=0)._asdict()}
    fields = {"settings": {"benchmark": "hpdv3"}}
    table = results_beside(tmp_path, "mine", [scored(30)], best=0, benchmark=ours, **fields)
    page = page_of(build_report([table], tmp_path))
    assert "Beside published models" in page.headings
    assert "checkpoint-100 51.2 (44.6-57.8) this evaluation HPSv3 76.9 HPSv3 paper" in page.text
    assert "threshold" not in page.text, "nobody published it"


def test_a_preference_for_large_images_is_shown(tmp_path):
    frame = scored(90)
    frame["pixels"] = 1000 * (1 + np.arange(90) % 5)
    frame["chosen_pixels"] = 10_000 * (1 + np.arange(90) % 7)
    found = figures(frame)["score_area_correlation"]
    value, low, high = (f"{found[part]:.2f}".replace("-", "−") for part in ("value", "low", "high"))
    assert f"{value} {low} to {high}" in page_of(build_report([frame], tmp_path)).text


def test_images_that_cannot_be_opened_are_counted(tmp_path):
    frame = scored(60, folder=tmp_path / "images")
    (tmp_path / "images/1.png").unlink()
    assert "1 images could not be opened." in page_of(build_report([frame], tmp_path / "out")).text


def test_texts_are_shown_and_never_run(tmp_path):
    evil = '<script>alert("x")</script>'
    frame = scored(60).assign(prompt_text=evil, chosen_text=evil, category=evil, model=evil)
    frame["by/$x^{$"] = "$\\frac{"  # no formula either
    html = build_report([frame], tmp_path, title=evil).read_text()
    assert html.count("<script") == 2 and "&lt;script&gt;" in html  # the pairs' block and the page's own


def test_a_checkpoint_without_numbers_is_left_out(tmp_path):
    broken = scored(60, step=200).assign(chosen_score=np.nan)
    text = page_of(build_report([scored(60), broken], tmp_path)).text
    assert "checkpoint-200 is left out: 60 of its pairs have no finite score." in text
    with pytest.raises(DataError, match="nothing to report: checkpoint-200 is left out"):
        build_report([broken], tmp_path)


def test_results_are_found_by_any_of_their_files(tmp_path):
    scored(60).to_parquet(tmp_path / "mine.scores.parquet")
    for end in (".csv", ".json", ".scores.parquet"):
        [frame] = read_frames([tmp_path / f"mine{end}"])
        assert len(frame) == 60
    (tmp_path / "torn.scores.parquet").write_bytes(b"PAR1 torn")
    for name, error in (("absent", ConfigError), ("torn", DataError)):
        with pytest.raises(error, match=rf"{name}\.scores\.parquet"):
            build_report([tmp_path / f"{name}.csv"], tmp_path)


@pytest.mark.parametrize(
    ("frames", "error", "said"),
    [
        ([], ConfigError, "output_file"),
        ([scored(60), scored(60)], ConfigError, "outputs/mine/checkpoint-100 is in two"),
        ([scored(60).drop(columns="cluster")], DataError, "no column cluster"),
        ([pd.DataFrame(columns=scored(9).columns)], DataError, "no scored pair"),
    ],
)
def test_ambiguous_or_incomplete_frames_are_refused(tmp_path, frames, error, said):
    with pytest.raises(error, match=said):
        build_report(frames, tmp_path)


def test_the_guide_s_commands_and_program_run(tmp_path, monkeypatch, capsys):
    guide = (Path(__file__).resolve().parents[2] / "docs/report.md").read_text()
    monkeypatch.chdir(tmp_path)
    Path("results").mkdir()
    scored(90).to_parquet("results/mine.scores.parquet")
    scored(90, model="outputs/irrelevant").to_parquet("results/irrelevant.scores.parquet")
    commands = re.findall(r"^vlmrm (report .*)$", guide, re.MULTILINE)
    for command in commands:
        cli.app(shlex.split(command), exit_on_error=False, result_action="return_value")
    assert capsys.readouterr().out.splitlines() == [
        "the report is results/report/report.html",
        "the report is results/both/report.html",
    ]
    [program] = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    exec(program, {})
    assert "Charts only" in page_of(Path("results/charts/report.html")).text
