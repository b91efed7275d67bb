"""What every driver shares: the case it is given, and the report that it prints. It runs in each environment.

    python drive_NAME.py CASE.json REPORT.json

A driver has checks by name. It returns conversations with the reward that the framework came to, which
`drive.py` compares with `load_scorer`, or what happened, in words; or it fails. Checks of `guide` run blocks of
docs/howto/rl.md as they stand there, and say how far: `ran`.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import re
import socket
import sys
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

QUESTION = "Which colour is this?"
ANSWERS = ("It is red.", "It may be blue, I think.")
ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "howto" / "rl.md"
GUIDES_QUESTION, GUIDES_POLICY = "What is this?", "Qwen/Qwen2.5-VL-3B-Instruct"
MANY = {"people": 1.0, "brief": 0.5}  # the rewards of `many_rewards`, with their weights
RANKS = 2
NOT_DONE = {"proved": False, "what": "not done"}


@dataclass(frozen=True)
class Case:
    """What a driver is given: folders and addresses of this machine."""

    url: str  # of `vlmrm serve`
    model: str  # the checkpoint that it serves
    away: str  # where nothing listens
    policy: str  # a tiny vision-language model to be trained
    pictures: tuple[str, str]  # that differ
    broken: str  # a file that is cut off
    folder: str  # an empty one

    def rows(self) -> list[tuple[str, str]]:
        """Return both answers to each picture."""
        return [(picture, answer) for picture in self.pictures for answer in ANSWERS]


def asked(picture: Any, question: str = QUESTION) -> list[dict[str, Any]]:
    """The user's turn, with a picture in it."""
    return [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": question}]}]


def scored(picture: str, answer: str, reward: Any, question: str = QUESTION) -> dict[str, Any]:
    """A conversation with the reward that a framework came to."""
    answered = {"role": "assistant", "content": answer}
    return {"messages": [*asked(picture, question), answered], "reward": float(reward)}


def drawn(picture: str, reward: Any, asked: str = QUESTION) -> dict[str, Any]:
    """A conversation whose answer is a picture, with the reward that a framework came to."""
    question = {"role": "user", "content": [{"type": "text", "text": asked}]}
    answer = {"role": "assistant", "content": [{"type": "image", "image": picture}]}
    return {"messages": [question, answer], "reward": float(reward)}


def line(folder: str) -> str:
    """Write a picture that no model takes: a line. What a policy draws is never cut off."""
    from PIL import Image

    file = Path(folder, "line.png")
    Image.new("RGB", (400, 1)).save(file)
    return str(file)


def data_uri(picture: str) -> str:
    return "data:image/png;base64," + base64.b64encode(Path(picture).read_bytes()).decode()


def recipe(example: str, url: str, folder: str) -> ModuleType:
    """An example for a framework, `examples/frameworks/NAME.py`, as a module; with this address."""
    code = ROOT.joinpath("examples", "frameworks", f"{example}.py").read_text(encoding="utf-8")
    name = f"recipe_{len(list(Path(folder).iterdir()))}"
    Path(folder, f"{name}.py").write_text(code.replace("http://host:8080", url), encoding="utf-8")
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    return importlib.import_module(name)


def guide(case: Case, word: str) -> str:
    """The first block of the guide that has a word in it; with this address, and what it names in the folder."""
    if not Path("outputs").exists():
        lay_out(case)
    blocks = re.findall(r"```\w+\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    return next(block for block in blocks if word in block).replace("http://host:8080", case.url)


def ran(how: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Rewards to be compared, of blocks of the guide, and what ran to get them."""
    return {"ran": how, "rows": rows}


def lay_out(case: Case) -> None:
    """Put what the guide's blocks name into the working folder, which is the case's own."""
    from PIL import Image

    for name, picture in zip(("cat.jpg", "dog.jpg"), reversed(case.pictures), strict=True):
        Image.open(picture).save(name)
    for name, made in (("outputs/best", case.model), (GUIDES_POLICY, case.policy), ("examples", ROOT / "examples")):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).symlink_to(made)
    Path("rewards.yaml").write_text(guide(case, "# rewards.yaml"), encoding="utf-8")


def many_rewards(case: Case, reward: str, model: str) -> Path:
    """Write the configuration of two rewards: that of a model, which masks what is missing, and brevity."""
    people = {"name": "people", "reward_model": reward, "model_path": model, "on_failure": "mask"}
    brief = {"name": "brief", "reward_model": "format", "pattern": ".{1,12}"}
    rewards = [{**people, "dtype": "float32", "device": "cpu"}, brief]
    file = Path(case.folder, "rewards.yaml")  # JSON is YAML
    file.write_text(
        json.dumps({"rewards": [{**one, "weight": MANY[one["name"]]} for one in rewards]}), encoding="utf-8"
    )
    return file


def gdpo(
    rewards: Mapping[str, Sequence[float]],
    groups: Sequence[Hashable],
    epsilon: float,
    lengths: Sequence[int] | None = None,
    ddof: int = 1,
    weights: Mapping[str, float] = MANY,
) -> Any:
    """The advantages [N] of GDPO (arXiv:2601.05242) of the rewards by name, a missing one as its group's mean.

    Args:
        lengths: of the answers, where the last normalisation is over their tokens.
        ddof: 1 where standard deviations are those of samples, 0 of populations.
    """
    import numpy as np

    total = sum(weights[name] * normalised(values, groups, epsilon, ddof) for name, values in rewards.items())
    tokens = total if lengths is None else np.repeat(total, lengths)
    return (total - tokens.mean()) / (tokens.std(ddof=ddof) + epsilon)


def normalised(values: Sequence[float], groups: Sequence[Hashable], epsilon: float, ddof: int = 1) -> Any:
    """The rewards [N], each less its group's mean, over its group's standard deviation."""
    import numpy as np

    result = np.array(values, dtype=float)
    for group in set(groups):
        own = [at for at, other in enumerate(groups) if other == group]
        present = np.nan_to_num(result[own], nan=np.nanmean(result[own]))
        result[own] = (present - present.mean()) / (present.std(ddof=ddof) + epsilon)
    return result


def on_ranks(function: Callable[[int, Case], Any], case: Case) -> list[Any]:
    """What a function of the driver returns on each of two ranks, with their number; JSON can hold it."""
    import torch.multiprocessing

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(be_rank, (port, function, case), nprocs=RANKS)
    return [json.loads(Path(case.folder, f"rank_{number}.json").read_text()) for number in range(RANKS)]


def be_rank(number: int, port: int, function: Callable[[int, Case], Any], case: Case) -> None:
    import torch.distributed

    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    returned = function(number, case)
    assert torch.distributed.get_world_size() == RANKS, "the ranks have not joined"
    Path(case.folder, f"rank_{number}.json").write_text(json.dumps(returned), encoding="utf-8")
    torch.distributed.destroy_process_group()


def begin_ray() -> None:
    """Begin Ray, which gives its own node 30 s to start, and a busy machine may need more: it is tried again."""
    import ray

    for attempt in range(5):
        try:
            ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
            return
        except Exception as error:
            ray.shutdown()
            if attempt == 4 or "timed out during startup" not in str(error):
                raise


def raised(call: Callable[[], Any], *words: str) -> str:
    """Return what a call is refused with, all of it, which must have these words."""
    try:
        got = call()
    except BaseException as error:
        said = "\n".join(chain(error))  # without source lines, where these words stand themselves
        missing = [word for word in words if word not in said]
        assert not missing, f"its error does not say {missing}: {said[-600:]}"
        # Of our errors the kind that users catch, as their own kinds may be split further.
        kinds = [kind.__name__ for kind in type(error).__mro__]
        ours = type(error).__module__.startswith("vlmrm") and "RewardError" in kinds
        return f"raises {'RewardError' if ours else kinds[0]}"
    raise AssertionError(f"nothing was raised; it gave {got!r:.200}")


def chain(error: BaseException | None) -> list[str]:
    """Return what an error and those behind it say, with their types."""
    if error is None:
        return []
    parts = [one for part in getattr(error, "exceptions", ()) for one in chain(part)]
    return [f"{type(error).__name__}: {error}", *parts, *chain(error.__cause__ or error.__context__)]


def main(checks: Mapping[str, Callable[[Case], Any]]) -> None:
    """Run the checks one after another and write what came of each as soon as it did."""
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    case = Case(**{**given, "pictures": tuple(given["pictures"])})
    report: dict[str, dict[str, Any]] = dict.fromkeys(checks, NOT_DONE)
    for name, check in checks.items():
        try:
            report[name] = {"proved": True, "what": check(case)}
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"  # Ray's says where first, and why last
            report[name] = {"proved": False, "what": said if len(said) < 900 else f"{said[:300]} ... {said[-600:]}"}
            traceback.print_exc()
        written = Path(sys.argv[2] + ".part")
        written.write_text(json.dumps(report), encoding="utf-8")
        written.replace(sys.argv[2])  # whole at all times: the driver may be ended
