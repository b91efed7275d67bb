"""A checkpoint's results in the two files that RewardBench's scripts write and its leaderboard reads.

The layout is that of `save_to_hub` in https://github.com/allenai/reward-bench, with categories as its subsets: a model
is named by its path, and a folder `eval-set` has its accuracies, `eval-set-scores` its scores.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

from vlmrm.evaluation.schema import Row
from vlmrm.files import make_folder, write_file

# What RewardBench calls a sequence classifier whose tokenizer brings the chat template.
MODEL_TYPE, CHAT_TEMPLATE = "Seq. Classifier", "tokenizer"


def write_rewardbench(folder: Path, row: Row, frame: pd.DataFrame) -> None:
    """Writes both files of a checkpoint into `folder`, if each of its scored pairs has a category.

    Pairs that people tied are left out: RewardBench has none. Equal scores are wrong, as there.
    """
    pairs = frame[~frame["tie"].to_numpy(bool)]
    if row["error"] or pairs.empty or pairs["category"].isna().any():
        return
    right = (pairs["chosen_score"] > pairs["rejected_score"]).astype(int)
    name = "/".join(part for part in Path(row["path"]).parts if part not in ("/", ".."))
    about = {"model": name, "model_type": MODEL_TYPE, "chat_template": CHAT_TEMPLATE}
    scores = {
        "id": pairs["comparison_id"].tolist(),
        "subset": pairs["category"].tolist(),
        "results": right.tolist(),
        "scores_chosen": pairs["chosen_score"].tolist(),
        "scores_rejected": pairs["rejected_score"].tolist(),
    }
    _write(folder / "eval-set" / f"{name}.json", {**about, **right.groupby(pairs["category"]).mean().to_dict()})
    _write(folder / "eval-set-scores" / f"{name}.json", {**about, **scores})


def _write(path: Path, content: dict[str, Any]) -> None:
    make_folder(path.parent)
    write_file(path, json.dumps(content, indent=4, sort_keys=True) + "\n")
