"""A worker extension for tests alone: one engine, the first that finds the file DEAF, answers nobody from then on.

The thread that owns the engine never comes back from the next question; the others of its process go on.
"""

import os
import threading
from pathlib import Path

from megatron_rl.engine.receiver import WorkerExtension

MARKER = "MEGATRON_RL_TESTS_DEAF"


class DeafExtension(WorkerExtension):
    def weight_update_building(self) -> bool:
        try:
            Path(os.environ[MARKER]).unlink()
        except FileNotFoundError:
            return super().weight_update_building()
        threading.Event().wait()
        return False
