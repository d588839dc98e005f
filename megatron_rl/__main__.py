"""`python -m megatron_rl`: the command line, where the script `megatron-rl` is not on the path."""

from megatron_rl.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
