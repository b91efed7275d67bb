"""Routers: their loss and figures count a token once for each conversation that holds it; LoRA of experts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from mixtures import CHOICES, EXPERTS, LAYERS, make_tiny_mixture
from transformers import AutoProcessor
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

sys.path.append(str(Path(__file__).parents[1] / "batching"))

from test_shared import CASES, rounding_nowhere

from conversations import read_conversation
from vlmrm.errors import ConfigError
from vlmrm.modeling import batcher_for, load_for_training
from vlmrm.modeling.experts import Routers, balance_loss, find_routers
from vlmrm.rendering import Renderer
