"""The results file: what was written is what is read, and nothing else is taken for it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.evaluation.scored import results_of, scored
from vlmrm.errors import ConfigError
from vlmrm.evaluation.schema import SCHEMA_VERSION, dump_results, load_results


@pytest.fixture
def content() -> Any:
    """One checkpoint with figures, one without."""
    whole = results_of(scored(60))
    [measured] = whole["results"]
    failed = {**{name: measured[name] for name in ("model", "checkpoint", "path", "seconds")}, "error": "it is broken"}
    return {**whole, "results": [measured, failed]}


def test_written_results_are_read_with_unknowns_as_null(content, tmp_path):
    path = tmp_path / "results.json"
    path.write_text(dump_results(content))
    plain = json.loads(path.read_text(), parse_constant=pytest.fail)  # NaN is no JSON
    assert plain["results"][0]["statistics"]["overall"]["position_consistency"]["value"] is None
    found = load_results(path)
    overall = found["results"][0]["statistics"]["overall"]
    assert math.isnan(overall["position_consistency"]["value"])
    assert overall["preference_accuracy"] == content["results"][0]["statistics"]["overall"]["preference_accuracy"]
    assert overall["preference_accuracy"]["n"] == overall["sample_count"]
    assert json.loads(dump_results(found)) == plain


def test_another_version_is_refused_in_a_sentence(content, tmp_path):
    path = tmp_path / "results.json"
    path.write_text(dump_results({**content, "schema_version": SCHEMA_VERSION + 1}))
    with pytest.raises(ConfigError, match=rf"results\.json has schema version {SCHEMA_VERSION + 1}"):
        load_results(path)
    path.write_text('{"settings": {}, "results": []}')
    with pytest.raises(ConfigError, match="has schema version 0"):
        load_results(path)


def test_a_field_that_is_wrong_is_named(content, tmp_path):
    path = tmp_path / "results.json"
    content["results"][0]["statistics"]["overall"]["loss"]["n"] = "many"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"results\.0\..*statistics\.overall\.loss"):
        load_results(path)
    del content["results"][0]["statistics"]["overall"]["loss"]  # a metric that is newer than the file
    path.write_text(json.dumps(content))
    assert "loss" not in load_results(path)["results"][0]["statistics"]["overall"]
    path.write_text('{"schema_version": 1, "results": [')
    with pytest.raises(ConfigError, match=r"results\.json cannot be read"):
        load_results(path)
