"""The floors of tools/bench/step.py against torch's count in transformers' model."""

import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

sys.path.append(str(Path(__file__).parents[2] / "tools" / "bench"))
import step


def test_products_of_a_forward_pass(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    work = step.SHAPES["toy"]
    model = AutoModelForCausalLM.from_pretrained(step.write_model(tmp_path, work))
    tokens = torch.zeros(work.answers, work.prompt_tokens + work.response_tokens, dtype=torch.int64)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(tokens, logits_to_keep=work.response_tokens)
    counts = counter.get_flop_counts()["Global"]
    products = sum(count for kind, count in counts.items() if kind is torch.ops.aten.mm)
    machine = step.Machine(bf16=1e9, int8=1e30, copy=1e6)
    floors = step.floors(work, machine, sent_bytes=2e6)
    assert floors["prox"] == pytest.approx(products / 1e9)
    assert floors["update"] == pytest.approx(3 * products / 1e9)
    assert floors["sync"] == 2.0
    head = 2 * work.head_weights * work.responses / 1e9  # INT8 costs nothing there
    assert floors["rollout"] == pytest.approx(head)
