"""Benchmarks: each compares this project with a plain way of doing the same, measured side by side in one run.

`python -m benchmarks` runs all of them and `python -m benchmarks.NAME` one; both take `--json` and `--quick`.
"""

BENCHMARKS = {
    "train_step": "forward and backward of one training step, against one row for each conversation",
    "vision": "operations and host waits of the vision tower in training, against transformers' own",
    "scoring": "forward alone: many candidates for one prompt, and pairs",
    "rewards": "a group's candidates at once, several judges, and what a reward set adds",
    "faults": "advantages of TRL's GRPO while rewards fail, and the wait for what is down",
    "frames": "labelled frames collected, classifiers of them trained and used",
    "serving": "the reward service: its throughput, its latency, and groups of candidates",
    "outputs": "ratings, criteria, steps and progress learned from procedural pictures whose reward is known",
    "sweep": "several checkpoints over one data set, against their forward passes alone",
    "evaluation": "pairs with all interventions, against without; the report of 100,000 pairs",
    "epoch": "a training with its loader, against its steps alone",
    "plan": "the time that vlmrm plan says, against that of the training",
    "scale": "time to the first step and memory, from a thousand rows to a million",
    "gpu": "kernels, steps, scoring and serving at real model sizes on a CUDA GPU",
    "flickr8k": "training and measuring on real photos and real judgements",
}
