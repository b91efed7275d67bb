"""Vision-language models as judges, asked over an OpenAI-compatible API."""

from vlmrm.rewards.judges.client import JudgeClient
from vlmrm.rewards.judges.judge import Judge, Sample, Verdict
from vlmrm.rewards.judges.replies import Reply
from vlmrm.rewards.judges.settings import JudgeSettings

__all__ = ["Judge", "JudgeClient", "JudgeSettings", "Reply", "Sample", "Verdict"]
