"""One server of the fleet as the fleet talks to it: HTTP requests under a key and a deadline, and what is known of it.

Generation uses vLLM's /inference/v1/generate: token ids in, token ids and logprobs out, no text anywhere. Weights
move through the worker methods that the embedded sampler calls too, by way of /collective_rpc.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp
import msgspec

from megatron_rl.config.schema import Cache, Format, InFlight
from megatron_rl.engine.readiness import SyncState
from megatron_rl.processes.process import turns_of
from megatron_rl.processes.pulse import mark
from megatron_rl.sampler.fleet.answers import (
    Answer,
    Results,
    largest_body,
    read_answers,
    read_body,
    read_json,
)
from megatron_rl.sampler.fleet.server_process import ServerProcess
from megatron_rl.sampler.protocol import SamplerError
from megatron_rl.types import SamplingParams
from megatron_rl.weight_sync.file_transport import BACKGROUND
from megatron_rl.weight_sync.manifest import NO_VERSION, WeightSyncError

HEALTH_TIMEOUT_S = 10.0
KEEP_ALIVE_S = 4.0  # of an idle connection: less than a server's own 5 s, or it could end under a request
BUILT_POLL_S = 0.05  # between two looks at whether an update is verified
LARGEST_BODY = 16 << 20  # of any answer but generated tokens


class ReplicaGone(SamplerError):
    """The server is unreachable, hangs, or broke down; another one may do better."""


class NoAnswer(ReplicaGone):
    """The server did not answer in time."""


class RequestRefused(SamplerError):
    """The server says that the request is wrong: no other server would take it."""


@dataclass(frozen=True)
class Look:
    """What a look at a server has shown."""

    alive: bool
    slow: str = ""  # why it does not answer at once


@dataclass(frozen=True)
class Swap:
    """What an update does to answers that are being written."""

    in_flight: InFlight = InFlight.finish
    cache: Cache = Cache.rebuild

    @property
    def pause(self) -> str:
        """vLLM's pause mode: `keep` stops before the next step, `wait` once requests in flight are answered."""
        return "keep" if self.in_flight == InFlight.continue_ else "wait"

    @property
    def forget(self) -> str:
        """Cached keys and values of the old weights: all of them, or all but those of answers being written."""
        return "" if self.cache == Cache.keep else "?reset_running_requests=true"


@dataclass
class Replica:
    """A server and the fleet's knowledge of it. Used from the fleet's event loop only."""

    name: str
    format: Format
    address: str
    key: str
    timeout_s: float
    process: ServerProcess | None = None  # None: it was given by address
    vocabulary: int = 1 << 31  # tokens that its model can sample
    version: int = NO_VERSION
    ready: bool = False  # answers, and holds the weights of `version`
    given_up: str | None = None  # why it will not come back
    reason: str = ""  # why it is not ready
    restarts: int = 0
    load: int = 0  # sequences it works on
    served: int = 0  # sequences it has answered
    updating: bool = False  # takes no prompts: new weights are about to be, or just became, the live ones
    paused_at: float | None = None  # when it stopped in the middle of answers, which `resume` lets go on
    running: set[asyncio.Future[Any]] = field(default_factory=set)  # what has been asked of it, to be cancelled with it
    _session: aiohttp.ClientSession | None = None
    _limits: set[asyncio.Timeout] = field(default_factory=set)  # of the answers that are waited for

    def take_out(self, reason: str) -> None:
        """Send no more requests to it; whatever it works on is cancelled, for others to take over."""
        self.ready, self.reason, self.version = False, reason, NO_VERSION
        for task in self.running - {asyncio.current_task()}:
            task.cancel()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(self, token_ids: Sequence[int], seed: int, params: SamplingParams) -> list[Answer]:
        """`params.samples` answers to one prompt, in the order of samples."""
        distinct = 1 if params.temperature == 0 else params.samples  # greedy samples are copies of one
        body = {
            "token_ids": token_ids,
            "sampling_params": {
                "n": distinct,
                "seed": seed,
                "max_tokens": params.max_tokens,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k,
                "stop_token_ids": params.stop_token_ids,
                "logprobs": params.candidates,  # beside the sampled token's
                "flat_logprobs": True,
                "detokenize": False,
            },
        }
        largest = largest_body(len(token_ids), params)
        content = await self.post("/inference/v1/generate", body, queued=True, largest=largest)
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time() + self.timeout_s)
        try:
            answers = read_answers(content, params, self.vocabulary)
        except ValueError as error:
            raise ReplicaGone(f"{self.name} answered with something else than tokens: {error}") from None
        if len(answers) != distinct:
            raise ReplicaGone(f"{self.name} sent {len(answers)} answers, {distinct} were asked for")
        return [answer for answer in answers for _ in range(params.samples // distinct)]

    async def call_workers(self, method: str, **arguments: Any) -> None:
        """Call a method of every worker of the engine; the first failure is raised."""
        await self._guarded_call(method, arguments, again=True)

    async def _guarded_call(self, method: str, arguments: dict[str, Any], again: bool) -> None:
        answers = await self._collective("guarded_call", [method, arguments], tuple[str, str] | None, again)
        for kind, message in filter(None, answers):
            text = f"{self.name}: {message}"
            raise WeightSyncError(text) if kind == WeightSyncError.__name__ else SamplerError(f"{text} ({kind})")

    async def start_update(self) -> None:
        await self.call_workers("abort_weight_update")
        await self.call_workers("start_weight_update")

    async def stage_update(self, update_info: Mapping[str, Any]) -> None:
        """Have the engine verify an update, while it goes on answering; nothing is loaded yet."""
        background = {BACKGROUND: True} if self.load else {}
        try:
            await self.call_workers("update_weights", update_info={**update_info, **background})
            if background:
                await self._until_built()
        except WeightSyncError:
            await self.call_workers("abort_weight_update")
            raise

    async def _until_built(self) -> None:
        try:
            async with asyncio.timeout(self.timeout_s):
                # a server writes an answer that is neither a list nor a mapping as text
                while "True" in await self._collective("weight_update_building", [], str):
                    await asyncio.sleep(BUILT_POLL_S)
        except TimeoutError:
            raise NoAnswer(f"{self.name} did not verify the update within {self.timeout_s:g} s") from None
        await self.call_workers("await_weight_update")

    async def finish_update(self, swap: Swap) -> dict[str, Any]:
        """Load what was verified; afterwards the server stamps its tokens with the new version.

        Where answers are being written, they stand still from before the swap until `resume`.
        """
        if self.load:
            self.paused_at = time.perf_counter()
            await self.post(f"/pause?mode={swap.pause}&clear_cache=false")
            self.paused_at = time.perf_counter()
        self.version = NO_VERSION  # until it is known
        try:
            await self._guarded_call("finish_weight_update", {}, again=False)
        finally:
            states: list[SyncState] = await self._collective("weight_sync_state", [], SyncState)
            versions = sorted({state.policy_version for state in states})
            if len(versions) > 1 or any(state.torn for state in states):
                self.take_out("the last weight update stopped half-way: its weights are of no version")
            else:
                self.version = versions[0]
        await self._stamp(versions[0], swap)
        return asdict(max(states, key=lambda state: state.load_s))

    async def resume(self) -> float:
        """Answers go on; returns how long they stood still. Harmless where they do already."""
        await self.post("/resume")
        stood_s = 0.0 if self.paused_at is None else time.perf_counter() - self.paused_at
        self.paused_at = None
        return stood_s

    async def forget_version(self) -> None:
        """A server that served another run, or missed updates, starts over: any version is newer than none."""
        await self.call_workers("forget_version")
        await self._stamp(NO_VERSION, Swap())
        self.version = NO_VERSION

    async def _stamp(self, version: int, swap: Swap) -> None:
        reset = await self.post(f"/reset_prefix_cache{swap.forget}")
        if swap.forget and b"true" not in reset:
            raise ReplicaGone(f"{self.name} did not reset its prefix cache: answers would begin on the old weights")
        await self.post("/update_weight_version", {"new_version": str(version)})

    async def _collective(self, method: str, arguments: list[Any], kind: Any, again: bool = True) -> list[Any]:
        """Ask every worker of the engine; `kind`: what the answer of one has to be."""
        body = await self.post("/collective_rpc", {"method": method, "args": arguments}, again=again)
        return self._read(body, Results[kind]).results

    def _read(self, body: bytes, kind: Any) -> Any:
        try:
            return read_json(body or b"{}", kind)
        except ValueError as error:
            raise ReplicaGone(f"{self.name} answered with something else than was asked for: {error}") from None

    async def look(self) -> Look:
        """Whether the server answers, and its engine, or at least works: on a crowded machine that may take long."""
        turns = turns_of(self.process.pid) if self.process else 0
        try:
            body = await self.request("GET", "/health", timeout_s=HEALTH_TIMEOUT_S)
            engine = self._read(body, dict[str, str]).get("engine", "answers")
        except NoAnswer as error:
            works = self.process is not None and turns_of(self.process.pid) > turns
            return Look(works, "it is busy" if works else str(error))
        except SamplerError as error:
            return Look(False, str(error))
        return Look(True, "" if engine == "answers" else f"its engine is {engine:.100}")

    async def get(self, path: str) -> Any:
        return self._read(await self.request("GET", path, timeout_s=self.timeout_s), Any)

    async def post(self, path: str, body: Any = None, **given: Any) -> bytes:
        answer = await self.request("POST", path, body, timeout_s=self.timeout_s, **given)
        mark()
        return answer

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout_s: float,
        again: bool = True,
        queued: bool = False,
        largest: int = LARGEST_BODY,
    ) -> bytes:
        """The response's body. Whatever says that the server itself is in trouble raises ReplicaGone.

        `again`: a connection that ends without a response may say nothing of the server; a second one is tried.
        `queued`: it may wait behind others in the server, so that the limit begins anew with each of their answers.
        """
        content, limit = None if body is None else msgspec.json.encode(body), asyncio.timeout(timeout_s)
        if queued:
            self._limits.add(limit)
        try:
            async with limit:
                try:
                    status, answer = await self._exchange(method, path, content, largest)
                except (aiohttp.ClientError, OSError):
                    if not again or (self.process is not None and self.process.ended()):
                        raise
                    status, answer = await self._exchange(method, path, content, largest)
        except TimeoutError:
            late = "finished no answer for" if queued else f"did not answer {path} within"
            raise NoAnswer(f"{self.name} {late} {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ReplicaGone(f"{self.name}: {path}: {type(error).__name__}: {error}") from None
        finally:
            self._limits.discard(limit)
        if status >= 500:
            raise ReplicaGone(f"{self.name}: {path} failed ({status}): {_shortened(answer)}")
        if status >= 400:
            raise RequestRefused(f"{self.name} refused {path} ({status}): {_shortened(answer)}")
        return answer

    async def _exchange(self, method: str, path: str, content: bytes | None, largest: int) -> tuple[int, bytes]:
        async with self._connection().request(method, self.address + path, data=content) as response:
            try:
                return response.status, await read_body(response, largest)
            except ValueError as error:
                raise ReplicaGone(f"{self.name}: {path}: {error}") from None

    async def answers_without_key(self) -> bool:
        """Whether a request without the key gets through to a route that moves weights."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(
                f"{self.address}/weight_info", timeout=aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
            ) as response,
        ):
            return response.status < 400

    def _connection(self) -> aiohttp.ClientSession:
        if self._session is None:
            headers = {"content-type": "application/json", "accept-encoding": "identity"}  # a packed body has no bound
            if self.key:
                headers["authorization"] = f"Bearer {self.key}"
            # as many connections as there are prompts in flight; proxies of the environment are not asked
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            # the request has a limit; none for its parts
            self._session = aiohttp.ClientSession(
                headers=headers, connector=connector, timeout=aiohttp.ClientTimeout(), auto_decompress=False
            )
        return self._session


class NoServerLeft(SamplerError):
    """Says what became of every server, and what to do."""

    def __init__(self, replicas: Sequence[Replica], version: int, patience_s: float) -> None:
        reasons = "; ".join(f"{one.name}: {one.given_up or one.reason or 'not ready'}" for one in replicas)
        super().__init__(
            f"no server of the fleet can answer with policy version {version} (waited up to "
            f"sampler.start_timeout_s={patience_s:g}). {reasons}. Read the servers' logs; lower "
            "sampler.vllm.max_num_seqs where memory ran out, raise sampler.start_timeout_s where the machine was only "
            "slow, restart servers that were given by address, "
            "and start the run again"
        )


def _shortened(content: bytes, limit: int = 300) -> str:
    text = " ".join(content.decode(errors="replace").split())
    return text[:limit] + ("..." if len(text) > limit else "")
