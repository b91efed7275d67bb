"""SkyRL-Gym: an environment by its registry, whose reward is a step's, as examples/frameworks writes it."""

from __future__ import annotations

from typing import Any

import skyrl_gym
from checks import QUESTION, Case, data_uri, main, raised, recipe, scored


def registered(url: str, folder: str) -> None:
    skyrl_gym.registry.pop("people", None)  # that of another address
    recipe("skyrl_environment", url, folder)


def step(picture: str, answer: str) -> Any:
    """What the environment says of an answer."""
    environment = skyrl_gym.make("people", extras={})
    shown = {"type": "image_url", "image_url": {"url": data_uri(picture)}}
    environment.init([{"role": "user", "content": [shown, {"type": "text", "text": QUESTION}]}])
    return environment.step(answer)


def equal(case: Case) -> list[dict[str, Any]]:
    registered(case.url, case.folder)
    return [scored(*row, step(*row)["reward"]) for row in case.rows()]


def broken(case: Case) -> str:
    registered(case.url, case.folder)
    return raised(lambda: step(case.broken, "It is red."), "RewardError", "sample 0")


def away(case: Case) -> str:
    registered(case.away, case.folder)
    return raised(lambda: step(*case.rows()[0]), "RewardError", case.away)


if __name__ == "__main__":
    main({"equal": equal, "broken": broken, "away": away})
