"""One live engine per format and test module."""

from collections.abc import Iterator

import pytest
from tiny_engine import Live, start_live

from megatron_rl.config.schema import Format


@pytest.fixture(scope="module")
def live_bf16(tmp_path_factory) -> Iterator[Live]:
    yield from start_live(tmp_path_factory.mktemp("live"), Format.none, tied=True)


@pytest.fixture(scope="module")
def live_int8(tmp_path_factory) -> Iterator[Live]:
    yield from start_live(tmp_path_factory.mktemp("live"), Format.int8, tied=True)


@pytest.fixture(scope="module")
def live_fp8(tmp_path_factory) -> Iterator[Live]:
    yield from start_live(tmp_path_factory.mktemp("live"), Format.fp8, tied=False)
