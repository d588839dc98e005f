"""Every case of `tests/rewards/verdict_cases.py` under math-verify, whose parser takes a minute for
them.
"""

import pytest
from test_verifiers import differing


@pytest.mark.fault("a release of math-verify judges otherwise", "the cases that differ are listed")
def test_all_verdicts_are_the_library_s() -> None:
    assert differing("math_verify", every=1) == []
