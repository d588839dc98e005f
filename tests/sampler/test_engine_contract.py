"""Contract of every engine: a scripted one, a child by its socket, a server by its port."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from live_fleet import flip_a_byte, served
from scripted_engine import ScriptedEngine
from tiny_engine import PROMPTS, make_model, make_settings, startable

from megatron_rl.config.schema import Format
from megatron_rl.sampler.client.interface import Engine, EngineUnavailable, SamplerError
from megatron_rl.sampler.sampler import Sampler
from megatron_rl.types import Completion, SamplingParams
from megatron_rl.weight_sync import file_transport as transport
from megatron_rl.weight_sync.manifest import WeightSyncError

pytestmark = pytest.mark.engine
TOKENS = PROMPTS[0].token_ids
PARAMS = SamplingParams(samples=1, max_tokens=6)
REAL = [(way, format) for way in ("child", "server") for format in (Format.none, Format.int8)]


class Subject:
    """An engine, the loop that it is asked on, and versions to update it with."""

    def __init__(
        self,
        engine: Engine,
        run: Callable[[Coroutine[Any, Any, Any]], Any],
        write: Callable[..., Any],
    ) -> None:
        self.engine = engine
        self.run = run
        self.write = write

    def draw(
        self,
        seed: int = 1,
        tokens: tuple[int, ...] = TOKENS,
        patient: bool = True,
        version: int | None = None,
    ):
        served = self.version if version is None else version
        return self.run(
            self.engine.generate(
                tokens,
                PARAMS,
                seed,
                version=served,
                patient=patient,
            )
        )

    @property
    def version(self) -> int:
        return self.run(self.engine.status())["policy_version"]

    def request(self, step: str, **arguments: Any) -> dict[str, Any]:
        return dict(self.run(self.engine.update(step, **arguments)))

    def update(self, **how: bool) -> int:
        self.request("start")
        self.request("stage", update_info=self.write(self.version + 1))
        self.request("await")
        return self.request("finish", **how)["policy_version"]


@pytest.fixture(scope="module", params=["scripted", *REAL], ids=str)
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    if request.param == "scripted":
        with asyncio.Runner() as runner:
            scripted = ScriptedEngine(version=0)
            write = lambda version, whole=True: {"policy_version": version, "whole": whole}  # noqa: E731
            yield Subject(scripted, runner.run, write)
        return
    way, format = request.param
    folder = tmp_path_factory.mktemp(way)
    model = make_model(folder / "hf", True)

    def write(version: int, whole: bool = True) -> dict[str, Any]:
        transport.remove_version(folder, version)
        transport.write_version(
            folder, version, model.quantized(version, format).items(), format=format
        )
        if not whole:
            flip_a_byte(transport.manifest_path(folder, version, 0))
        return transport.update_info(folder, version, 1, background=True)

    with ExitStack() as stack:
        stack.enter_context(startable())
        addresses = []
        if way == "server":
            addresses = [stack.enter_context(served(model, folder, format))]
        settings = make_settings(format, addresses=addresses)
        sampler = stack.enter_context(Sampler(settings, model.folder, folder))
        sampler.init_weight_transfer_engine({})
        subject = Subject(
            sampler.replicas[0].engine, lambda asked: sampler._ask(lambda _: asked), write
        )
        subject.update()
        yield subject


def essence(one: Completion) -> tuple:
    return one.token_ids, one.logprobs


def test_a_sample_is_its_seed_s(subject: Subject) -> None:
    one = subject.draw()
    assert 0 < len(one.token_ids) == len(one.logprobs) <= PARAMS.max_tokens
    assert max(one.logprobs) <= 0
    assert one.finish_reason in ("stop", "length")
    assert (one.policy_version, one.versions) == (subject.version, None)
    assert essence(subject.draw()) == essence(one)
    assert len({subject.draw(seed).token_ids.tobytes() for seed in range(4)}) > 1


def test_many_are_drawn_side_by_side_and_cancelled_ones_leave_nothing(subject: Subject) -> None:
    async def ask() -> list[Any]:
        asked = [
            asyncio.ensure_future(
                subject.engine.generate(TOKENS, PARAMS, seed, version=0, patient=True)
            )
            for seed in range(12)
        ]
        await asyncio.sleep(0)
        for one in asked[6:]:
            one.cancel()
        return await asyncio.gather(*asked, return_exceptions=True)

    found = subject.run(ask())
    alone = [subject.draw(seed) for seed in range(6)]
    assert [(one.token_ids, one.policy_version) for one in found[:6]] == [
        (one.token_ids, one.policy_version) for one in alone
    ]
    # a batch of another size rounds otherwise on some hosts
    for one, other in zip(found, alone, strict=False):
        assert list(one.logprobs) == pytest.approx(list(other.logprobs), abs=0.03)
    assert all(isinstance(one, asyncio.CancelledError) for one in found[6:])
    assert subject.run(subject.engine.status()).get("open", 0) == 0


def test_an_update_is_served_once_it_is_finished(subject: Subject) -> None:
    before = subject.version
    subject.request("start")
    subject.request("stage", update_info=subject.write(before + 1))
    subject.request("await")
    assert subject.version == before
    assert subject.request("finish")["policy_version"] == subject.version == before + 1
    assert subject.draw().policy_version == before + 1


def test_a_version_that_is_not_served_is_refused_or_waited_for(subject: Subject) -> None:
    version = subject.version
    assert subject.draw(version=version - 1).policy_version == version, (
        "a newer one is as good for who is patient"
    )
    with pytest.raises(SamplerError, match=f"serves policy version {version}"):
        subject.draw(version=version - 1, patient=False)


def test_a_refused_update_changes_nothing(subject: Subject) -> None:
    version = subject.version
    before = essence(subject.draw())
    with pytest.raises(WeightSyncError):
        subject.request("finish")
    subject.request("start")
    if isinstance(subject.engine, ScriptedEngine):
        subject.engine.fails = {"await": WeightSyncError("corrupt tensor")}
    subject.request("stage", update_info=subject.write(version + 1, whole=False))
    with pytest.raises(WeightSyncError, match="corrupt tensor"):
        subject.request("await")
    if isinstance(subject.engine, ScriptedEngine):
        subject.engine.fails = {}
    subject.request("abort")
    assert (subject.version, essence(subject.draw())) == (version, before)
    assert subject.update() == version + 1


def test_a_paused_engine_resumes_on_request(subject: Subject) -> None:
    subject.update(pause=True)

    async def ask() -> bool:
        asked = asyncio.ensure_future(
            subject.engine.generate(TOKENS, PARAMS, 1, version=0, patient=True)
        )
        await subject.engine.status()  # it has arrived
        stood = not asked.done()
        await subject.engine.update("resume")
        await asked
        return stood

    assert subject.run(ask()) or isinstance(subject.engine, ScriptedEngine)


def test_what_it_cannot_look_up_is_refused_and_harms_nothing(subject: Subject) -> None:
    if isinstance(subject.engine, ScriptedEngine):
        subject.engine.refused = (5000,)
    with pytest.raises(SamplerError):
        subject.draw(tokens=(5000,))
    assert subject.draw()
    assert subject.run(subject.engine.look()).alive


def test_nothing_is_answered_after_the_end(subject: Subject) -> None:
    """Last."""
    subject.run(subject.engine.close())
    if not isinstance(subject.engine, ScriptedEngine):
        with pytest.raises(EngineUnavailable):
            subject.draw(version=0)
