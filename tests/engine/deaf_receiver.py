"""A worker extension for tests alone: one engine, the first that finds the file DEAF, answers nobody from then on.

Its answer to the next question cannot be written to a message, which ends the thread of vLLM that sends answers.
"""

import os
from pathlib import Path
from typing import Any

from megatron_rl.engine.receiver import WorkerExtension

MARKER = "MEGATRON_RL_TESTS_DEAF"


class DeafExtension(WorkerExtension):
    def weight_update_building(self) -> Any:
        try:
            Path(os.environ[MARKER]).unlink()
        except FileNotFoundError:
            return super().weight_update_building()
        return type(self)
