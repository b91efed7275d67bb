"""A reward model of vlmrm in verl: the data that its reward function needs, and calls as verl makes them.

python examples/verl_reward.py --model outputs/best --data rows.parquet

    python -m verl.trainer.main_ppo data.train_files=rows.parquet ... \
        reward.custom_reward_function.path=pkg://vlmrm.adapters.verl_reward \
        +reward.custom_reward_function.reward_kwargs.model=http://host:8080

Without a model it scores with a tiny one that was never trained.
"""

import argparse
import asyncio
import io
import tempfile
from pathlib import Path

import pandas as pd
from PIL import Image

from vlmrm.adapters.verl_reward import compute_score
from vlmrm.modeling import make_tiny_reward_model

ANSWERS = ["It is red.", "It is green.", "It is blue.", "No."]


def main() -> None:
    parser = argparse.ArgumentParser(description="Score answers as verl asks for them.")
    parser.add_argument("--model", help="a trained checkpoint")
    parser.add_argument("--data", type=Path, help="where to keep the row as a parquet file")
    words = parser.parse_args()
    row = example_row()
    if words.data:
        pd.DataFrame([row]).to_parquet(words.data)
    with tempfile.TemporaryDirectory() as folder:
        model = words.model or str(make_tiny_reward_model(folder))
        for answer, score in zip(ANSWERS, asyncio.run(scores(row, model)), strict=True):
            print(f"{score:+9.4f}  {answer}")


def example_row() -> dict:
    """What verl itself reads, and in `extra_info` the same prompt and image for the reward."""
    file = io.BytesIO()
    Image.new("RGB", (112, 112), "red").save(file, "PNG")
    question, images = "<image>Which colour is this?", [{"bytes": file.getvalue(), "path": None}]
    return {
        "data_source": "colours",
        "prompt": [{"role": "user", "content": question}],
        "images": images,
        "reward_model": {"style": "model", "ground_truth": ""},
        "extra_info": {"prompt": question, "images": images},
    }


async def scores(row: dict, model: str) -> list[float]:
    """One call for each answer, all at once: they are scored in one batch."""
    common = {"data_source": row["data_source"], "ground_truth": "", "extra_info": row["extra_info"], "model": model}
    results = await asyncio.gather(*(compute_score(solution_str=answer, **common) for answer in ANSWERS))
    return [result["score"] for result in results]


if __name__ == "__main__":
    main()
