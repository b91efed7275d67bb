"""Declarations of a success: a key of `info`, a threshold on a number, or a function of what a step returned."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from vlmrm.errors import ConfigError
from vlmrm.plugins import imported_function
from vlmrm.settings import did_you_mean
from vlmrm_robots.frames.images import as_array
from vlmrm_robots.trajectories.trajectory import listed

FORMS = "info.KEY, terminated, reward >= NUMBER, info.KEY > NUMBER, observation.KEY < NUMBER or module:function"
TESTS = {">=": operator.ge, "<=": operator.le, "==": operator.eq, ">": operator.gt, "<": operator.lt}
FUNCTION = r"[\w.]+:\w+"
DECLARATION = re.compile(
    r"(?P<what>reward|terminated|info|observation)(\.(?P<path>[^\s<>=]+))?(\s*(?P<sign>>=|<=|==|>|<)\s*(?P<number>\S+))?"
)


class DeclaredSuccess(gym.Wrapper):
    """Keeps in `success` whether the last step led to a success, as declared; None after a reset."""

    def __init__(self, env: gym.Env, declaration: str):
        super().__init__(env)
        self.success: bool | None = None
        self._test = success_test(declaration)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.success = None
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        result = self.env.step(action)
        self.success = self._test(*result)
        return result


def success_test(declaration: str) -> Callable[[Any, Any, Any, Any, Any], bool]:
    """Return the function (observation, reward, terminated, truncated, info) -> bool of a declaration."""
    match = DECLARATION.fullmatch(declaration.strip())
    if re.fullmatch(FUNCTION, declaration):
        function = imported_function(*declaration.rsplit(":", 1), f"success {declaration}")
        return lambda *step: bool(function(*step))
    number = _number(match["number"]) if match and match["sign"] else None
    if (
        match is None
        or (match["sign"] is not None) != (number is not None)
        or (match["path"] is not None and match["what"] in ("reward", "terminated"))
        or (match["path"] is None and match["what"] == "info")
        or (number is None and match["what"] in ("reward", "observation"))
    ):
        raise ConfigError(f"success is {declaration!r}: write {FORMS}.")
    what, path, sign = match["what"], match["path"], match["sign"]

    def test(observation: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> bool:
        values = {"observation": observation, "reward": reward, "terminated": terminated, "info": info}
        value = as_array(_at(values[what], path, declaration))
        if value.size != 1:
            raise ConfigError(f"success is {declaration!r}, and that is {list(value.shape)} values: name one of them.")
        return bool(value.item()) if number is None else bool(TESTS[sign](value.item(), number))

    return test


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _at(value: Any, path: str | None, declaration: str) -> Any:
    """Return the value at a dotted path of keys and, in arrays, of positions; keys may have dots themselves."""
    while path:
        if isinstance(value, Mapping):
            key = path if path in value else next((k for k in value if path.startswith(f"{k}.")), None)
            if key is None:
                has = f": choose from {listed(value)}." if value else ": it has no keys at all."
                raise ConfigError(
                    f"success is {declaration!r}, and there is no {path}{did_you_mean(path, value, has)}"
                )
            value, path = value[key], path[len(key) + 1 :]
        else:
            first, _, path = path.partition(".")
            if not (first.isdecimal() and int(first) < (len(value) if np.ndim(value) else 0)):
                shape = list(np.shape(value))
                raise ConfigError(f"success is {declaration!r}, and {first} is no position in an array of {shape}.")
            value = value[int(first)]
    return value
