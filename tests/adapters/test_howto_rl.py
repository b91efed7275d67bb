"""Every program, command and configuration of the guide to RL runs, as its framework runs it."""

from __future__ import annotations

import asyncio
import functools
import re
import subprocess
import sys
from types import SimpleNamespace

import pandas as pd
import pytest
import yaml
from PIL import Image

from tests.adapters.frameworks import RewardManagerBase, import_file, install
from tests.runs import ROOT
from vlmrm.rewards import RewardSet
from vlmrm.scoring import load_scorer

PAGE = (ROOT / "docs/howto/rl.md").read_text()
ADDRESS = "http://host:8080"
POLICY = "Qwen/Qwen2.5-VL-3B-Instruct"
QUESTION, ANSWERS = "What is this?", ["A cat.", "A dog."]


def block(language: str, word: str) -> str:
    """The block of the page that has a word in it."""
    blocks = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
    [found] = [text for kind, text in blocks if kind == language and word in text]
    return found


@pytest.fixture
def here(tmp_path, tiny_reward_model, monkeypatch):
    """A folder with pictures, the checkpoint and the configuration of the page."""
    for name, colour in (("cat.jpg", "orange"), ("dog.jpg", "brown")):
        Image.new("RGB", (84, 56), colour).save(tmp_path / name)
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs/best").symlink_to(tiny_reward_model)
    (tmp_path / "rewards.yaml").write_text(block("yaml", "# rewards.yaml"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def expected(here):
    asked = [{"type": "image", "image": "cat.jpg"}, {"type": "text", "text": QUESTION}]
    prompt = [{"role": "user", "content": asked}]
    return pytest.approx(load_scorer("outputs/best").score_groups([(prompt, ANSWERS)])[0], abs=1e-5)


def overrides(text: str) -> dict[str, str]:
    return dict(line.lstrip("+").split("=", 1) for line in text.splitlines())


def test_trl_trains(here, tiny_checkpoint, monkeypatch):
    import trl

    short = {"max_steps": 1, "max_completion_length": 2, "use_cpu": True, "bf16": False, "report_to": "none"}
    config = functools.partial(trl.GRPOConfig, **short, save_strategy="no", disable_tqdm=True, logging_steps=1)
    monkeypatch.setattr(trl, "GRPOConfig", config)
    namespace: dict = {}
    exec(block("python", "GRPOTrainer(").replace(POLICY, str(tiny_checkpoint)), namespace)
    [*_, log] = [line for line in namespace["trainer"].state.log_history if "rewards/people/mean" in line]
    assert log["rm/people/missing"] == 0.0


def test_a_set_is_one_function_of_trl(here, expected):
    namespace: dict = {}
    exec(block("python", "TRLRewardSet("), namespace)
    prompts = [
        [{"role": "user", "content": [{"type": "image", "image": "cat.jpg"}, {"type": "text", "text": QUESTION}]}]
    ]
    assert namespace["rewards"](prompts * 8, ANSWERS * 4)[:2] == expected, "nothing is repeated in them"


def test_ms_swift_s_plugin_registers_its_rewards(here, expected, monkeypatch):
    orms: dict = {}
    install(monkeypatch, "swift.rewards", orms=orms)
    (here / "plugin.py").write_text(block("python", "orms["))
    import_file(here / "plugin.py", "_swift_external_0")
    turns = [{"role": "user", "content": f"<image>{QUESTION}"}]
    messages = [[*turns, {"role": "assistant", "content": text}] for text in ANSWERS]
    columns = {"messages": messages, "images": [[{"path": "cat.jpg", "bytes": None}]] * 2, "prompt_id": ["0"] * 2}
    rewards = {name: orm(args=None)(ANSWERS, **columns) for name, orm in orms.items()}
    assert rewards["people"] == rewards["set_people"] == expected
    assert rewards["set_repeats"] == [0.0, 0.0]


def test_verl_s_functions_get_what_the_data_holds(here, expected):
    exec(block("python", "to_parquet"), {})
    [row] = pd.read_parquet("rows.parquet").to_dict("records")
    for word in ("reward_kwargs.model=http://host:8080\n```\n\nverl", "compute_rewards"):
        [text] = [text for text in re.findall(r"```text\n(.*?```.{0,8})", PAGE, re.DOTALL) if word in text]
        given = overrides(text.split("```")[0].strip())
        prefix = "reward.custom_reward_function"
        module = __import__(given[f"{prefix}.path"].removeprefix("pkg://"), fromlist=["_"])
        function = getattr(module, given.get(f"{prefix}.name", "compute_score"))
        kwargs = {key.split("reward_kwargs.")[1]: value for key, value in given.items() if "reward_kwargs" in key}
        kwargs = {key: value.replace(ADDRESS, "outputs/best") for key, value in kwargs.items()}

        async def both(function=function, kwargs=kwargs):
            common = {"data_source": row["data_source"], "extra_info": row["extra_info"], **kwargs}
            return await asyncio.gather(*(function(solution_str=text, **common) for text in ANSWERS))

        assert [result["score"] for result in asyncio.run(both())] == expected


def test_verl_s_manager_is_found(here, monkeypatch):
    given = overrides(block("text", "VlmrmRewardManager").strip())
    install(monkeypatch, "verl.experimental.reward_loop.reward_manager.base", RewardManagerBase=RewardManagerBase)
    path = ROOT / f"{given['reward.reward_manager.module.path'].removeprefix('pkg://').replace('.', '/')}.py"
    manager = getattr(import_file(path, "verl_manager_of_the_page"), given["reward.reward_manager.name"])
    kwargs = {"model": given["reward.custom_reward_function.reward_kwargs.model"]}
    config = SimpleNamespace(reward=SimpleNamespace(custom_reward_function=SimpleNamespace(reward_kwargs=kwargs)))

    async def made():
        return manager(config, None, None)

    assert asyncio.run(made()).rewards[0].model_path == ADDRESS


def test_verl_s_lines_add_only_what_its_configuration_lacks():
    """hydra refuses a `+` before a key that is there, as all of verl's are but the keywords of one's own function."""
    lines = re.findall(r"^\+?reward\..*=", PAGE, re.MULTILINE)
    assert lines and all(line.startswith("+") == (".reward_kwargs." in line) for line in lines)


def test_openrlhf_s_file_is_imported_without_what_its_environment_lacks():
    [path] = re.findall(r"remote_url (\S+)", block("text", "openrlhf.cli"))
    without = "import sys; sys.modules['vlmrm.modeling'] = None; sys.argv[0] = 'openrlhf'\n"
    code = f"{without}import runpy; assert runpy.run_path({str(ROOT / path)!r})['reward_func']"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_flow_factory_s_configuration_scores(here):
    config = yaml.safe_load(block("yaml", "flow_factory_reward"))
    scored = RewardSet(config["rewards"])(prompt=["A cat"], image=["cat.jpg"])
    picture = [{"role": "assistant", "content": [{"type": "image", "image": "cat.jpg"}]}]
    [[score]] = load_scorer("outputs/best").score_groups([("A cat", [picture])])
    assert scored.rewards["people"].tolist() == pytest.approx([score], abs=1e-5)


def test_the_loop_of_one_s_own(here, expected):
    namespace: dict = {}
    exec(block("python", "scored.metrics()"), namespace)
    assert namespace["scored"].rewards["people"].tolist() == expected
    metrics = namespace["scored"].metrics()
    for name in re.findall(r"^- `rewards/(?:NAME/)?(\w+)`", PAGE, re.MULTILINE):
        if name != "held_out":  # of a reward of weight 0
            assert f"rewards/people/{name}" in metrics
