"""The GPU set without a GPU. Each file here runs in a process of its own (.ci/gpu-set): what
pretends to be a device changes torch for all of a process.
"""

from importlib import metadata

import mocked_gpu
import pytest


def pytest_configure(config: pytest.Config) -> None:
    try:
        metadata.version("transformer-engine-cu13")
    except metadata.PackageNotFoundError:
        raise pytest.UsageError("tests/gpu_set is for the gpu set: make check-gpu-set") from None
    mocked_gpu.load_driver()
    # modules of vLLM ask for the device while they are imported
    mocked_gpu.pretend(pytest.MonkeyPatch(), mocked_gpu.H100)
    mocked_gpu.vllm_platform()
