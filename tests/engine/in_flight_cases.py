"""Cases of engine_cases: new weights between two tokens of an answer, at a step that
the case chooses.
"""

from functools import partial
from typing import Any
from unittest import mock

import torch
from live_engine import EngineCase, attempt, begin
from tiny_engine import PROMPTS
from transformers import AutoModelForCausalLM
from vllm.config import VllmConfig

from megatron_rl.engine.engine import Engine
from megatron_rl.models.hf_folder import write_folder
from megatron_rl.weight_sync import file_transport as transport

TOKENS = 16
BEFORE = 6
TOKEN_IDS = [list(prompt.token_ids) for prompt in PROMPTS]
Answer = tuple[list[int], list[float], list[int]]  # tokens, logprobs, versions


def end(engine: Engine, steps: int = 60) -> dict[int, Answer]:
    """By the number of the sample."""
    found = {}
    for _ in range(steps):
        for number, said in engine.samples.step():
            found[number] = (
                list(said.token_ids),
                list(said.logprobs),
                list(said.versions or [said.policy_version] * len(said.token_ids)),
            )
    assert not engine.samples
    return found


def answers_to(engine: Engine, numbers: list[int]) -> list[Answer]:
    """Return the responses to these requests; no others may be open."""
    found = end(engine)
    assert sorted(found) == numbers
    return [found[number] for number in numbers]


def write(case: EngineCase, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    case.version += 1
    transport.remove_version(case.folder, case.version)
    transport.write_version(
        case.folder, case.version, tensors.items(), format=case.config.quantization.format
    )
    return transport.update_info(case.folder, case.version, 1, background=True)


def finish(engine: Engine) -> None:
    """As the child does: while the new weights are built, it goes on writing."""
    while engine.must_wait("finish_weight_update"):
        pass
    engine.finish_weight_update()


def update_between(
    case: EngineCase, engine: Engine, tensors: dict[str, torch.Tensor]
) -> list[Answer]:
    numbers = begin(engine, TOKENS)
    for _ in range(BEFORE):
        assert engine.samples.step() == []
    engine.start_weight_update()
    engine.update_weights(write(case, tensors))
    finish(engine)
    return answers_to(engine, numbers)


def run_in_flight(case: EngineCase) -> dict[str, Any]:
    engine = case.start("live")
    found = {"said": [case.update(engine, case.tensors(1))]}
    found["alone"] = answers_to(engine, begin(engine, TOKENS))
    found["same weights"] = update_between(case, engine, case.tensors(1))
    found["updated"] = update_between(case, engine, case.tensors(2))
    found["by transformers"] = [reference(case, seed, found["updated"]) for seed in (1, 2)]
    found["said"].append(case.update(engine, case.tensors(1)))
    found["refused"] = run_refused(case, engine)
    found["beside others"] = run_beside_others(engine)
    found["versions"] = case.version
    engine.shutdown()
    return found | {"ahead": run_ahead(case)}


def run_ahead(case: EngineCase) -> list[list[Answer]]:
    """A scheduler that works ahead, as on GPUs: a step may only have been begun, and one is under
    way at an update.
    """
    with mock.patch.object(VllmConfig, "max_concurrent_batches", 2):
        engine = case.start("ahead")
    case.update(engine, case.tensors(1))
    found = [
        answers_to(engine, begin(engine, TOKENS)),
        update_between(case, engine, case.tensors(1)),
    ]
    engine.shutdown()
    return found


def run_refused(case: EngineCase, engine: Engine) -> dict[str, Any]:
    """Refuse an update without its last tensor in mid-answer; open samples go on unchanged."""
    numbers = begin(engine, TOKENS)
    for _ in range(BEFORE):
        engine.samples.step()
    engine.start_weight_update()
    whole = list(case.tensors(2).items())
    engine.update_weights(write(case, dict(whole[:-1])))
    case.version -= 1
    said = attempt(partial(finish, engine))
    return {"said": said, "answers": answers_to(engine, numbers), "status": engine.status()}


def run_beside_others(engine: Engine) -> dict[str, Any]:
    """Requests that answers in the making pause in the way of, or that pause in theirs."""
    version = engine.ready.policy_version
    first = begin(engine, TOKENS)
    for _ in range(3):
        engine.samples.step()
    found = {
        "asleep": attempt(lambda: engine.sleep(1)),
        "open": engine.status()["open"],
    }
    found["has to wait"] = engine.must_wait("values")
    second = begin(engine, TOKENS, patient=True, policy_version=0)
    found["held"] = engine.status()["open"] == found["open"]
    answers = end(engine)
    found["drained"] = (sorted(answers), engine.must_wait("values")) == (first, False)
    (values,) = engine.values("activations", [TOKEN_IDS[0]], version)
    found["watched"] = len(values["logprobs"]) == len(TOKEN_IDS[0]) - 1 and bool(values["values"])
    again = answers_to(engine, second)
    found["same"] = [tokens for tokens, _, _ in again] == [answers[number][0] for number in first]
    newer = begin(engine, TOKENS, patient=True, policy_version=version + 1)
    found["waits for a newer version"] = end(engine) == {}
    engine.samples.cancel(newer)
    found["impatient"] = attempt(lambda: begin(engine, TOKENS, policy_version=version + 1))
    aborted = begin(engine, TOKENS)
    engine.samples.step()
    engine.samples.cancel(aborted)
    found["given up"] = (len(engine.samples), end(engine)) == (0, {})
    return found


def reference(case: EngineCase, seed: int, answers: list[Answer]) -> list[list[float]]:
    """The logprob of every token by transformers, in float32."""
    folder = case.folder / f"transformers {seed}"
    if not folder.exists():
        write_folder(folder, case.tensors(seed), case.hf)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for row, (tokens, _, _) in enumerate(answers):
        prompt = TOKEN_IDS[row // 2]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
        found.append([logits[len(prompt) - 1 + i, token].item() for i, token in enumerate(tokens)])
    return found
