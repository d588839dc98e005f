"""Outliers in the activations leave the function as it was, by transformers' model."""

from pathlib import Path

import torch
from outliers import with_outliers
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_rl.data.toy import write_toy
from megatron_rl.models.hf_folder import HfFolder


def test_the_function_is_the_same_and_its_activations_are_not(tmp_path: Path) -> None:
    write_toy(tmp_path)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(tmp_path / "model")
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path / "plain")
    with_outliers(tmp_path / "plain", tmp_path / "outliers", 64, 2)
    assert set(HfFolder(tmp_path / "outliers").names) == set(HfFolder(tmp_path / "plain").names)

    tokens = torch.randint(2, config.vocab_size, (4, 20))
    seen = []
    logits = []
    for name in ("plain", "outliers"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        hook = model.model.layers[0].mlp.up_proj.register_forward_pre_hook(
            lambda _, x: seen.append(x[0])
        )
        logits.append(model(tokens).logits.detach())
        hook.remove()
    assert torch.equal(*logits)
    plain, outliers = (x.abs().amax((0, 1)) for x in seen)
    assert (outliers / plain).unique().tolist() == [1, 64]
    assert int((outliers != plain).sum()) == 2
