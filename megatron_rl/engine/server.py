"""One vLLM server of the fleet: `python -m megatron_rl.engine.server PARENT_PID CORES VLLM_ARGUMENTS`.

Runs what `python -m vllm.entrypoints.openai.api_server` runs, behind a key, with strangers kept few
(server_access.py) and requests checked (server_requests.py). This module, and not vLLM's, is the main module,
because vLLM's engine process imports its parent's main module again, and this one is seconds lighter.

The server and its engine live exactly as long as the parent: the kernel ends the server when the parent dies, and
the end of standard input ends the whole group. CORES, such as `0,1`, confines both to a share of the machine; `all`
does not.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading

from megatron_rl.processes.process import collect_rarely, die_with_parent, end_own_group, keep_to, leave_to_the_driver
from megatron_rl.processes.stacks import show_on_request

# the last one is asked first
MIDDLEWARE = ("megatron_rl.engine.server_requests.CheckRequests", "megatron_rl.engine.server_access.RequireKey")

if __name__ in ("__main__", "__mp_main__"):  # the server, or vLLM's engine process, which imports this module first
    collect_rarely()


def end_with_input() -> None:
    while os.read(0, 1024):
        pass
    end_own_group()


def main() -> None:
    parent, cores = int(sys.argv.pop(1)), sys.argv.pop(1)
    # until vLLM has handlers of its own, which end the engine in good order
    signal.signal(signal.SIGTERM, lambda *_: end_own_group())
    die_with_parent(parent, by=signal.SIGTERM)
    leave_to_the_driver()
    show_on_request()
    threading.Thread(target=end_with_input, daemon=True).start()
    keep_to(cores)
    serve()


def serve() -> None:
    """What vLLM's `main` does, with our connections."""
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from megatron_rl.engine.server_access import Connection

    cli_env_setup()
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args()
    configure_logging_from_args(arguments)
    validate_parsed_serve_args(arguments)
    arguments.middleware = [*arguments.middleware, *MIDDLEWARE]
    logging.getLogger("vllm.entrypoints.launchers.launcher").setLevel(logging.WARNING)  # it lists 60 routes
    uvloop.run(run_server(arguments, http=Connection))


if __name__ == "__main__":
    main()
