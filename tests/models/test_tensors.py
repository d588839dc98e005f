"""Bytes and names of dtypes."""

import pytest
import torch

from megatron_rl.models.tensors import DTYPES, TensorSpec, torch_dtype


@pytest.mark.parametrize("name", DTYPES)
def test_bytes_are_torch_s(name: str) -> None:
    tensor = torch.zeros(3, 5, dtype=torch_dtype(name))
    spec = TensorSpec.of("x", tensor)
    assert spec == TensorSpec("x", name, (3, 5))
    assert spec.nbytes == tensor.nbytes


def test_names_beyond_the_table_are_no_dtypes() -> None:
    with pytest.raises(ValueError, match="'nn'"):
        torch_dtype("nn")
