"""Cases of engine_cases: new weights between two tokens of an answer, at a step that the case chooses."""

from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from live_engine import Case, attempt
from tiny_engine import PROMPTS
from transformers import AutoModelForCausalLM

from megatron_rl.engine.engine import Engine
from megatron_rl.models.hf_folder import write_folder
from megatron_rl.weight_sync import file_transport as transport

TOKENS, BEFORE = 16, 6
TOKEN_IDS = [list(prompt.token_ids) for prompt in PROMPTS]
NUMBERS = count(1)
Answer = tuple[list[int], list[float], list[list[int]]]  # tokens, logprobs, spans


def begin(engine: Engine, **more: Any) -> int:
    number = next(NUMBERS)
    seeds = list(range(len(TOKEN_IDS)))
    engine.generate(number, prompts=TOKEN_IDS, seeds=seeds, samples=2, max_tokens=TOKENS, **more)
    return number


def end(engine: Engine, steps: int = 60) -> dict[int, list[Answer]]:
    """By request, in order."""
    found: dict[int, dict[tuple[int, int], Answer]] = {}
    for _ in range(steps):
        for request, said in engine.step():
            tokens, logprobs = np.frombuffer(said["tokens"], np.int32), np.frombuffer(said["logprobs"], np.float32)
            stops = np.cumsum(said["lengths"])[:-1]
            for row, answer in enumerate(zip(np.split(tokens, stops), np.split(logprobs, stops), strict=True)):
                spans = said["spans"].get(row, [(said["versions"][row], len(answer[0]))])
                key = said["places"][row // 2], row % 2
                found.setdefault(request, {})[key] = (answer[0].tolist(), answer[1].tolist(), [list(s) for s in spans])
    assert not engine.answering
    return {request: [answers[key] for key in sorted(answers)] for request, answers in found.items()}


def only(answers: dict[int, list[Answer]]) -> list[Answer]:
    (found,) = answers.values()
    return found


def write(case: Case, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    case.version += 1
    transport.remove_version(case.folder, case.version)
    transport.write_version(case.folder, case.version, tensors.items(), format=case.config.quantization.format)
    return transport.update_info(case.folder, case.version, 1, background=True)


def finish(engine: Engine, keep_cache: bool) -> None:
    """As the child does: while the new weights are built, it goes on writing."""
    while engine.must_wait("finish_weight_update"):
        pass
    engine.finish_weight_update(keep_cache)


def update_between(case: Case, engine: Engine, tensors: dict[str, torch.Tensor], keep_cache: bool) -> list[Answer]:
    begin(engine)
    for _ in range(BEFORE):
        assert engine.step() == []
    engine.start_weight_update()
    engine.update_weights(write(case, tensors))
    finish(engine, keep_cache)
    return only(end(engine))


def run_in_flight(case: Case) -> dict[str, Any]:
    engine = case.start("live")
    found: dict[str, Any] = {"said": [case.update(engine, case.tensors(1))]}
    begin(engine)
    alone = only(end(engine))
    found["alone"] = alone
    found["kept, same weights"] = update_between(case, engine, case.tensors(1), True)
    found["rebuilt, same weights"] = update_between(case, engine, case.tensors(1), False)
    for name, keep_cache in (("rebuilt", False), ("kept", True)):
        found[name] = update_between(case, engine, case.tensors(2), keep_cache)
        found[f"{name}, by transformers"] = [reference(case, seed, found[name]) for seed in (1, 2)]
        found["said"].append(case.update(engine, case.tensors(1)))
    found["refused"] = run_refused(case, engine)
    found["beside others"] = run_beside_others(engine)
    found["versions"] = case.version
    engine.shutdown()
    return found


def run_refused(case: Case, engine: Engine) -> dict[str, Any]:
    """One tensor too few, found out in mid-answer; the answers go on as if nothing had been."""
    begin(engine)
    for _ in range(BEFORE):
        engine.step()
    engine.start_weight_update()
    whole = list(case.tensors(2).items())
    engine.update_weights(write(case, dict(whole[:-1])))
    case.version -= 1
    said = attempt(partial(finish, engine, False))
    return {"said": said, "answers": only(end(engine)), "health": engine.health()}


def run_beside_others(engine: Engine) -> dict[str, Any]:
    """Requests that answers in the making stand in the way of, or that stand in theirs."""
    first = begin(engine)
    for _ in range(3):
        engine.step()
    found: dict[str, Any] = {"asleep": attempt(lambda: engine.sleep(1)), "open": engine.health()["open"]}
    found["has to wait"] = engine.must_wait("activations")
    second = begin(engine, patient=True, policy_version=0)
    found["held"] = engine.health()["open"] == found["open"]
    answers = end(engine)
    found["drained"] = (list(answers), engine.must_wait("activations")) == ([first], False)
    values = engine.activations(TOKEN_IDS[0], engine.ready.policy_version)
    found["watched"] = len(values["logprobs"]) == len(TOKEN_IDS[0]) - 1 and bool(values["values"])
    again = end(engine)
    found["same"] = [again[second][i][0] for i in range(12)] == [answers[first][i][0] for i in range(12)]
    newer = begin(engine, patient=True, policy_version=engine.ready.policy_version + 1)
    found["waits for a newer version"] = end(engine) == {}
    engine.abandon([newer])
    found["impatient"] = attempt(lambda: begin(engine, policy_version=engine.ready.policy_version + 1))
    given_up = begin(engine)
    engine.step()
    engine.abandon([given_up])
    found["given up"] = (len(engine.answering), end(engine)) == (0, {})
    return found


def reference(case: Case, seed: int, answers: list[Answer]) -> list[list[float]]:
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
