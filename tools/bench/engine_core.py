"""Where the time of an engine's process goes while it answers, and what vLLM's core in a process of its own would move.

    python tools/bench/engine_core.py [--sequences 256] [--tokens 64] [--repeats 3]

One embedded engine on a host, a tiny model, all sequences together. Of each of its steps: the model (which on a GPU is
the device's time), vLLM's scheduler, vLLM's processing of outputs, and our packing of what has finished. A core in a
process of its own would take the first two with it and send the outputs of every step to the others: `hop` is what
vLLM's own encoder and decoder take for those, without the sockets.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from rollout import SHAPES, make_settings

from megatron_rl.config.schema import Format
from megatron_rl.sampler.client.engine_process import engine_environment
from megatron_rl.sampler.engine_settings import engine_arguments, write_engine_folder

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


class Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def on(self, owner: Any, method: str, part: str) -> None:
        true = getattr(owner, method)

        def timed(*args: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            try:
                return true(*args, **named)
            finally:
                self.seconds[part] += time.perf_counter() - begun

        setattr(owner, method, timed)


def measure(folder: Path, sequences: int, tokens: int, repeats: int) -> dict[str, float]:
    """Milliseconds of a step by part; `steps`: how many there were."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    from megatron_rl.engine import generation
    from megatron_rl.engine.engine import Engine

    work = SHAPES["toy"]
    (folder / "hf").mkdir()
    card = work.model | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (folder / "hf" / "config.json").write_text(json.dumps(card))
    settings = make_settings(Format.none, work, fleet=False)
    engine_folder = write_engine_folder(folder / "hf", folder / "engine", settings.quantization)
    arguments = engine_arguments(settings, engine_folder)
    engine = Engine(arguments | {"max_num_seqs": sequences, "max_model_len": len(PROMPT) + tokens})
    clock, client, sent = Clock(), engine.llm.llm_engine.engine_core, []
    core = client.engine_core
    for method in ("execute_model", "sample_tokens"):
        clock.on(core.model_executor, method, "model")
    for method in ("schedule", "update_from_output"):
        clock.on(core.scheduler, method, "scheduler")
    clock.on(engine.llm.llm_engine.output_processor, "process_outputs", "outputs")
    clock.on(generation, "completed", "packing")
    get = client.get_output
    client.get_output = lambda: sent.append(get()) or sent[-1]
    steps, whole = 0, 0.0
    for repeat in range(repeats + 1):
        if repeat == 1:  # the first warms up
            clock.seconds.clear()
            sent.clear()
            steps, whole = 0, 0.0
        for number in range(sequences):
            engine.generate(number, tokens=PROMPT, seed=number, max_tokens=tokens)
        begun = time.perf_counter()
        while engine.writes:
            engine.step()
            steps += 1
        whole += time.perf_counter() - begun
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
    begun = time.perf_counter()
    for outputs in sent:
        decoder.decode(encoder.encode(outputs))
    hop = time.perf_counter() - begun
    found = {**clock.seconds, "rest": whole - sum(clock.seconds.values()), "whole": whole, "hop": hop}
    return {part: 1e3 * seconds / steps for part, seconds in found.items()} | {"steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        found = measure(given.child, given.sequences, given.tokens, given.repeats)
        (given.child / "found.json").write_text(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child", folder, "--sequences", str(given.sequences)]
        command += ["--tokens", str(given.tokens), "--repeats", str(given.repeats)]
        env = engine_environment() | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
        found = json.loads((Path(folder) / "found.json").read_text())
    print(f"{given.sequences} sequences together, {found['steps']:.0f} steps; microseconds for a token of each")
    print("| part | us | of the work beside the model |\n|---|---|---|")
    beside = found["whole"] - found["model"]
    for part in ("scheduler", "outputs", "packing", "rest", "hop"):
        print(f"| {part} | {1e3 * found[part] / given.sequences:.2f} | {found[part] / beside:.0%} |")
    print(f"beside the model {beside:.2f} ms a step, {beside / found['whole']:.0%} of it here")
    print(f"would move {found['outputs'] + found['packing']:.2f} ms a step, and cost {found['hop']:.2f}")


if __name__ == "__main__":
    main()
