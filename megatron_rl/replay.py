"""`python -m megatron_rl.replay RUN ...` is `megatron-rl replay RUN ...`."""

import sys
from argparse import ArgumentParser

from megatron_rl.cli import execute
from megatron_rl.commands.replay import replay_arguments

if __name__ == "__main__":
    parser = ArgumentParser(prog="python -m megatron_rl.replay")
    replay_arguments(parser)
    sys.exit(execute(parser))
