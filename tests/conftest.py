"""Before anything loads torch: threads that wait let others run, so that the tests bear a busy machine."""

import os

from megatron_rl.device import SHORT_SPIN

for name, value in SHORT_SPIN.items():
    os.environ.setdefault(name, value)
