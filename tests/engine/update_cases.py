"""Cases of engine_cases: updates of mixtures of experts, and of the scales of an FP8 cache."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from live_engine import NUMBERS, EngineCase, answers, attempt, model_of
from tiny_engine import PROMPTS
from transformers import AutoModelForCausalLM
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.utils.torch_utils import set_default_torch_dtype

from megatron_rl.config.schema import Format
from megatron_rl.engine import reload
from megatron_rl.engine.engine import Engine
from megatron_rl.engine.expectation import cache_scales
from megatron_rl.models.hf_folder import write_folder
from megatron_rl.types import Prompt
from megatron_rl.weight_sync.file_transport import version_directory

LONG = Prompt(9, tuple(range(3, 37)), "", {})  # a block of the cache, and more


def run_case(case: EngineCase, victim: str) -> dict[str, Any]:
    engine = case.start("live", keeps_experts=True, block_size=32)
    found = {}
    said = [case.update(engine, case.tensors(1))]
    # the second time from cached prefixes
    found["kept"] = [kept_routes(case, engine) for _ in range(2)]
    first = answers(engine)
    sequences = [list(prompt.token_ids) for prompt in PROMPTS]
    found["routes"] = [
        torch.frombuffer(bytearray(one), dtype=torch.int32)
        .view(
            len(tokens),
            2,
            -1,
        )
        .tolist()
        for tokens, one in zip(
            sequences, engine.values("routed_experts", sequences, 0), strict=True
        )
    ]
    found["other routes"] = transformers_routes(case, sequences)
    found["unmoved"] = answers(engine) == first
    said.append(case.update(engine, case.tensors(2)))
    found["changes"] = answers(engine) != first
    said.append(case.update(engine, case.tensors(1)))
    found["back"] = answers(engine) == first
    found["said"] = said
    whole = case.tensors(2)
    found["missing"] = case.update(
        engine, {name: tensor for name, tensor in whole.items() if name != victim}
    )
    found["intact"] = answers(engine) == first
    if case.hf["model_type"] == "mixtral":  # experts whose width needs padding fail at once instead
        found["kept_kernels_show"] = (
            case.update_wrongly(engine, keep_kernels) == "" and answers(engine) != first
        )
    found["unwritten"] = case.update_wrongly(engine, drop(victim))
    case.version += 1  # an incompletely loaded engine requires a newer version
    found["changed"] = case.update_wrongly(engine, change_files(case)), answers(engine) == first
    found["healed"] = case.update(engine, case.tensors(1)) == "" and answers(engine) == first
    if case.hf["model_type"] == "mixtral":
        found["layerwise"] = [
            run_layerwise(engine, case.tensors(1)),
            run_layerwise(engine, whole, victim),
        ]
    engine.shutdown()
    fresh = case.start("fresh", load_format="safetensors")
    found["fresh"] = answers(fresh) == first
    fresh.shutdown()
    return found


def kept_routes(case: EngineCase, engine: Engine) -> dict[str, Any]:
    """Count tokens of samples that came with other experts than the engine chooses for
    the whole sequence.
    """
    numbers = {}
    prefilled = engine.samples.prefilled
    differ = 0
    read = 0
    for seed, prompt in enumerate([*PROMPTS, LONG]):
        tokens = list(prompt.token_ids)
        numbers[next(NUMBERS)] = tokens
        engine.samples.begin(
            max(numbers),
            tokens=tokens,
            seed=seed,
            max_tokens=4 + seed % 3,
        )
    replies = [reply for _ in range(6) for reply in engine.samples.step()]
    prefilled = engine.samples.prefilled - prefilled
    for number, said in replies:
        tokens = [*numbers[number], *said.token_ids]
        kept_SLK = said.experts_SLK
        assert kept_SLK.shape[0] == len(tokens) - 1
        (watched,) = engine.values("routed_experts", [tokens], case.version)
        wanted_SLK = np.frombuffer(watched, np.int32).reshape(-1, *kept_SLK.shape[1:])[:-1]
        differ += int((np.sort(kept_SLK) != np.sort(wanted_SLK)).any(-1).sum())
        read += kept_SLK[..., 0].size
    return {"answers": len(replies), "differ": differ, "read": read, "prefilled": prefilled}


def transformers_routes(case: EngineCase, sequences: list[list[int]]) -> list[Any]:
    """[sequence, token, layer, expert]: of the weights before they were quantized."""
    folder = case.folder / "transformers"
    plain = EngineCase(case.hf["model_type"], Format.none, case.folder / "plain")
    write_folder(folder, plain.tensors(1), case.hf)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        said = [
            model(torch.tensor([tokens]), output_router_logits=True).router_logits
            for tokens in sequences
        ]
    return [
        torch.stack([one.float().topk(2).indices for one in layers], 1).tolist() for layers in said
    ]


def run_layerwise(engine: Engine, tensors: dict[str, torch.Tensor], without: str = "") -> str:
    """The books of the way that GPUs take; a host's kernels are of no use afterwards."""
    runner = engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner
    left = [(name, tensor) for name, tensor in tensors.items() if name != without]
    with torch.no_grad(), set_default_torch_dtype(torch.bfloat16):
        return attempt(lambda: reload.load_layerwise(runner.model, runner.model_config, left))


def keep_kernels(model: Any, tensors: Any, load: Callable[[Any], None]) -> None:
    """Keep the kernels of experts, as vLLM does by itself: they are not packed again."""
    experts = [layer for layer in model.modules() if isinstance(layer, RoutedExperts)]
    kernels = [layer.quant_method.moe_kernel for layer in experts]
    restore = reload.restore_checkpoint_layout

    def restore_and_keep(model: Any) -> None:
        restore(model)
        for layer, kernel in zip(experts, kernels, strict=True):
            layer.quant_method.moe_kernel = kernel

    reload.restore_checkpoint_layout = restore_and_keep
    try:
        load(tensors)
    finally:
        reload.restore_checkpoint_layout = restore


def change_files(case: EngineCase) -> Callable[..., None]:
    """Every file of the version changes after it was accepted."""

    def load_changed(model: Any, tensors: Any, load: Callable[[Any], None]) -> None:
        for path in version_directory(case.folder, case.version).glob("*.bin"):
            path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
        load(tensors)

    return load_changed


def drop(victim: str) -> Callable[..., None]:
    """A loader that swallows one expert's tensor after the update was accepted."""

    def load_without(model: Any, tensors: Any, load: Callable[[Any], None]) -> None:
        load([(name, tensor) for name, tensor in tensors if name != victim])

    return load_without


def run_cache(case: EngineCase) -> dict[str, Any]:
    """Scales of an FP8 cache reach the kernels, and change what they answer."""
    engine = case.start("live")
    found = {"said": [case.update(engine, case.tensors(1))]}
    found["scales"] = sorted(set(cache_scales(model_of(engine)).values()))
    first = answers(engine)
    coarse = case.tensors(1) | {name: 40 * scale for name, scale in case.scales(1).items()}
    found["said"].append(case.update(engine, coarse))
    found["coarser"] = answers(engine) != first
    name = next(iter(case.scales(1)))
    found["missing"] = case.update(
        engine, {key: tensor for key, tensor in case.tensors(1).items() if key != name}
    )
    found["unwritten"] = case.update_wrongly(engine, drop(name))
    case.version += 1
    found["said"].append(case.update(engine, case.tensors(1)))
    found["back"] = answers(engine) == first
    engine.shutdown()
    return found
