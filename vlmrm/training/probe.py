"""The probe: a small fixed sample of the evaluation set, scored again with grey images and under other prompts.

Its figures show, while a run trains, whether the model looks at the image and the question.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from vlmrm.data.comparisons import sample
from vlmrm.engine import ScoredRow
from vlmrm.measures.analysis import point_figures
from vlmrm.measures.donors import donors_of
from vlmrm.measures.pairs import ScoredComparisons, scored_frame
from vlmrm.training.callbacks import LOGGED

logger = logging.getLogger("vlmrm")

NEEDED = {"blank_image": "an image to paint grey", "swapped_prompt": "another prompt of its kind to be shown under"}


class ProbedDataset:
    """The rows of an evaluation set (of `load_comparisons`); those of its probe also have `donors`.

    The collator alters those. The probe is drawn as `max_eval_samples` draws, with donors from the probe,
    so a sweep with `max_eval_samples` = `samples` and an equal `split_seed` has the same figures.
    """

    def __init__(self, dataset: Any, samples: int, seed: int):
        self.dataset = dataset
        self.probe = sample(dataset, None, samples, seed)
        self._positions = {row["index"]: position for position, row in enumerate(self.probe)}
        self._warned: set[str] = set()  # interventions without figures that the log has named

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        columns = self.dataset[numbers]
        rows = [{"index": i, "comparison": c} for i, c in zip(columns["index"], columns["comparison"], strict=True)]
        for row in rows:
            if row["index"] in self._positions:
                donors = donors_of(row["comparison"], self._positions[row["index"]], self.probe)
                row |= {"donors": donors, "sampled": True}
        return rows

    def figures(self, scored: Mapping[int, ScoredRow]) -> dict[str, float]:
        """Return the figures of `LOGGED`, from the scored rows by `index`.

        Figures that no row allows are left out, and named in the log the first time.
        """
        rows = [row for row in self.probe if row["index"] in scored and row["comparison"].pairs()]
        results = [scored[row["index"]] for row in rows]
        comparisons = [row["comparison"] for row in rows]
        result = ScoredComparisons(comparisons, [row.scores for row in results], [row.altered for row in results])
        metrics = [metric for names in LOGGED.values() for metric in names.values()]
        values = point_figures(scored_frame(result), metrics) if rows else dict.fromkeys(metrics, math.nan)
        figures: dict[str, float] = {}
        for intervention, names in LOGGED.items():
            figures |= {name: values[figure] for name, figure in names.items() if not math.isnan(values[figure])}
            if not names.keys() <= figures.keys() and intervention not in self._warned:
                self._warned.add(intervention)
                logger.info(
                    "No row with a preference among the %d of the probe has %s: %s are not logged",
                    len(self.probe), NEEDED[intervention], " and ".join(names),
                )  # fmt: skip
        return figures
