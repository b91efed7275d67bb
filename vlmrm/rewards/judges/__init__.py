"""Vision-language models as judges, over an OpenAI-compatible API."""

from vlmrm.rewards.contract import Verdict
from vlmrm.rewards.judges.client import JudgeClient, JudgeSettings
from vlmrm.rewards.judges.judge import Judge, JudgeSample
from vlmrm.rewards.judges.replies import Reply

__all__ = ["Judge", "JudgeClient", "JudgeSettings", "Reply", "JudgeSample", "Verdict"]
