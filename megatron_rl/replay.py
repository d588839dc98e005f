"""`python -m megatron_rl.replay`: see `runs/replay.py`."""

import sys

from megatron_rl.runs.replay import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
