"""What a reward model answers: named outputs, each of a kind, and the one number that is made of them.

A model has one output, a preference, unless the key `outputs` names others, such as `{overall: preference, clarity:
rating 1-5}`. A judgement trains the output of its dimension, or the first whose kind takes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from vlmrm.conversation import Comparison, Judgement
from vlmrm.errors import ConfigError, RowError
from vlmrm.settings import did_you_mean

# The kinds of judgements that each kind of output learns from without being named by their dimension.
TAKES = {
    "preference": ("preference", "rating"),  # Bradley-Terry; of ratings, which answer has the higher
    "gaussian": ("preference", "rating"),  # a mean and its variance, which is that of a rater's choice
    "rating": ("rating",),  # a number from `low` to `high`, by the logarithmic loss of its share of the range
    "ordinal": ("rating",),  # a whole number from `low` to `high`, by the probability that it is above each below
    "correctness": ("correctness",),  # the probability that an answer, or a solution up to a step, is right
    "progress": ("progress",),  # how much of a task is done, from 0 to 1
}
RANGED = ("rating", "ordinal")
FIGURES = ("rank", "auc", "order", "accuracy", "error", "first_wrong")  # in logs NAME_FIGURE; its first one chooses
COUNTS = ("pairs", "ratings")  # beside them, what they are of
WRITTEN = re.compile(
    r"(\w+)(?:\s+(-?[\d.]+)\s*-\s*(-?[\d.]+))?(?:\s+in\s+(\d+))?(\s+apart)?"  # kind, low, high, bins, apart
)


@dataclass(frozen=True)
class Output:
    """One number of a reward model: its name, its kind (one of `TAKES`), its range, and its weight in the total.

    One that is `apart` is read at the end of a branch of its own: the conversation as the chat template writes it
    where the variable `output` is its name.
    """

    name: str = "score"
    kind: str = "preference"
    low: float = 0.0
    high: float = 1.0
    weight: float = 1.0
    apart: bool = False
    bins: int = 1  # of progress: evenly spaced shares, by their softmax; 1: a sigmoid

    @classmethod
    def parse(cls, name: str, text: str) -> Output:
        """Return an output as the configuration writes it: `preference`, or `rating 1-5`."""
        match = WRITTEN.fullmatch(str(text).strip())
        kind, low, high, bins, apart = match.groups() if match else [""] * 5
        shares = int(bins or 1)
        if kind not in TAKES or (kind in RANGED) != bool(low) or not shares or (bins and kind != "progress"):
            others = ", ".join(it for it in TAKES if it not in RANGED)
            written = " or ".join(f"{it} LOW-HIGH" for it in RANGED)
            raise ConfigError(f"the output {name} is {text!r}: write {others}, or {written}.")
        low, high = float(low or 0), float(high or 1)
        if low >= high or (kind == "ordinal" and not (low.is_integer() and high.is_integer())):
            raise ConfigError(f"the output {name} is {text!r}: go from low to high, of an ordinal in whole numbers.")
        return cls(name, kind, low, high, apart=bool(apart), bins=shares)

    @property
    def branch(self) -> str | None:
        """What the chat template is told to write the branch that it is read at: its name, or nothing."""
        return self.name if self.apart else None

    @property
    def columns(self) -> int:
        """The columns of the head: of an ordinal one for each step of its range, of a Gaussian mean and variance."""
        return {"ordinal": round(self.high - self.low), "gaussian": 2}.get(self.kind, self.bins)

    @property
    def rates(self) -> bool:
        """Whether it learns from single answers; else pairs alone say something."""
        return "preference" not in TAKES[self.kind]

    @property
    def judged_as(self) -> Any:
        """The kind of the judgements in a column of its name."""
        return TAKES[self.kind][-1]

    def share(self, value: float) -> float:
        """Return where in the range a value lies, from 0 to 1."""
        if not self.low <= value <= self.high:
            raise RowError(f"its {self.name} is {value:g}, outside of {self.low:g} to {self.high:g}")
        if self.kind == "ordinal" and value % 1:
            raise RowError(f"its {self.name} is {value:g}, and an ordinal has whole numbers: make the output a rating")
        return (value - self.low) / (self.high - self.low)

    def written(self) -> str:
        ranged = f" {self.low:g}-{self.high:g}" if self.kind in RANGED else ""
        return self.kind + ranged + f" in {self.bins}" * (self.bins > 1) + " apart" * self.apart


@dataclass(frozen=True)
class Outputs:
    """The outputs of a reward model, in the order of the head's columns; by default one preference."""

    each: tuple[Output, ...] = (Output(),)

    @classmethod
    def parse(cls, outputs: Mapping[str, str] | None, total: Mapping[str, float] | None = None) -> Outputs:
        """Return the outputs of the configuration: `total` has weights by name, by default the first alone counts."""
        if not outputs:
            if total:
                write = "write outputs: {overall: preference, clarity: rating 1-5} first"
                raise ConfigError(f"total weighs outputs, and there is only one: {write}.")
            return cls()
        each = [Output.parse(name, text) for name, text in outputs.items()]
        if unknown := sorted({*(total or {})} - {*outputs}):
            raise ConfigError(f"total weighs {unknown[0]}, which is no output: there are {', '.join(outputs)}.")
        try:
            weights = {name: float(weight) for name, weight in (total or {next(iter(outputs)): 1.0}).items()}
        except ValueError as error:
            raise ConfigError(f"total holds what is no number ({error}): write total: {{NAME: WEIGHT}}.") from None
        if not any(weights.values()):
            raise ConfigError("total weighs every output by 0: give one of them a weight, or remove total.")
        return cls(tuple(replace(one, weight=weights.get(one.name, 0.0)) for one in each))

    @classmethod
    def of(cls, described: Sequence[Mapping[str, Any]] | None) -> Outputs:
        """Return those that a checkpoint describes: `config.reward_outputs`, or `outputs` of `reward_model.json`."""
        return cls() if described is None else cls(tuple(Output(**one) for one in described))

    def described(self) -> list[dict[str, Any]] | None:
        """Return the outputs as a checkpoint holds them; None for the default, of which it says nothing."""
        return None if self == ONE else [asdict(one) for one in self.each]

    def keys(self) -> dict[str, dict[str, Any]]:
        """Return the keys `outputs` and `total` of a configuration."""
        total = {one.name: one.weight for one in self.each if one.weight}
        return {"outputs": {one.name: one.written() for one in self.each}, "total": total}

    def __iter__(self) -> Iterator[Output]:
        return iter(self.each)

    def __len__(self) -> int:
        return len(self.each)

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.each]

    @property
    def branches(self) -> list[str | None]:
        """The branches that a conversation is read in, by `Output.branch`: one, unless outputs are apart."""
        return list(dict.fromkeys(one.branch for one in self.each))

    @property
    def named(self) -> frozenset[str]:
        """The columns of data that hold values of outputs; none for the default, whose name nobody chose."""
        return frozenset() if self == ONE else frozenset(self.names)

    @property
    def figures(self) -> list[str]:
        """The names of what an evaluation may say of named outputs, the first of each for choosing."""
        of_kind = {"correctness": ("auc", "accuracy", "first_wrong"), "progress": ("order", "error")}
        others = ("rank", "accuracy", "error")
        return [
            f"{output.name}_{figure}"
            for output in self.each
            if output.name in self.named
            for figure in of_kind.get(output.kind, others if output.rates else ["accuracy"])
        ]

    @property
    def columns(self) -> int:
        return sum(one.columns for one in self.each)

    def checked(self, name: str | None, where: str = "") -> str | None:
        """Return the name of an output; raise ConfigError, after `where`, for one that there is not."""
        if name is not None and name not in self.names:
            raise ConfigError(f"{where}the model has no output {name}{did_you_mean(name, self.names)}")
        return name

    def number(self, values: Mapping[str, float], output: str | None = None) -> float:
        """Return the one number of a model from its values by name: that of an `output`, or the weighted sum."""
        return sum(one.weight * values[one.name] for one in self.each) if output is None else values[output]

    def index(self, judgement: Judgement) -> int:
        """Return the number of the output that a judgement trains; raise RowError for one that trains none."""
        if len(self) == 1 and judgement.kind in ("preference", *TAKES[self.each[0].kind]):
            return 0  # of all criteria
        if judgement.dimension in self.names:
            return self.names.index(judgement.dimension)
        takers = [number for number, one in enumerate(self.each) if judgement.kind in TAKES[one.kind]]
        if judgement.dimension is None and takers:
            return takers[0]
        what = f"the dimension {judgement.dimension}" if judgement.dimension else f"a {judgement.kind}"
        raise RowError(f"it judges {what}, which no output answers ({', '.join(self.names)}): name it in outputs")

    def counted(self, comparison: Comparison) -> Comparison | None:
        """Return a comparison with the judgements that the total can be measured by; None where there are none."""
        if self == ONE:
            return comparison
        counts = [bool(one.weight) and one.judged_as == "rating" for one in self.each]
        kept = tuple(it for it in comparison.judgements if counts[self.index(it)])  # of parts of one answer, none
        judged = {answer for judgement in kept for answer in judgement.answers}
        return replace(comparison, judgements=kept) if len(judged) == len(comparison.answers) > 1 else None

    def targets(self, judgement: Judgement) -> tuple[int, list[float] | None]:
        """Return the output of a judgement and each answer's share of its range; None where pairs of answers train it.

        Raises RowError for a value out of range, or of one answer where a preference is learned.
        """
        number = self.index(judgement)
        output = self.each[number]
        if output.rates and judgement.kind != "preference":
            return number, [output.share(value) for value in judgement.values]
        if len(judgement.answers) < 2:
            raise RowError(
                f"it has a judgement of one answer, and {output.name} learns from pairs: remove it, or rate answers "
                f"by an output such as outputs: {{{output.name}: rating 1-5}}"
            )
        return number, None

    def judgements(self, cells: Mapping[str, Any], count: int) -> Iterator[Judgement]:
        """Yield the judgements in the columns of a row that are named like outputs, of its `count` answers.

        A column has a number for each answer; with one answer a number, or a list of those of several raters.
        """
        for output in self.each:
            if output.name not in self.named or (values := cells.get(output.name)) is None:
                continue
            values = [*values] if isinstance(values, (list, tuple)) else [values]
            raters = [[value] for value in values] if count == 1 else [values]
            for of_rater in raters:
                if len(of_rater) != count:
                    raise RowError(f"`{output.name}` holds {len(of_rater)} values for {count} answers: give each one")
                answers = tuple(number for number, value in enumerate(of_rater) if value is not None)
                judged = tuple(of_rater[number] for number in answers)
                if judged:
                    yield Judgement(answers, judged, output.judged_as, weight=1 / len(raters), dimension=output.name)


ONE = Outputs()
