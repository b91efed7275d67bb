"""How a notebook shows a comparison, a scorer and a sweep: short, and everything that data can hold is escaped."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from PIL import Image as Pillow

from vlmrm import load_scorer
from vlmrm.conversation import Comparison, Image, Judgement, Message, Video
from vlmrm.evaluation.sweep_result import SweepResult

SCRIPT = "<script>alert(1)</script>"
TAGS = {"table", "caption", "tr", "th", "td", "img"}


def parsed(html: str) -> tuple[set[str], list[str]]:
    """The tags of a page and its texts."""
    tags, texts = set(), []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.add(tag)
    parser.handle_data = lambda text: texts.append(text.strip())
    parser.feed(html)
    return tags, [text for text in texts if text]


def test_a_comparison_shows_prompt_pictures_and_answers_with_their_ratings(tmp_path):
    Pillow.new("RGB", (28, 28), "red").save(tmp_path / "red.png")
    comparison = Comparison(
        SCRIPT,
        (Message.of("user", Image(str(tmp_path / "red.png")), SCRIPT, Image("not there.png"), Video("cat.mp4")),),
        ((Message.of("assistant", SCRIPT),), (Message.of("assistant", Image('data:image/png;"><script>')),)),
        (Judgement((0, 1), (1, 0)),),
    )
    html = comparison._repr_html_()
    tags, texts = parsed(html)
    assert tags <= TAGS
    assert texts == [SCRIPT, "prompt", f"{SCRIPT} [image] [video]", "1", SCRIPT, "0"]
    assert html.count("<img") == 2 and "base64,iVBOR" in html


def test_a_comparison_without_judgements_shows_its_answers():
    html = Comparison("one", (), ((Message.of("assistant", "A cat."),),))._repr_html_()
    assert parsed(html)[1] == ["one", "prompt", "?", "A cat."]


def test_a_scorer_shows_what_it_is(tiny_reward_model):
    scorer = load_scorer(tiny_reward_model)
    scorer.loaded.info["head"] = SCRIPT
    tags, texts = parsed(scorer._repr_html_())
    assert tags <= TAGS
    shown = dict(zip(texts[::2], texts[1::2], strict=True))
    assert shown["model"] == "Qwen2_5_VLForSequenceClassification" and shown["scores"] == "not measured yet"
    assert SCRIPT in shown["parameters"] and shown["digest"] == scorer.digest[:16]
    scorer.loaded.info.update(reward_mean=0.5, reward_std=2.0)
    assert "+0.50 ± 2.00" in scorer._repr_html_()


def test_a_sweep_shows_its_checkpoints_and_the_best_in_bold():
    rows = [
        {"path": "a/1", "checkpoint": "checkpoint-1", "preference_accuracy": 0.75, "sample_count": 4, "error": None},
        {"path": "a/2", "checkpoint": SCRIPT, "preference_accuracy": None, "sample_count": None, "error": SCRIPT},
    ]
    html = SweepResult(rows, {"path": "a/1"}, Path("a.csv"), Path("a.parquet"), frozenset())._repr_html_()
    tags, texts = parsed(html)
    assert tags <= TAGS
    assert texts[-5:] == ["checkpoint-1", "0.750", "4", SCRIPT, SCRIPT]
    assert html.count("bold") == 1 and html.index("bold") < html.index("checkpoint-1")
