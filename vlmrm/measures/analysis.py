"""All metrics of one checkpoint's scored pairs: overall, by category, and by any column of the data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from vlmrm.errors import ConfigError
from vlmrm.measures.audit import audit
from vlmrm.measures.intervals import Figure
from vlmrm.measures.metrics import METRICS
from vlmrm.measures.pairs import PairArrays, check_pairs

GROUP = "by/"


def analyse(frame: pd.DataFrame) -> dict[str, Any]:
    """Return `figures` of the scored pairs of one checkpoint: `overall`, by `category`, and for every column by/NAME.

    Rows without a value are in `overall` only. `audit` are the findings of `vlmrm.measures.audit`.
    """
    check_pairs(frame)
    columns = [name for name in map(str, frame) if name.startswith(GROUP)]
    return {
        "overall": figures(frame),
        "category": _by_value(frame, "category") if "category" in frame else {},
        "by": {name.removeprefix(GROUP): _by_value(frame, name) for name in columns},
        "audit": [_plain(finding) for finding in audit(frame)],
    }


def figures(frame: pd.DataFrame) -> dict[str, Any]:
    """Return every metric of the pairs of `frame` by name, as JSON has it; NaN where the rows do not allow it.

    An estimate is {value, low, high, standard_error, n, prompts}.
    """
    pairs = PairArrays(frame)
    computed = ((metric.name, metric.compute(pairs)) for metric in METRICS.values())
    return {n: _plain(v.estimate(pairs.clusters) if isinstance(v, Figure) else v) for n, v in computed}


def point_figures(frame: pd.DataFrame, names: Iterable[str]) -> dict[str, float]:
    """Return some metrics of the pairs of `frame` without their intervals, by name."""
    pairs = PairArrays(frame)
    return {name: METRICS[name].point(pairs) for name in names}


def trl_summary(frame: pd.DataFrame) -> dict[str, float]:
    """Return the figures of all `scored_pairs` that the trainer logs, under TRL's names, which dashboards know."""
    pairs = PairArrays(frame)
    rewards = pairs.sides("score").ravel()
    return {
        **{metric.logged: metric.point(pairs) for metric in METRICS.values() if metric.logged},
        "mean_reward": float(rewards.mean()) if len(rewards) else float("nan"),
        "min_reward": float(rewards.min(initial=np.inf)),
        "max_reward": float(rewards.max(initial=-np.inf)),
    }


def metric(figures: Mapping[str, Any], name: str) -> float:
    """Return one number of `figures` by its name, to choose a checkpoint by, or to require."""
    value = figures.get(name)
    if isinstance(value, Mapping):
        value = value.get("value")
    if not isinstance(value, (int, float)):
        names = ", ".join(n for n, v in figures.items() if isinstance(v, (int, float)) or "value" in v)
        raise ConfigError(f"there is no metric {name}: choose one of {names or 'another kind, the data give none'}")
    if math.isnan(value):
        needs = METRICS[name].needs if name in METRICS else None
        reason = f"the pairs have nothing in column {needs}" if needs else "no pair allows it"
        raise ConfigError(f"the metric {name} cannot be computed, because {reason}: choose another or add it")
    return float(value)


def _plain(value: Any) -> Any:
    """Return a figure with dictionaries for named tuples."""
    if isinstance(value, list):
        return list(map(_plain, value))
    return {name: _plain(part) for name, part in value._asdict().items()} if isinstance(value, tuple) else value


def _by_value(frame: pd.DataFrame, column: str) -> dict[str, dict[str, Any]]:
    return {str(value): figures(rows) for value, rows in frame.groupby(column, observed=True)}
