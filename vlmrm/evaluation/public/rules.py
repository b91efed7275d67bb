"""The rules of public benchmarks: their authors' scoring of scored pairs.

A rule takes scored pairs (columns: see `scored_frame`) and the benchmark's groups, and returns its figures by name. A
figure of a part is called PART or PART/..., where PART is a category, the first part of categories such as
`safety/bias`, or a group: `rows_of` finds its rows by that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
from scipy.stats import t

from vlmrm.measures.intervals import LEVEL, NAN, Estimate, Interval, Spread, share

Groups = Mapping[str, list[str] | dict[str, float]]
# Pick-a-Pic's authors let a model tie: where both probabilities are within a threshold. The threshold is the best of
# eleven on the validation rows, which are therefore scored too.
VALIDATION, TEST = "validation_unique", "test_unique"
THRESHOLDS = np.arange(11) / 10
SIGN = {"A": 1, "B": -1, "same": 0}
STYLES = (
    "hard",
    "normal",
    "easy",
)  # of RM-Bench: the chosen answer has less style than the rejected, as much, or more

PARTS, SEED = 50, 0  # of the jackknife
TEXTS = ("text", "image_paths")  # columns that no rule reads

# Parts of rules ------------------------------------------------------------------------------------------------------


def margins(frame: pd.DataFrame) -> pd.Series:
    """Return the score of the chosen minus that of the rejected, one a pair."""
    return frame["chosen_score"] - frame["rejected_score"]


def preferences(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the pairs that people did not tie."""
    return frame[~frame["tie"].astype(bool)]


def accuracy(frame: pd.DataFrame) -> float:
    """Return the share of the preferences with a margin above zero."""
    return float((margins(preferences(frame)) > 0).mean())


def accuracy_without_ties(label: np.ndarray, margin: np.ndarray) -> float:
    """Return the share of the pairs that people did not tie whose margin [N] has the label's sign (1, -1; 0 a tie)."""
    return float(np.mean(label[label != 0] * margin[label != 0] > 0)) if (label != 0).any() else float("nan")


def accuracy_with_ties(label: np.ndarray, margin: np.ndarray) -> float:
    """Return the highest three-way accuracy of any threshold, an absolute margin, up to which all are ties.

    Equal margins stay together (arXiv 2305.14324).
    """
    return float(np.max(by_threshold(label, margin)[1]))


def by_threshold(label: np.ndarray, margin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each absolute margin [T], ascending, and the three-way accuracy [T] if margins up to it are ties."""
    order = np.argsort(np.abs(margin), kind="stable")
    size, label, sign = np.abs(margin)[order], label[order], np.sign(margin)[order]
    ties_within = np.cumsum(label == 0)
    right = (label != 0) & (label == sign)
    right_beyond = right.sum() - np.cumsum(right)
    last_of_its_size = np.append(size[1:] > size[:-1], True)
    return size[last_of_its_size], (ties_within + right_beyond)[last_of_its_size] / len(label)


def accuracy_at(frame: pd.DataFrame, threshold: float) -> float:
    """Return the mean credit: 1 for people's verdict, 1/2 where only one of people and model ties."""
    difference = np.tanh(margins(frame) / 2)  # σ(margin) - σ(-margin)
    tie, model_ties = frame["tie"].astype(bool), np.abs(difference) <= threshold
    right = np.where(tie, model_ties, ~model_ties & (difference > 0))
    return float(np.mean(np.where(right, 1.0, np.where(tie | model_ties, 0.5, 0.0))))


def by_category(frame: pd.DataFrame) -> dict[str, float]:
    """Return the `accuracy` of each category, in order of name."""
    return {str(name): accuracy(rows) for name, rows in frame.groupby("category")}


# Rules ---------------------------------------------------------------------------------------------------------------


def pairs(frame: pd.DataFrame, groups: Groups) -> dict[str, float]:
    return {"accuracy": accuracy(frame)}


def overall(frame: pd.DataFrame, groups: Groups) -> dict[str, float]:
    """Return the accuracy of all rows, of each category, and of all rows of categories such as `safety/...`."""
    first = frame["category"].map(str).str.partition("/")
    parts = {str(name): accuracy(frame[first[0] == name]) for name in sorted(first[0][first[1] == "/"].unique())}
    return {"overall": accuracy(frame), **parts, **by_category(frame)}


def categories(frame: pd.DataFrame, groups: Groups) -> dict[str, float]:
    return by_category(frame)


def macro(frame: pd.DataFrame, groups: Groups) -> dict[str, float]:
    """Return the accuracy of all rows and of each category, and the mean of the categories in `groups`."""
    shares = by_category(frame)
    mean = {"macro": sum(shares.values()) / len(groups)} if set(shares) == set(groups) else {}
    return {"overall": accuracy(frame), **mean, **shares}


def sections(frame: pd.DataFrame, groups: Groups) -> dict[str, float]:
    """Return each section, a weighted mean of its categories, and the mean of the sections."""
    subsets = by_category(frame)
    shares = section_shares(subsets, groups)
    mean = {"overall": sum(shares.values()) / len(groups)} if len(shares) == len(groups) else {}
    return {**mean, **shares, **subsets}


def section_shares(subsets: Mapping[str, float], groups: Groups) -> dict[str, float]:
    shares = {}
    for section, weights in groups.items():
        weights = weights if isinstance(weights, dict) else dict.fromkeys(weights, 1.0)
        scored = {name: weight for name, weight in weights.items() if name in subsets}
        if scored:
            shares[section] = sum(subsets[name] * weight for name, weight in scored.items()) / sum(scored.values())
    return shares


def questions(frame: pd.DataFrame, groups: Groups) -> dict[str, float]:
    """Return the shares of pairs, and of questions with every pair right: of all and of each category."""
    parts = {"": frame} | {f"{name}/": rows for name, rows in frame.groupby("category")}
    figures = {}
    for name, rows in parts.items():
        right = margins(preferences(rows)) > 0
        figures[f"{name}acc"] = accuracy(rows)
        figures[f"{name}acc_plus"] = float(right.groupby(preferences(rows)["by/question_id"]).all().mean())
    return figures


def inversions(frame: pd.DataFrame, groups: Groups) -> dict[str, float]:
    """Return 1 minus the share of a prompt's pairs that are the wrong way round, averaged over prompts."""
    right = frame["tie"].astype(bool) | (margins(frame) > 0)
    return {"accuracy": right.groupby(frame["comparison_id"]).mean().mean()}


def pairs_and_prompts(frame: pd.DataFrame, groups: Groups) -> dict[str, float]:
    """Return the accuracy over the pairs of all prompts, and the mean over prompts."""
    decided = preferences(frame)
    by_prompt = (margins(decided) > 0).groupby(decided["comparison_id"]).mean().mean()
    return {"accuracy": accuracy(decided), "accuracy_by_prompt": by_prompt}


def thresholds(frame: pd.DataFrame, groups: Groups) -> dict[str, float]:
    """Score the test rows, with ties up to the threshold that is best on the validation rows."""
    validation, test = (frame[frame["by/split"] == split] for split in (VALIDATION, TEST))
    if test.empty:
        return {}
    figures = {"accuracy_threshold_0": accuracy_at(test, 0.0), "accuracy_without_ties": accuracy(test)}
    if validation.empty:
        return figures
    best = max(THRESHOLDS, key=lambda threshold: accuracy_at(validation, threshold))
    return {"accuracy": accuracy_at(test, best), "threshold": best, **figures}


def votes(frame: pd.DataFrame, groups: Groups) -> dict[str, float]:
    """Score all votes, where a tied one is right only for equal scores; and with and without ties."""
    margin, tied = margins(frame), frame["tie"].astype(bool)
    return {
        "accuracy": (margin > 0).where(~tied, margin == 0).mean(),
        "accuracy_with_ties": accuracy_with_ties((~tied).to_numpy(int), margin.to_numpy()),
        "accuracy_without_ties": accuracy(frame),
    }


def dimensions(frame: pd.DataFrame, groups: Groups) -> dict[str, float]:
    """Compare one score with the labels of every dimension, without and with ties."""
    # The chosen of a pair is A or B: margins and labels are turned to A's side.
    side = np.where(frame["chosen_branch"] == 0, 1, -1)
    margin = margins(frame).to_numpy() * side
    labels = {"overall": np.where(frame["tie"].astype(bool), 0, side)}
    labels |= {name.lower(): frame[f"by/{name}"].map(SIGN).to_numpy() for name in ("VQ", "MQ", "TA")}
    return {
        **{name: accuracy_without_ties(label, margin) for name, label in labels.items()},
        **{f"{name}_with_ties": accuracy_with_ties(label, margin) for name, label in labels.items()},
    }


def best_of_n(frame: pd.DataFrame, groups: Groups) -> dict[str, float]:
    """Return for each subset the share of prompts whose chosen answer is the best, `ties` by a rule of its own.

    A prompt whose chosen answer shares the highest score with k - 1 others counts 1/k.
    """
    figures: dict[str, float] = {}
    for name, rows in preferences(frame).groupby("category"):
        least = margins(rows).groupby(rows["comparison_id"]).min()
        equal = (margins(rows) == 0).groupby(rows["comparison_id"]).sum()
        credit = np.where(least < 0, 0.0, 1 / (1 + equal))
        figures[str(name)] = several_right(rows) if name == "ties" else float(credit.mean())
    complete = {"overall": float(np.mean([figures[name] for name in groups]))} if set(groups) <= set(figures) else {}
    return {**complete, **figures}


def several_right(rows: pd.DataFrame) -> float:
    """Return RewardBench 2's score, at most 1.01, of prompts with several right answers, and references with one.

    0.3 for each of both kinds whose right answers all score above the wrong ones; 0.2 where the right answers differ
    by less than they are above the wrong ones, 0.2 where also by less than in the reference, 0.01 for by how much.
    """
    best, worst = (rows.groupby("by/row")["chosen_score"].agg(name) for name in ("max", "min"))
    gap, spread = worst - rows.groupby("by/row")["rejected_score"].max(), best - worst
    kind = gap.index.to_series().str.partition(":")
    of = {
        name: pd.DataFrame(
            {"gap": gap[kind[0] == name].to_numpy(), "spread": spread[kind[0] == name].to_numpy()}
        ).set_axis(kind[2][kind[0] == name].to_numpy())
        for name in ("tied", "ref")
    }
    both = of["tied"].join(of["ref"][["gap"]].rename(columns={"gap": "reference"}), how="inner")
    if both.empty:
        return float("nan")
    least = np.minimum(both["gap"], both["reference"])
    with np.errstate(divide="ignore", invalid="ignore"):
        excess = np.nan_to_num(np.tanh(least.to_numpy() / both["spread"].to_numpy() - 1), nan=0.0)
    return float(
        0.3 * (of["tied"]["gap"] > 0).mean()
        + 0.3 * (of["ref"]["gap"] > 0).mean()
        + 0.2 * (both["gap"] > both["spread"]).mean()
        + 0.2 * (least > both["spread"]).mean()
        + 0.01 * excess.mean()
    )


def styles(frame: pd.DataFrame, groups: Groups) -> dict[str, float]:
    """Return RM-Bench's means over domains: of all nine pairs of styles of a prompt, and of the three kinds of pair.

    Answers 0, 1, 2 are chosen, 3, 4, 5 rejected, each in order of style: concise, detailed, with Markdown.
    """
    decided = preferences(frame)
    kind = np.sign(decided["chosen_branch"] - (decided["rejected_branch"] - len(STYLES)))
    right = (margins(decided) > 0).groupby([decided["category"], kind.map(dict(zip((-1, 0, 1), STYLES, strict=True)))])
    table = right.mean().unstack()
    domains = table.mean(axis=1, skipna=False)
    figures = {str(name): float(value) for name, value in domains.items()}
    if set(figures) != set(groups):
        return figures
    return {"overall": float(domains.mean()), **{name: float(table[name].mean()) for name in STYLES}, **figures}


def rankings(frame: pd.DataFrame, groups: Groups) -> dict[str, float]:
    """Return the share of EditReward-Bench's sources whose images are all in the right order; in pairs, with ties.

    A tie is right if its margin is within the threshold that is best on the pairs of sources with two images.
    """
    label, margin = (~frame["tie"].astype(bool)).to_numpy(int), margins(frame).to_numpy()
    two = (frame["category"] == "2pair").to_numpy()
    threshold = best_threshold(label[two], margin[two])[0] if two.any() else 0.0
    right = pd.Series(np.where(label == 1, margin > 0, np.abs(margin) <= threshold), frame.index)
    complete = right.groupby([frame["category"], frame["by/source"]]).all()
    parts = {str(name): float(share) for name, share in complete.groupby(level=0).mean().items()}
    return {"overall": float(complete.mean()), **parts, "pairs_with_ties": best_threshold(label, margin)[1]}


def best_threshold(label: np.ndarray, margin: np.ndarray) -> tuple[float, float]:
    """Return the lowest of the best thresholds of ties, zero included, and its accuracy."""
    sizes, accuracies = by_threshold(label, margin)
    at_zero = float(np.mean(np.where(label == 0, margin == 0, label * margin > 0)))
    if at_zero >= accuracies.max():
        return 0.0, at_zero
    return float(sizes[accuracies.argmax()]), float(accuracies.max())


def tasks(frame: pd.DataFrame, groups: Groups) -> dict[str, float]:
    """Return for each dimension (the category) the mean of its tasks, and of those of `overall` by group."""
    decided = preferences(frame)
    table = (margins(decided) > 0).groupby([decided["category"], decided["by/task"]]).mean().unstack()
    every = [task for group in groups.values() for task in group]
    complete = table.reindex(columns=every).mean(axis=1, skipna=False).dropna()
    figures = {str(name): float(value) for name, value in complete.items()}
    if "overall" in figures:
        figures |= {f"overall/{name}": float(table.loc["overall", [*group]].mean()) for name, group in groups.items()}
    return figures


def tasks_with_ties(frame: pd.DataFrame, groups: Groups) -> dict[str, float]:
    """Return each task's accuracy and their mean, without ties and with those up to the task's best threshold."""
    names = sorted(frame["category"].unique())
    figures: dict[str, dict[str, float]] = {"": {}, "/with_ties": {}}
    for name in names:
        rows = frame[frame["category"] == name]
        label = (~rows["tie"].astype(bool)).to_numpy(int)
        figures[""][name] = accuracy(rows)
        figures["/with_ties"][name] = accuracy_with_ties(label, margins(rows).to_numpy())
    complete = set(groups["tasks"]) == set(names)
    means = {
        f"overall{end.replace('/', '_')}": float(np.mean([*of.values()])) for end, of in figures.items() if complete
    }
    return {**means, **{f"{name}{end}": value for end, of in figures.items() for name, value in of.items()}}


Rule = Callable[[pd.DataFrame, Groups], dict[str, float]]
RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        *(pairs, overall, macro, sections, questions, inversions),
        *(pairs_and_prompts, thresholds, votes, dimensions, categories, best_of_n, styles),
        *(rankings, tasks, tasks_with_ties),
    )
}
# Rules that need groups.
GROUPED = tuple(rule.__name__ for rule in (macro, sections, best_of_n, styles, tasks, tasks_with_ties))


# Intervals of figures, whatever a rule computes: each is computed again without one part of the units at a time (Kott,
# The delete-a-group jackknife, 2001). Units are clusters, whose pairs stay together; they are dealt out to at most
# `PARTS` parts in order of category, so that each part has its share of every category.


def with_intervals(
    rule: Callable[[pd.DataFrame], Mapping[str, float]],
    frame: pd.DataFrame,
    figures: Mapping[str, float],
    units: np.ndarray,
    rows: Mapping[str, np.ndarray],
) -> dict[str, Estimate]:
    """Return the figures of `rule` with 95 % intervals, NaN where the units they rest on are fewer than two.

    An interval is Wilson's of as many independent values as the jackknife's standard error is worth (Korn and
    Graubard, Confidence intervals for proportions, 1998). A `threshold` is no share and has none. `units` [N] are what
    is independent, and `rows` by figure whether it rests on each pair, [N].
    """
    parts = dealt(units, frame["category"].map(str).to_numpy())
    plain = frame[[name for name in frame if not str(name).endswith(TEXTS)]]
    without = [rule(plain[parts != part]) for part in range(parts.max() + 1)] if parts.max() else []
    estimates = {}
    for name, value in figures.items():
        used = rows[name]
        count, held = len(pd.unique(units[used])), len(np.unique(parts[used]))
        error = NAN
        if held > 1 and name != "threshold":
            values = np.array([figures.get(name, NAN) for figures in without])
            error = float(np.sqrt((held - 1) / held * ((values - value) ** 2).sum()))
        low, high = (NAN, NAN) if np.isnan(error) else interval_of(value, error, held - 1, count)
        estimates[name] = Estimate(value, low, high, error, int(used.sum()), count)
    return estimates


def dealt(units: np.ndarray, categories: np.ndarray) -> np.ndarray:
    """Return the number of each row's part, below `PARTS`: units in order of category, shuffled within, dealt out."""
    codes = pd.factorize(units)[0]
    first = pd.factorize(pd.Series(categories).groupby(codes).first())[0]
    shuffled = np.random.default_rng(SEED).permutation(len(first))
    order = np.argsort(np.lexsort((shuffled, first)))
    return order[codes] % min(PARTS, len(first))


def interval_of(value: float, error: float, freedom: int, count: int) -> Interval:
    """Return the interval of a share with this standard error; without any, as of `count` values."""
    effective = value * (1 - value) / error**2 if error > 1e-9 and 0 < value < 1 else float(count)
    low, high = share(value, Spread(error, freedom, effective), float(t.ppf((1 + LEVEL) / 2, freedom)))
    return Interval(float(low), float(high))


def rows_of(name: str, frame: pd.DataFrame, groups: Groups) -> np.ndarray:
    """Return whether each pair is of the part that a figure is named after, all where it is named after none: [N]."""
    part = name.partition("/")[0]
    names = frame["category"].map(str)
    among = names.isin([name, *groups.get(name, ())]).to_numpy()
    if among.any():
        return among
    of_part = ((names == part) | names.str.startswith(f"{part}/")).to_numpy()
    return of_part if of_part.any() else np.ones(len(frame), dtype=bool)
