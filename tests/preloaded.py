"""Python processes that start with their imports done: forks of a parent that has imported vLLM or
megatron.

A fresh engine spends 14 seconds of a core on imports and one on everything else. The session owns
one parent of each kind, for all of its workers; a parent imports at its first request, makes no
thread pool and no process group, and only ever forks. Each fork runs a program as `python` would,
with its own arguments, environment and streams, and ends with the process that requested it. Tests
of the start itself, and of the command line, start real interpreters instead.

`python preloaded.py KIND SOCKET_FD` is a parent.
"""

import atexit
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest import mock

import megatron_rl.processes.process
from megatron_rl.processes.process import SHORT_SPIN, die_with_parent, rare_collections
from megatron_rl.sampler.client import engine_process
from megatron_rl.sampler.client.engine_process import engine_environment
from megatron_rl.supervision import launch

VARIABLE = "MEGATRON_RL_TESTS_PRELOADED"  # the folder of the parents' sockets
FAMILY = socket.AF_UNIX, socket.SOCK_SEQPACKET  # each message arrives as a whole
LONGEST = 1 << 18  # bytes of a message
QUANTIZATIONS = (
    "compressed_tensors.compressed_tensors",
    "quark.quark",
    "inc",
    "online.base",
    "auto_gptq",
    "modelopt",
)
MODULES = {
    "torch": (
        "torch.distributed",
        "megatron_rl.weight_sync.push",
        "megatron_rl.apps.conversion.quantized",
    ),
    "megatron": (
        "megatron_rl.learner.modules.cpu",
        "megatron_rl.train",
        "megatron_rl.learner.learner",
    ),
    "vllm": (
        "vllm.entrypoints.llm",
        "vllm.entrypoints.openai.models.protocol",
        "vllm.distributed.elastic_ep.elastic_execute",
        "vllm.v1.worker.cpu_worker",
        "vllm.v1.core.sched.scheduler",
        "vllm.model_executor.models.qwen3",
        "vllm.model_executor.models.qwen3_moe",
        "vllm.model_executor.models.mixtral",
        # these it asks for, or compiles with, when it makes an engine
        *(f"vllm.model_executor.layers.quantization.{name}" for name in QUANTIZATIONS),
        "torch._inductor.compile_fx",
        "torch._inductor.codegen.cpp_wrapper_gpu",
        "torch._inductor.codegen.cuda_combined_scheduling",
        "torch._higher_order_ops.passes.inline_invoke_subgraph",
        "torch.distributed.tensor.experimental._attention",
        "sympy.tensor.tensor",
        "megatron_rl.engine.child",
        "megatron_rl.engine.receiver",
    ),
}
# modules that this project starts by `python -m`, and the parent that has imported what they need
STARTED = {"megatron_rl.rank": "megatron", "megatron_rl.engine.child": "vllm"}


class Process:
    """A fork of a parent, with as much of subprocess.Popen's surface as the tests and the package
    use.
    """

    def __init__(
        self,
        kind: str,
        args: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdin: int | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = False,
    ) -> None:
        self.args = args
        self.returncode = None
        request = {
            "arguments": [str(word) for word in args[1:]],  # the first is the interpreter
            "environment": dict(os.environ if env is None else env),
            "folder": str(cwd or Path.cwd()),
            "session": start_new_session,
            "descriptors": [0, 1, 2, *pass_fds],
        }
        null = os.open(os.devnull, os.O_RDWR)
        out = _descriptor(stdout, 1, null)
        err = out if stderr == subprocess.STDOUT else _descriptor(stderr, 2, null)
        self._line = socket.socket(*FAMILY)
        self._line.connect(str(Path(os.environ[VARIABLE]) / kind))
        content = json.dumps(request).encode()
        socket.send_fds(
            self._line,
            [content],
            [_descriptor(stdin, 0, null), out, err, *pass_fds],
        )
        os.close(null)
        self.pid = int(self._line.recv(LONGEST) or _refuse(kind))

    def poll(self) -> int | None:
        if self.returncode is None and self._readable(0):
            self.returncode = int(self._line.recv(LONGEST) or -signal.SIGKILL)
            self._line.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not self._readable(timeout):
            raise subprocess.TimeoutExpired(list(map(str, self.args)), timeout or 0)
        return self.poll()

    def _readable(self, timeout: float | None) -> bool:
        waits = select.poll()  # select knows no file beyond the 1,023rd
        waits.register(self._line, select.POLLIN)
        return bool(waits.poll(None if timeout is None else 1000 * timeout))

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            # its keeper may just have seen its end, and says so next
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _refuse(kind: str) -> str:
    log = Path(os.environ[VARIABLE], f"{kind}.log").read_text(errors="replace")
    raise RuntimeError(f"the parent of {kind} processes has ended; its last words:\n{log[-3000:]}")


def _descriptor(stream: int | IO[Any] | None, inherited: int, null: int) -> int:
    if stream is None:
        return inherited
    if isinstance(stream, int):
        return null if stream == subprocess.DEVNULL else stream
    return stream.fileno()


def found_by(kind: str, script: Path, folder: Path, *, timeout: float, **variables: str) -> Any:
    """Run a script of cases in a process of its own; return what it wrote to `folder`."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | variables
    said(kind, [script, folder], timeout=timeout, env=environment)
    return json.loads((folder / "found.json").read_text())


def said(kind: str, words: Sequence[str | Path], *, timeout: float = 400, **options: Any) -> str:
    """Run a program that ends well; return what it prints. `words`: those behind `python`."""
    done = run(kind, [sys.executable, *words], timeout=timeout, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def run(
    kind: str, args: Sequence[str | Path], *, timeout: float, **options: Any
) -> subprocess.CompletedProcess[str]:
    """subprocess.run, of a fork: until its end, or its time is over; what it has said is text."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = Process(
            kind,
            args,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            **options,
        )
        try:
            late = None
            code = process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            late = error
        finally:
            process.kill()
            process.wait()
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read())
    if late:
        raise AssertionError(f"{late}: {texts[0][-3000:]}{texts[1][-3000:]}")
    return subprocess.CompletedProcess(list(map(str, args)), code, *texts)


def start(args: Sequence[str], **options: Any) -> Process | subprocess.Popen[Any]:
    """In the place of subprocess.Popen: a fork where a parent has imported the program, else a
    fresh process.
    """
    kind = STARTED.get(args[2]) if args[1] == "-m" else None
    return Process(kind, args, **options) if kind else subprocess.Popen(args, **options)


@contextmanager
def forking() -> Iterator[None]:
    """The package starts its engines and ranks as forks, and so do those."""
    forks = SimpleNamespace(**vars(subprocess) | {"Popen": start})
    with (
        mock.patch.object(engine_process, "subprocess", forks),
        mock.patch.object(launch, "subprocess", forks),
    ):
        yield


@contextmanager
def parents() -> Iterator[None]:
    """The parents of a session. They wait, empty, for their first request."""
    processes = []
    here = Path(__file__).parent
    helpers = [str(folder) for folder in (here, *here.iterdir()) if folder.is_dir()]
    search_path = os.pathsep.join([*helpers, os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory(prefix="megatron-rl-tests-") as folder:
        for kind in MODULES:
            environment = dict(engine_environment() if kind == "vllm" else os.environ) | SHORT_SPIN
            # asking the driver would spoil GPUs for every fork
            environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
            environment["PYTHONPATH"] = search_path
            with (
                socket.socket(*FAMILY) as door,
                Path(folder, f"{kind}.log").open("wb") as log,
            ):
                door.bind(f"{folder}/{kind}")
                door.listen(64)
                command = [
                    sys.executable,
                    "-W",
                    "ignore",
                    __file__,
                    kind,
                    str(door.fileno()),
                ]
                parent = subprocess.Popen(
                    command, env=environment, pass_fds=[door.fileno()], stdout=log, stderr=log
                )
            processes.append(parent)
        try:
            with mock.patch.dict(os.environ, {VARIABLE: folder}):
                yield
        finally:
            for process in processes:
                process.kill()
                process.wait()


def serve(kind: str, door: socket.socket) -> None:
    """Fork for every request, until the session ends."""
    line, _ = door.accept()
    with rare_collections():
        for name in MODULES[kind]:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection would copy the pages that the forks share
    while True:
        if os.fork() == 0:
            die_with_parent()
            door.close()
            keep(line)
        line.close()
        line, _ = door.accept()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def keep(line: socket.socket) -> None:
    """Start the program of one request, report its exit status, and kill it when the requester is
    gone.
    """
    content, received, _, _ = socket.recv_fds(line, LONGEST, 16)
    request = json.loads(content)
    child = os.fork()
    if child == 0:
        die_with_parent()
        line.close()
        become(request, dict(zip(request["descriptors"], received, strict=True)))
    for descriptor in received:
        os.close(descriptor)
    end = os.pidfd_open(child)
    line.send(str(child).encode())
    ready, _, _ = select.select([end, line], [], [])
    if end not in ready:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with suppress(OSError):
        line.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def become(request: dict[str, Any], descriptors: Mapping[int, int]) -> None:
    """Run the program as a fresh interpreter would, and end with its status."""
    if request["session"]:
        os.setsid()
    above = max(descriptors) + 1
    moved = [fcntl.fcntl(received, fcntl.F_DUPFD, above) for received in descriptors.values()]
    for wanted, descriptor in zip(descriptors, moved, strict=True):
        os.dup2(descriptor, wanted)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    # the requester is not the parent of this process; the keeper ends it instead
    megatron_rl.processes.process.die_with_parent = lambda *_, **__: None
    words = request["arguments"]
    here = os.getcwd() if words[0] == "-m" else str(Path(words[0]).parent)
    paths = [here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:0] = [path for path in paths if path not in sys.path]
    sys.stdout.reconfigure(line_buffering=True)
    status = 0
    try:
        with forking():
            if words[0] == "-m":
                sys.argv = words[1:]
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            elif words[0] == "-c":
                sys.argv = ["-c", *words[2:]]
                exec(words[1], {"__name__": "__main__"})
            else:
                sys.argv = words
                runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    if isinstance(status, str):
        print(status, file=sys.stderr)
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


if __name__ == "__main__":
    serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
