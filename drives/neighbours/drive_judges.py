"""Judges' own programs, unmodified but for their empty prompts, paths and addresses, and ours by a request_file.

Both ask a server that keeps what it is sent; all bodies must be equal byte for byte. The file is what `vlmrm rewards
record` writes. NEIGHBOUR_PATH has copies of the programs.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from checks import Case, main
from PIL import Image

from vlmrm.rewards import RewardArguments, reward_model_class
from vlmrm.rewards.originals import record

SAMPLES = 200
SIZE = (512, 512)
BATCH = 20
PASSES = 4  # of EditScore
ALPHABETS = (
    "abc XYZ",
    "äßñéø",
    "щюЯж",
    "日本語「」",
    "مرحبا",
    "'\"{}[]\\/<>&",
    "\t\n\x01\x1f\u2028",
    "🙂𝔘",
    "{image}{prompt}",
)
PAIR = ("first", "second")
# A reply that all of them can read: scores of every form, a winner, and a first token.
REPLY = """Final Score: 4
Alignment Score (1-5): 3
Coherence Score (1-5): 4
Style Score (1-5): 2
# Detailed Judgement
1. Text Faithfulness:
## Score: 3.0
2. Image Faithfulness:
## Score: 2.5
3. Physical and Visual Quality:
## Score: 3.5
4. Text Rendering:
## Score: N/A
# Summary: good
{"reasoning": "good", "score": [20, 15]}
Image 1 is better"""


@dataclass(frozen=True)
class Sample:
    """A prompt with pictures by the names that places of a request_file have."""

    prompt: str
    pictures: Mapping[str, Image.Image]

    @property
    def swapped(self) -> Sample:
        """The same pair in the other order."""
        return Sample(
            self.prompt,
            {**self.pictures, "first": self.pictures["second"], "second": self.pictures["first"]},
        )


Send = Callable[[Sequence[Sample], str], Any]


@dataclass(frozen=True)
class Program:
    """A judge's program: what sends its requests to an address, and the reward that they are for."""

    copy: str
    send: Send
    reward: str


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256  # a program may begin all its requests at once


class Recorder:
    """A server of chat completions that keeps the bodies of its requests."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        keep = self.bodies.append

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                keep(self.rfile.read(int(self.headers["Content-Length"])))
                likely = [{"token": token, "logprob": -1.0, "bytes": None} for token in ("Yes", "No")]
                choice = {
                    "index": 0,
                    "finish_reason": "stop",
                    "message": {"role": "assistant", "content": REPLY},
                    "logprobs": {"content": [{**likely[0], "top_logprobs": likely}]},
                }
                usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
                said = {"id": "1", "object": "chat.completion", "created": 0, "model": "judge", "usage": usage}
                answer = json.dumps({**said, "choices": [choice]}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def taken(self, ask: Callable[[], Any]) -> list[bytes]:
        """Return what a call sent."""
        self.bodies.clear()
        ask()
        return list(self.bodies)


def samples() -> list[Sample]:
    """Prompts in many scripts, with what could be mistaken for syntax; pictures of random sizes."""
    draw = random.Random(0)
    return [sample(draw) for _ in range(SAMPLES)]


def sample(draw: random.Random) -> Sample:
    prompt = "".join(draw.choice(draw.choice(ALPHABETS)) for _ in range(draw.randint(1, 60)))
    pictures = {}
    for name in ("source", "image", *PAIR):
        size = (draw.randint(8, 48), draw.randint(8, 48))
        pictures[name] = Image.frombytes("RGB", size, draw.randbytes(3 * size[0] * size[1]))
    return Sample(prompt + draw.choice(("", "{prompt}", "{image}")), pictures)


def copy(name: str) -> Path:
    folder = Path(os.environ.get("NEIGHBOUR_PATH", "neighbours"), name).resolve()
    assert folder.is_dir(), f"there is no copy of {name}"
    return folder


def commit(folder: Path) -> str:
    command = ["git", "-C", folder, "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@contextmanager
def importing(folder: Path, *packages: str) -> Iterator[None]:
    """Import from a folder, and forget its packages after: others have the same names."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
            del sys.modules[name]


# What the programs send ---------------------------------------------------------------------------------------------


def script(file: str, root: str, prompt: str, *paths: str) -> Callable[[Sequence[str]], Send]:
    """A program of UnifiedReward: a script into which a prompt and paths are written, in place of its empty ones."""

    def of(shows: Sequence[str]) -> Send:
        program = copy("UnifiedReward") / file
        code = program.read_text(encoding="utf-8")
        assert not prompt or code.count(prompt) == 1, f"{program} has not one {prompt}"

        def send(given: Sequence[Sample], url: str) -> None:
            with importing(copy("UnifiedReward") / root, "vllm_qwen"):
                for sample in given:
                    text = code.replace("http://localhost:8080", url)
                    for name, path in zip(shows, paths, strict=True):
                        picture = Path(f"{name}.png").resolve()
                        sample.pictures[name].save(picture)
                        text = written(text, path, str(picture))
                    text = written(text, prompt, sample.prompt) if prompt else text
                    exec(compile(text, str(program), "exec"), {"__name__": "__main__"})

        return send

    return of


def written(code: str, place: str, value: str) -> str:
    """Return a program with a value in place of the text of an assignment or a call."""
    assert place in code, f"the program has no {place}"
    filled = re.sub(r"\'[^\']*\'|\"[^\"]*\"", lambda _: repr(value), place)
    return code.replace(place, filled, 1)


def flow_factory(name: str, class_name: str) -> Send:
    def send(given: Sequence[Sample], url: str) -> None:
        with importing(copy("Flow-Factory") / "src", "flow_factory"):
            from accelerate import Accelerator
            from flow_factory.hparams import RewardArguments as Theirs

            module = importlib.import_module(f"flow_factory.rewards.{name}")
        settings = {"api_base_url": f"{url}/v1"}
        config = Theirs(name="it", reward_model=name, dtype="float32", device="cpu", extra_kwargs=settings)
        judge = getattr(module, class_name)(config, Accelerator(cpu=True))
        columns = {"image": [one.pictures["image"] for one in given]}
        columns["condition_images"] = [[one.pictures["source"]] for one in given]
        judge([one.prompt for one in given], **columns)

    return send


def unified_reward_1(given: Sequence[Sample], url: str) -> None:
    """The scorer of UnifiedReward 1 in RationalRewards' Flow-GRPO, which makes all pictures 512 x 512."""
    with importing(copy("RationalRewards") / "diffusion_rl_training", "flow_grpo"):
        rewards = importlib.import_module("flow_grpo.rewards")
    os.environ["UNIFIEDREWARD_BASE_URL"] = f"{url}/v1"
    for start in range(0, len(given), BATCH):  # it begins all requests of a batch at once
        batch = given[start : start + BATCH]
        score = rewards.unifiedreward_score_sglang("cpu")
        score([np.asarray(one.pictures["image"]) for one in batch], [one.prompt for one in batch], {})


def edit_score(case: Case) -> str:
    """The class EditScore over an API asks two questions: of the edit, and of the edited image alone."""
    recorder, given = Recorder(), samples()
    with importing(copy("EditScore"), "editscore"):
        judge = importlib.import_module("editscore").EditScore(
            backbone="openai",
            openai_url=f"{recorder.url}/v1/chat/completions",
            key="none",
            model_name_or_path="EditScore",
            num_pass=PASSES,
        )

    def ask(prompt: str, one: Sample) -> None:
        judge.evaluate([one.pictures["source"], one.pictures["image"]], prompt)

    files = recorded("edit_score", "EditScore")
    theirs = recorder.taken(lambda: [ask(one.prompt, one) for one in given])
    sent = recorder.taken(lambda: ours("edit_score", given, recorder.url, replies=PASSES, **files))
    return verdict(theirs, sent, 2 * PASSES * len(given), commit(copy("EditScore")))


ACS = "inference_qwen/UnifiedReward-2.0-inference"
THINK = "UnifiedReward-Think"
EDIT = "_encode_image('/path/to/image')"
TWO = ("image_path_1 = '/path/to/image1'", "image_path_2 = '/path/to/image2'")


def unified(file: str, shows: Sequence[str], prompt: str, *paths: str, root: str = ".") -> Program:
    reward = "pairwise_judge" if "second" in shows else "unified_reward"
    return Program("UnifiedReward", script(file, root, prompt, *paths)(shows), reward)


PROGRAMS: dict[str, Callable[[], Program]] = {
    "vllm_evaluate": lambda: Program(
        "Flow-Factory", flow_factory("vllm_evaluate", "VLMEvaluateRewardModel"), "vllm_evaluate"
    ),
    "rational_rewards_t2i": lambda: Program(
        "Flow-Factory",
        flow_factory("rational_rewards_t2i", "RationalRewardsT2IRewardModel"),
        "rational_rewards_t2i",
    ),
    "rational_rewards_edit": lambda: Program(
        "Flow-Factory",
        flow_factory("rational_rewards_edit", "RationalRewardsEditRewardModel"),
        "rational_rewards_edit",
    ),
    "unified_reward_1": lambda: Program("RationalRewards", unified_reward_1, "unified_reward"),
    "unified_reward_2": lambda: unified(
        f"{ACS}/point_score_ACS_image_generation.py", ("image",), "prompt = ''", "image_path = ''"
    ),
    "unified_reward_2_pairs": lambda: unified(
        f"{ACS}/pair_score_image_generation.py", PAIR, "prompt = ''", "image_path1 = ''", "image_path2 = ''"
    ),
    "unified_reward_think": lambda: unified(
        f"{THINK}/inference_qwen/UnifiedReward-Think-qwen3-inference/qwen3_infer_cot_image_generation.py",
        PAIR,
        'prompt = ""',
        *TWO,
        root=THINK,
    ),
    "unified_reward_flex": lambda: unified(
        "UnifiedReward-Flex/flex_pair_rank_image_generation.py", PAIR, 'prompt = ""', *TWO
    ),
    "unified_reward_edit_instruction": lambda: unified(
        "UnifiedReward-Edit/edit_pointwise_instruction_following.py",
        ("source", "image"),
        "instruction = ''",
        EDIT,
        EDIT,
    ),
    "unified_reward_edit_quality": lambda: unified(
        "UnifiedReward-Edit/edit_pointwise_quality.py", ("image",), "", EDIT
    ),
    "unified_reward_edit_rank": lambda: unified(
        "UnifiedReward-Edit/edit_pairwise_rank.py", ("source", *PAIR), "instruction = ''", EDIT, EDIT, EDIT
    ),
    "unified_reward_edit_pair_score": lambda: unified(
        "UnifiedReward-Edit/edit_paiwise_score.py", ("source", *PAIR), "instruction = ''", EDIT, EDIT, EDIT
    ),
}

# What ours sends ----------------------------------------------------------------------------------------------------


def ours(reward: str, given: Sequence[Sample], url: str, **settings: Any) -> None:
    """Ask our reward about the samples: a pair is a group of two."""
    settings |= {"api_base_url": f"{url}/v1", "malformed_retries": 0}
    judge = reward_model_class(reward)(RewardArguments("it", reward, device="cpu", extra_kwargs=settings), None)
    if reward == "pairwise_judge":
        for one in given:
            pictures = [one.pictures[name] for name in PAIR]
            judge(prompt=2 * [one.prompt], image=pictures, condition_images=2 * [[one.pictures["source"]]])
        return
    judge(
        prompt=[one.prompt for one in given],
        image=[one.pictures["image"] for one in given],
        condition_images=[[one.pictures["source"]] for one in given],
    )


def recorded(name: str, project: str) -> dict[str, str]:
    """Return the files that `vlmrm rewards record` makes of a program, by setting."""
    folder = Path("recorded", name).resolve()
    return {setting: str(path) for setting, path in record(name, copy(project), folder)[1].items()}


def compared(name: str, program: Program, given: list[Sample], recorder: Recorder) -> str:
    """Return how many of a program's requests are ours too."""
    pairs = program.reward == "pairwise_judge"
    files = recorded(name, program.copy)
    orders = [given, [one.swapped for one in given]] if pairs else [given]
    theirs = [
        body for order in orders for body in recorder.taken(lambda order=order: program.send(order, recorder.url))
    ]
    sent = recorder.taken(lambda: ours(program.reward, given, recorder.url, **files))
    return verdict(theirs, sent, len(orders) * len(given), commit(copy(program.copy)))


def verdict(theirs: Sequence[bytes], sent: Sequence[bytes], count: int, version: str) -> str:
    assert len(theirs) == count, f"the program sent {len(theirs):,} requests for {count:,}"
    same = (Counter(theirs) & Counter(sent)).total()
    said = f"{version}: {same:,} of {count:,}"
    assert same == len(sent) == count, f"{said} are equal, {len(sent):,} were sent"
    return said


def checked(name: str) -> Callable[[Case], str]:
    def check(case: Case) -> str:
        program = PROGRAMS[name]()
        given = samples()
        if name == "unified_reward_1":  # it makes them that size, which leaves them as they are
            given = [
                Sample(one.prompt, {**one.pictures, "image": one.pictures["image"].resize(SIZE)}) for one in given
            ]
        return compared(name, program, given, Recorder())

    return check


if __name__ == "__main__":
    main({name: checked(name) for name in PROGRAMS} | {"edit_score": edit_score})
