"""AReaL: an episode of its vision workflow, with the reward of examples/frameworks; what it generates is given."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

from areal.api import ModelResponse
from areal.api.cli_args import GenerationHyperparameters
from areal.workflow.vision_rlvr import VisionRLVRWorkflow
from checks import QUESTION, Case, main, raised, recipe, scored
from PIL import Image
from transformers import AutoProcessor

RENDERED = (
    f"<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
)


def reward(case: Case, url: str, picture: str, answer: str, question: str = f"<image>{QUESTION}") -> float:
    """The reward of an episode."""
    processor = AutoProcessor.from_pretrained(case.policy)
    answered = processor.tokenizer(answer + "<|im_end|>")["input_ids"]

    async def generate(request: Any) -> ModelResponse:
        return ModelResponse(
            input_tokens=request.input_ids,
            output_tokens=answered,
            output_logprobs=[0.0] * len(answered),
            output_versions=[0] * len(answered),
        )

    workflow = VisionRLVRWorkflow(
        recipe("areal_function", url, case.folder).people,
        GenerationHyperparameters(max_new_tokens=32),
        processor.tokenizer,
        processor,
        enable_thinking=False,
    )
    row = {"messages": RENDERED, "images": [Image.open(picture).convert("RGB")], "question": question}
    episode = asyncio.run(workflow.arun_episode(SimpleNamespace(agenerate=generate), row))
    return float(episode["rewards"][0])


def equal(case: Case) -> list[dict[str, Any]]:
    return [scored(*row, reward(case, case.url, *row)) for row in case.rows()]


def broken(case: Case) -> str:
    """The policy takes no broken picture either: here the reward's own column asks about one more than there is."""
    question = f"<image><image>{QUESTION}"
    return raised(lambda: reward(case, case.url, *case.rows()[0], question), "RewardError", "sample 0")


def away(case: Case) -> str:
    return raised(lambda: reward(case, case.away, *case.rows()[0]), "RewardError", case.away)


def late(case: Case) -> str:
    """AReaL itself makes 0 of what takes 15 s: the reward must have given up by then."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        said = raised(lambda: reward(case, url, *case.rows()[0]), "RewardError", "did not answer")
        return f"{said} where it is silent"


if __name__ == "__main__":
    main({"equal": equal, "broken": broken, "away": away, "late": late})
