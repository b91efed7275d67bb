"""The examples of the adapters run as they are, and TRL's own trainers take the adapters."""

from __future__ import annotations

import sys

import pytest
import trl
from PIL import Image

from tests.adapters.frameworks import import_file
from tests.runs import ROOT
from vlmrm.adapters.trl_reward import TRLReward, TRLRewardSet
from vlmrm.scoring import load_scorer

EXAMPLES = ROOT / "examples"


def printed(name: str, monkeypatch, capsys, *words: str) -> list[str]:
    module = import_file(EXAMPLES / name, "example")
    monkeypatch.setattr(sys, "argv", [name, *words])
    module.main()
    # DeepSpeed, where it is installed, prints a line when it is first imported.
    return [line for line in capsys.readouterr().out.splitlines() if "real_accelerator" not in line]


@pytest.mark.parametrize(
    "name", ["plain_reward.py", "swift_plugin.py", "verl_reward.py", "openrlhf_reward.py", "flow_factory_reward.py"]
)
def test_every_framework_gets_the_scorer_s_number(name, monkeypatch, capsys, tiny_reward_model):
    monkeypatch.setenv("VLMRM_REWARD_MODEL", str(tiny_reward_model))
    takes_words = name not in ("swift_plugin.py", "openrlhf_reward.py")
    lines = printed(name, monkeypatch, capsys, *(("--model", str(tiny_reward_model)) if takes_words else ()))
    red = {"type": "image", "image": Image.new("RGB", (112, 112), "red")}
    if name == "flow_factory_reward.py":
        conversation = [{"role": "user", "content": "a red square"}, {"role": "assistant", "content": [red]}]
    else:
        question = [red, {"type": "text", "text": "Which colour is this?"}]
        conversation = [{"role": "user", "content": question}, {"role": "assistant", "content": "It is red."}]
    [expected] = load_scorer(tiny_reward_model, device="cpu").score([conversation])
    assert float(lines[0].split()[0]) == pytest.approx(expected, abs=2e-4)
    assert len({line.split()[0] for line in lines}) == len(lines)


def test_grpo_raises_the_mean_reward(tmp_path, tiny_checkpoint):
    example = import_file(EXAMPLES / "trl_grpo.py", "trl_grpo")
    model = example.make_tiny_reward_model(tmp_path / "model", seed=1)
    rewards = example.train(
        str(tiny_checkpoint), str(model), output_dir=str(tmp_path / "out"), max_steps=60, **example.TINY
    )
    assert len(rewards) == 60
    first, last = sum(rewards[:10]) / 10, sum(rewards[-10:]) / 10
    assert last > first + 0.03  # with five seeds it rose by 0.06 to 0.11; a step's mean is uncertain by 0.01


class Recorder(TRLReward):
    calls: list

    def __call__(self, prompts, completions, **columns):
        scores = super().__call__(prompts, completions, **columns)
        self.calls = [*getattr(self, "calls", []), (prompts, completions, columns, scores)]
        return scores


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_trl_trainers_score_images_and_log_rewards(tmp_path, tiny_checkpoint, tiny_reward_model, name):
    example, load = import_file(EXAMPLES / "trl_grpo.py", "trl_grpo"), {"device": "cpu", "dtype": "float32"}
    short = {"per_device_train_batch_size": 4, "num_generations": 2, "max_steps": 2, "save_strategy": "no"}
    quiet = {"logging_steps": 1, "report_to": "none", "disable_tqdm": True}
    args = getattr(trl, f"{name}Config")(output_dir=str(tmp_path), **{**example.TINY, **short, **quiet})
    config = {"name": "raw", "reward_model": "vlm_reward", "model_path": str(tiny_reward_model), **load}
    recorder = Recorder(tiny_reward_model, name="one", **load)
    several = [TRLReward(tiny_reward_model, name="two", **load), TRLRewardSet(config, 2, name="three")]

    trainer = getattr(trl, f"{name}Trainer")(
        str(tiny_checkpoint), args=args, reward_funcs=[recorder, *several], train_dataset=example.questions()
    )
    trainer.train()

    logged = trainer.state.log_history[0]
    means = [logged[f"rewards/{one}/mean"] for one in ("one", "two", "three")]
    assert means == pytest.approx([means[0]] * 3, abs=1e-4)
    assert logged["rm/one/missing"] == 0 and "rm/raw/mean" in logged
    _, completions, columns, scores = recorder.calls[0]
    written = []
    for image, [answer] in zip(columns["image"], completions, strict=True):
        shown = [{"type": "image", "image": image}, {"type": "text", "text": "Which colour is this?"}]
        written.append([{"role": "user", "content": shown}, answer])
    assert (
        scores == pytest.approx(load_scorer(tiny_reward_model, **load).score(written), abs=1e-4) and len(scores) == 4
    )
