"""The pairs of a report in the browser: what is listed is what numpy finds, and the data stay text."""

from __future__ import annotations

import json
import operator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from benchmarks.browser import CHROMIUM, Browser
from tests.evaluation.scored import scored
from vlmrm.evaluation.report import build_report
from vlmrm.evaluation.report.checkpoints import percent
from vlmrm.measures.analysis import figures
from vlmrm.measures.intervals import Estimate
from vlmrm.measures.interventions import INTERVENTIONS

COUNT = 360
EVIL = (
    "</script><script>window.ran = 1</script><img src=x onerror='window.ran = 2'>\u2028\"'`${window.ran = 3}\x00&amp;"
)
PICTURE = "images/odd\"><script>'#?%.png"
LONG = "general captioning of photographs of "
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.fixture(scope="module")
def frames(tmp_path_factory) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Two models' scores of the same pairs; row-100 is hostile, row-101 long, row-103 has equal scores."""
    folder = tmp_path_factory.mktemp("pairs")
    first = scored(COUNT, skill=1.0, looks=0.4, folder=folder / "images")
    second = scored(COUNT, skill=0.6, folder=folder / "images", model="outputs/other", step=200)
    lists = first["comparison_id"].str.startswith("list")
    for frame in (first, second):
        frame.loc[100, ["prompt_text", "chosen_text", "by/language"]] = [EVIL, EVIL * 20, EVIL]
        frame.at[100, "image_paths"] = [PICTURE]
        frame.loc[101, "rejected_text"] = "wide " * 400
        frame["category"] = [LONG + ("people" if i % 2 else "animals") for i in range(COUNT)]
        assert not lists[100:104].any()
    first.loc[103, ["chosen_score", "rejected_score", "tie"]] = [0.5, 0.5, False]
    return first, second.drop(index=[110, 111])  # of which the second model has no score


@pytest.fixture(scope="module")
def page(frames, tmp_path_factory) -> Path:
    return build_report(frames, tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(chromium, page):
    chromium.complaints.clear()
    chromium.resize(1280, 900)
    chromium.prefer(prefers_color_scheme="light")
    chromium.open(page, "!document.getElementById('explorer').hidden")
    yield chromium
    assert chromium.complaints == []


def choose(browser: Browser, **fields: Any) -> None:
    """Set controls by name, as a reader's input does."""
    for name, value in fields.items():
        browser.evaluate(
            f"((field) => {{ field.value = {json.dumps(str(value))}; field.dispatchEvent(new Event('input', "
            f"{{bubbles: true}})); }})(document.getElementById('pairs-form').elements[{json.dumps(name)}])"
        )


def texts_of(browser: Browser, selector: str) -> list[str]:
    return browser.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)")


def table_of(browser: Browser, selector: str) -> list[list[str]]:
    lines = f"[...document.querySelectorAll('{selector} tbody tr')]"
    return browser.evaluate(f"{lines}.map((line) => [...line.cells].map((cell) => cell.innerText))")


def text(browser: Browser, selector: str) -> str:
    return browser.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")


def listed(browser: Browser) -> tuple[int, list[str]]:
    """The number of pairs that are said to be listed, and the names of those in view."""
    count = text(browser, "#pairs-count").split(" of ")[0]
    return int(count.replace(",", "")), texts_of(browser, "#pairs-rows .name b")


def names_of(frame: pd.DataFrame) -> list[str]:
    return [
        name if not name.startswith("list") else f"{name} #{pair + 1}"
        for name, pair in zip(frame["comparison_id"], frame["pair"], strict=True)
    ]


def assert_lists(browser: Browser, frame: pd.DataFrame, passes: pd.Series | np.ndarray, keys: np.ndarray) -> None:
    """The rows that pass are listed, by ascending keys and then as in the data."""
    rows = [row for row in np.argsort(keys, kind="stable") if np.asarray(passes)[row]]
    count, names = listed(browser)
    assert count == len(rows) > 0
    assert names == [names_of(frame)[row] for row in rows][: len(names)]
    assert len(names) >= min(len(rows), 8)


@needs_chromium
def test_each_filter_lists_what_numpy_finds(browser, frames):
    first, _ = frames
    tie = first["tie"].to_numpy(bool)
    margins = (first["chosen_score"] - first["rejected_score"]).to_numpy()
    keys = np.where(tie, np.inf, margins.astype(np.float32))
    assert_lists(browser, first, np.full(COUNT, True), keys)
    verdicts = (~tie & (margins > 0), ~tie & (margins < 0), ~tie & (margins == 0), tie)
    for number, passes in enumerate(verdicts):
        choose(browser, verdict=number)
        assert_lists(browser, first, passes, keys)
    choose(browser, verdict=1, low="-1.5", high="-0.25")
    assert_lists(browser, first, verdicts[1] & (margins >= -1.5) & (margins <= -0.25), keys)
    choose(browser, **{"group-0": 1, "group-1": 3})  # values in order: animals; the hostile one, de, en
    language = (first["by/language"] == "en").to_numpy()
    animals = first["category"].str.endswith("animals").to_numpy()
    inside = verdicts[1] & (margins >= -1.5) & (margins <= -0.25)
    assert_lists(browser, first, inside & language & animals, keys)
    browser.click("button[type=reset]")
    browser.evaluate("new Promise((done) => setTimeout(done, 20))")
    greyed = (first["blank_image_chosen"] - first["blank_image_rejected"]).to_numpy()
    choose(browser, flip="blank_image")
    assert_lists(browser, first, ~tie & ((greyed > 0) != (margins > 0)), keys)
    choose(browser, flip="any", order="-margin")
    flips = np.full(COUNT, False)
    for name in INTERVENTIONS:
        if f"{name}_chosen" in first:
            flips |= (first[f"{name}_chosen"] - first[f"{name}_rejected"] > 0).to_numpy() != (margins > 0)
    assert_lists(browser, first, ~tie & flips, np.where(tie, np.inf, -margins))
    choose(browser, flip="", order="near")
    assert_lists(browser, first, np.full(COUNT, True), np.where(tie, np.inf, np.abs(margins.astype(np.float32))))
    browser.click('[data-order="data"]')
    assert_lists(browser, first, np.full(COUNT, True), np.arange(COUNT))


@needs_chromium
def test_words_are_found_anywhere_in_any_case(browser, frames):
    first, _ = frames
    texts = first[["prompt_text", "chosen_text", "rejected_text"]].agg(" | ".join, axis=1) + pd.Series(names_of(first))
    choose(browser, order="data")
    for words in ("PICTURE 7", "row-2", "i count 3", "WINDOW.RAN = 2", "wide wide", "list-8 #2"):
        choose(browser, words="")
        browser.evaluate("document.querySelector('[name=words]').focus()")
        browser.call("Input.insertText", text=words)
        passes = texts.str.lower().str.contains(words.lower(), regex=False)
        assert_lists(browser, first, passes, np.arange(COUNT))
    choose(browser, words="in no text")
    assert text(browser, "#pairs-count") == f"0 of {COUNT} pairs: change the filters to see some."
    assert browser.evaluate("document.getElementById('pair').hidden")


@needs_chromium
def test_a_click_shows_the_pair_with_every_score(browser, frames):
    first, _ = frames
    browser.click("#copy")
    assert (text(browser, "#copy"), browser.evaluate("`${getSelection()}`")) == ("Copied", text(browser, "#path"))
    choose(browser, order="data", words="row-")
    browser.click("#pair-4")
    row = first[first["comparison_id"].str.startswith("row")].iloc[4]
    assert text(browser, "#pair-title") == row["comparison_id"]
    for name in ("prompt_text", "chosen_text", "rejected_text"):
        assert row[name].strip() in text(browser, "#pair-texts")
    assert browser.evaluate("document.querySelector('#pair-texts .prompt img').decode().then(() => true)")
    assert browser.evaluate("document.querySelector('#pairs-rows img').decode().then(() => true)")
    lines = table_of(browser, "#pair-scores")
    views = {"as it is": ("chosen_score", "rejected_score")}
    views |= {
        intervention.view: (f"{name}_chosen", f"{name}_rejected")
        for name, intervention in INTERVENTIONS.items()
        if f"{name}_chosen" in first
    }
    assert [line[0] for line in lines] == list(views)
    plain = row["chosen_score"] > row["rejected_score"]
    for line, columns in zip(lines, views.values(), strict=True):
        chosen, rejected = (float(row[column]) for column in columns)
        written = [float(cell.split("\n")[0].replace("−", "-")) for cell in line[1:]]
        assert written == pytest.approx([chosen, rejected, chosen - rejected], abs=0.0051)
        assert ("flipped" in line[3]) == ((chosen > rejected) != plain)


@needs_chromium
def test_the_keyboard_reaches_every_pair(browser, frames):
    browser.evaluate("document.querySelector('button[data-order=margin]').focus()")
    browser.press("Enter")
    assert browser.evaluate("document.querySelector('[name=order]').value") == "-margin"
    browser.evaluate("document.getElementById('pairs-grid').focus()")
    active = "document.getElementById(document.getElementById('pairs-grid').getAttribute('aria-activedescendant'))"
    for keys, position in (("ArrowDown " * 3, 3), ("ArrowUp", 2), ("End", COUNT - 1), ("Home PageDown", None)):
        browser.press(*keys.split())
        at = browser.evaluate(f"{active}.ariaRowIndex - 2")
        assert at == position if position is not None else at > 5
        assert browser.evaluate(f"{active}.getAttribute('aria-selected')") == "true"
        inside = "(([row, grid]) => row.top >= grid.top && row.bottom <= grid.bottom + 1)"
        boxes = f"[{active}, document.getElementById('pairs-grid')].map((element) => element.getBoundingClientRect())"
        assert browser.evaluate(f"{inside}({boxes})")
        assert browser.evaluate(f"{active}.querySelector('b').textContent") == text(browser, "#pair-title")
    browser.press("Enter")
    assert browser.evaluate("document.activeElement.id") == "pair-title"
    browser.press("Escape")
    assert browser.evaluate("document.activeElement.id") == "pairs-grid"


@needs_chromium
def test_two_models_stand_side_by_side(browser, frames):
    first, second = frames
    assert browser.evaluate("document.querySelector('[name=agree]').disabled")
    choose(browser, b=1)
    both = first.merge(second, on=["comparison_id", "pair"], suffixes=("", "_b"))
    a, b = ((both[f"chosen_score{end}"] > both[f"rejected_score{end}"]) for end in ("", "_b"))
    decided = ~both["tie"].to_numpy(bool)
    groups = {"all": np.full(len(both), True)}
    groups |= {f"category: {name}": (both["category"] == name).to_numpy() for name in sorted(set(both["category"]))}
    lines = table_of(browser, "#pairs-compared")
    for line, (name, inside) in zip(lines, groups.items(), strict=False):
        counts = [int((chosen & inside & decided).sum()) for chosen in (a & ~b, b & ~a, a & b, ~a & ~b)]
        assert line[0] == name and line[3:] == [str(count) for count in counts]
        for cell, frame in zip(line[1:3], frames, strict=True):
            rows = frame if name == "all" else frame[frame["category"] == name.removeprefix("category: ")]
            share = Estimate(**figures(rows)["preference_accuracy"])
            assert cell == f"{percent(share.value)} ({percent(share.low)} to {percent(share.high)})"
    by_name = dict(zip(names_of(both), zip(a, b, decided, strict=True), strict=True))
    agreed = {"differ": operator.ne, "onlyA": operator.gt, "neither": lambda a, b: not (a or b)}
    for value, holds in agreed.items():
        choose(browser, agree=value)
        count, names = listed(browser)
        assert count == sum(bool(d) and bool(holds(a, b)) for a, b, d in by_name.values()) > 0
        assert all(holds(*by_name[name][:2]) for name in names)
    choose(browser, agree="", words="row-110", verdict="")
    assert "not scored" in text(browser, "#pairs-rows")  # by B, which has no such pair


@needs_chromium
def test_data_are_shown_as_text_and_never_run(browser):
    choose(browser, words="window.ran")
    assert listed(browser) == (1, ["row-100"])
    shown = texts_of(browser, "#pair-texts .text")
    assert shown[:2] == [EVIL, EVIL * 20]
    assert texts_of(browser, "#pair-facts")[0].endswith(EVIL)
    assert texts_of(browser, "[name=group-1] option")[1] == EVIL
    [link] = browser.evaluate("[...document.querySelectorAll('#pair-texts a')].map((link) => link.href)")
    assert link.startswith("file:///") and link.endswith("odd%22%3E%3Cscript%3E'%23%3F%25.png")
    assert browser.evaluate("document.querySelectorAll('script').length") == 2
    browser.evaluate(
        "((script) => { script.textContent = 'window.ran = 4'; document.body.append(script);"
        "document.body.setAttribute('onclick', '1'); })(document.createElement('script'))"
    )
    assert browser.evaluate("window.ran === undefined")
    complaints = [line for line in browser.complaints if "Content Security Policy" in line]
    assert complaints and complaints == browser.complaints  # it refuses what was planted here, and nothing else
    browser.complaints.clear()


@needs_chromium
def test_small_screens_overflow_nothing_and_show_pairs_below(browser):
    for width in (320, 400, 800, 1280):
        browser.resize(width, 800)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
    browser.resize(400, 800)
    hidden = "[...document.querySelectorAll('.wide:has([data-head])')].filter((it) => it.scrollWidth > it.clientWidth)"
    assert browser.evaluate(f"{hidden}.length") == 0
    assert browser.evaluate("document.querySelector('#pairs-rows .value').clientHeight") > 0
    browser.click("#pair-2")
    assert browser.evaluate("document.activeElement.id") == "pair-title"
    assert browser.evaluate("document.getElementById('pair-title').getBoundingClientRect().top") < 800


@needs_chromium
@pytest.mark.skipif(find_spec("axe_core_python") is None, reason="axe-core-python is not installed")
def test_axe_finds_no_violation(browser):
    spec = find_spec("axe_core_python")
    assert spec is not None and spec.origin is not None
    axe = Path(spec.origin).with_name("axe.min.js").read_text(encoding="utf-8")
    choose(browser, b=1)
    for width, scheme in ((1280, "light"), (400, "dark")):
        browser.resize(width, 900)
        browser.prefer(prefers_color_scheme=scheme)
        violations = browser.evaluate(
            f"{axe}; axe.run().then((result) => result.violations.map(({{ id, nodes }}) => [id, nodes[0].html]))"
        )
        assert violations == []
