"""Environments as vectors: frames of their cameras, and the true success of every state.

Policies observe the environment's state; `info` has `images`, uint8 [C,H,W] by camera, and `success`, both of the
observed state. Simulators with a success of their own say it after a reset too; a declared one is of steps alone.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import load_env_creator
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from vlmrm.errors import ConfigError, DataError, VlmrmError, first_line
from vlmrm.plugins import imported_function, imported_module
from vlmrm.settings import did_you_mean
from vlmrm_robots.frames.collector import LABELS
from vlmrm_robots.frames.images import Views, as_array, cameras
from vlmrm_robots.frames.settings import IMAGE_KEY, IMAGE_SIZE, RENDER, Crop
from vlmrm_robots.frames.simulators import SIMULATORS, Simulator
from vlmrm_robots.trajectories.trajectory import listed

FORMS = "info.KEY, terminated, reward >= NUMBER, info.KEY > NUMBER, observation.KEY < NUMBER or module:function"
TESTS = {">=": operator.ge, "<=": operator.le, "==": operator.eq, ">": operator.gt, "<": operator.lt}
FUNCTION = r"[\w.]+:\w+"
DECLARATION = re.compile(
    r"(?P<what>reward|terminated|info|observation)(\.(?P<path>[^\s<>=]+))?(\s*(?P<sign>>=|<=|==|>|<)\s*(?P<number>\S+))?"
)


def make_environments(
    name: str,
    count: int,
    *,
    seed: int,
    image_size: Sequence[int] = IMAGE_SIZE,
    keys: Sequence[str] = (IMAGE_KEY,),
    crop: Crop | None = None,
    success: str | None = None,
    env_options: Mapping[str, Any] | None = None,
    stop_at_success: bool = True,
    max_steps: int | None = None,
    action_repeat: int = 1,
    autoreset_mode: AutoresetMode = AutoresetMode.SAME_STEP,
) -> VectorEnv:
    """Return `count` environments; environment i is first reset with `seed` + i. See `EnvironmentSettings`.

    Args:
        keys: the cameras. The only one of an environment whose observations have no images is its drawing, and so is
            `render` beside others. If empty, nothing is shown.
        stop_at_success: False continues episodes until `max_steps`, where the simulator has a success of its own.
        action_repeat: steps for each action, which end early at a success; the states between are not shown.
    """
    simulator = SIMULATORS.get(name, Simulator())
    maker = environment_maker(name)
    if success is None and simulator.success is None:
        raise ConfigError(f"{name} has no success of its own: declare one with success, as {FORMS}.")
    if len(image_size) != 3 or image_size[0] not in (1, 3) or min(image_size) < 1:
        raise ConfigError(f"image_size is {list(image_size)}: it is [C,H,W], with 1 or 3 channels.")
    if len(keys) > 1 and name in SIMULATORS:
        raise ConfigError(
            f"{name} has one camera, and {len(keys)} image keys were given ({', '.join(keys)}): give one."
        )
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame without a display
    os.environ.setdefault("MUJOCO_GL", "egl")
    options = {**simulator.options, **(env_options or {})}

    def make(number: int) -> gym.Env:
        env = _made(name, maker, max_steps, options)
        env = env if success is None else DeclaredSuccess(env, success)
        return LabelledEnv(
            simulator.prepare(env, max(image_size[1:])),
            simulator.success if success is None else None,
            stop_at_success=stop_at_success,
            action_repeat=action_repeat,
            keys=keys,
            size=image_size,
            crop=crop,
            seed=seed + number,
        )

    env = SyncVectorEnv([partial(make, number) for number in range(count)], autoreset_mode=autoreset_mode)
    env.metadata = {**env.metadata, "crop": crop or {}}
    return env


def environment_maker(name: str) -> Callable[..., gym.Env]:
    """Return the function that makes an environment of this name."""
    module, _, last = name.rpartition(":")
    names = list(gym.registry)
    if module:
        imported = imported_module(module, f"env {name}")
        if callable(getattr(imported, last, None)):
            return getattr(imported, last)
        names = [*gym.registry, *(key for key, value in vars(imported).items() if callable(value))]
    package = name.partition("/")[0].replace("ALE", "ale_py")
    if "/" in name and package.isidentifier() and last not in gym.registry and find_spec(package):
        import_module(package)  # most packages have the name of their ids' namespace
    if last not in gym.registry:
        otherwise = ": give an id of Gymnasium, module:id of one that a module registers, or module:function."
        raise ConfigError(f"there is no simulator {name!r}{did_you_mean(last, names, otherwise)}")
    point = gym.registry[last].entry_point
    try:
        made_by = load_env_creator(point) if isinstance(point, str) else point
    except Exception as error:  # whatever its modules raise, such as Gymnasium's for a package that is missing
        raise ConfigError(f"{name} cannot be made: {type(error).__name__}: {first_line(error)}") from error
    modes = getattr(made_by, "metadata", {}).get("render_modes", ["rgb_array"])  # a function does not say
    return partial(gym.make, last, **({"render_mode": "rgb_array"} if "rgb_array" in modes else {}))


def _made(name: str, maker: Callable[..., gym.Env], max_steps: int | None, options: Mapping[str, Any]) -> gym.Env:
    registered = isinstance(maker, partial)
    steps = {"max_episode_steps": max_steps} if registered and max_steps is not None else {}
    try:
        env = maker(**steps, **options)
    except Exception as error:  # whatever an environment's own code raises
        raise ConfigError(f"{name} cannot be made: {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(env, gym.Env):
        raise ConfigError(
            f"{name} returns {type(env).__name__}: it has to return one gymnasium.Env; wrap a vector of them in "
            "RewardDataCollector in a loop of your own."
        )
    return env if registered or max_steps is None else gym.wrappers.TimeLimit(env, max_steps)


class LabelledEnv(gym.Wrapper):
    """Adds to `info` the true `success` of each state, if it is known, and frames uint8 [C,H,W] by camera.

    Without `success`, a function of the present state, it is that of the `DeclaredSuccess` within, whose episodes end
    where the environment ends them. The first reset has the `seed`; later ones continue the random numbers.
    """

    def __init__(
        self,
        env: gym.Env,
        success: Callable[[gym.Env], bool | None] | None,
        *,
        stop_at_success: bool,
        action_repeat: int = 1,
        keys: Sequence[str] = (),
        size: Sequence[int] = IMAGE_SIZE,
        crop: Crop | None = None,
        seed: int | None = None,
    ):
        super().__init__(env)
        self._success, self._past_end = success or _declared, success is not None
        self._stop, self._repeat = stop_at_success, action_repeat
        self._keys, self._seed = list(keys), seed
        self._views = Views(self._keys, size, crop or {})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        first, self._seed = self._seed, None
        observation, info = self.env.reset(seed=first if seed is None else seed, options=options)
        return observation, self._labelled(observation, info, self._success(self.env))

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        total = 0.0
        for _ in range(self._repeat):
            try:
                observation, reward, terminated, truncated, info = self.env.step(action)
            except VlmrmError:
                raise
            except Exception as error:  # whatever an environment's own code raises
                said = f"{type(error).__name__} in a step ({first_line(error)})"
                raise ConfigError(f"{self.env} raises {said}: look at its actions, such as {action!s:.60}.") from error
            success = self._success(self.env)
            if success:
                terminated = self._stop or (bool(terminated) and not self._past_end)
            total += float(reward)
            if success or terminated or truncated:
                break
        return observation, total, bool(terminated), truncated, self._labelled(observation, info, success)

    def _labelled(self, observation: Any, info: dict[str, Any], success: bool | None) -> dict[str, Any]:
        info = {name: value for name, value in info.items() if name not in LABELS}
        images = {"images": self._images(observation)} if self._keys else {}
        return {**info, **images} | ({} if success is None else {"success": success})

    def _images(self, observation: Any) -> dict[str, np.ndarray]:
        drawn = RENDER if RENDER in self._keys else self._keys[0]
        info: dict[str, Any] = {}
        if drawn == RENDER or (len(self._keys) == 1 and not cameras(observation)):
            try:
                picture: Any = self.env.render()
            except NotImplementedError:
                picture = None
            if not hasattr(picture, "shape"):
                raise ConfigError(f"{self.env} shows no images, nor draws one: make it with render_mode='rgb_array'.")
            info = {"images": {drawn: picture[None]}}
        try:
            images = self._views.of(0, observation, info, name=str(self.env))
        except DataError as error:
            raise DataError(f"{str(error).rstrip('.')} ({RENDER!r} is the environment's drawing).") from error
        return {key: frames[0] for key, frames in images.items()}


def _declared(env: gym.Env) -> bool | None:
    return env.get_wrapper_attr("success")


# Declared successes --------------------------------------------------------------------------------------------------


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
    what, path, sign, text = match.group("what", "path", "sign", "number") if match else ("", None, None, None)
    try:
        number = None if text is None else float(text)
    except ValueError:
        what = ""
    keyed = what == "observation" or (path is not None) == (what == "info")
    if not what or not keyed or (sign is None and what in ("reward", "observation")):
        raise ConfigError(f"success is {declaration!r}: write {FORMS}.")

    def test(observation: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> bool:
        values = {"observation": observation, "reward": reward, "terminated": terminated, "info": info}
        value = as_array(_at(values[what], path, declaration))
        if value.size != 1:
            raise ConfigError(f"success is {declaration!r}, and that is {list(value.shape)} values: name one of them.")
        return bool(value.item()) if sign is None or number is None else bool(TESTS[sign](value.item(), number))

    return test


def _at(value: Any, path: str | None, declaration: str) -> Any:
    """Return the value at a dotted path of keys and, in arrays, of positions."""
    for part in path.split(".") if path else ():
        try:
            value = value[part] if isinstance(value, Mapping) else value[int(part)]
        except (LookupError, ValueError, TypeError) as error:
            has = listed(value) if isinstance(value, Mapping) else f"an array of {list(np.shape(value))}"
            raise ConfigError(f"success is {declaration!r}, and there is no {part}: choose from {has}.") from error
    return value
