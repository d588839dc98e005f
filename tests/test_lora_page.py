"""docs/guides/lora.md: its commands, run as they stand on the page; and what else looks at a run, of one
with adapters.
"""

import re
import shutil
from pathlib import Path

import pytest
from helpers import small_recipes, typed

from megatron_rl.data.toy import write_toy
from megatron_rl.models.hf_folder import HfFolder
from megatron_rl.tracking.metrics_file import read_metrics

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guides" / "lora.md"
REWARD = "def by_answer(row, answer_key, response):\n    return sum(map(ord, response)) % 3 / 2\n"
# the first version of a start is a whole one
PATCHES = (
    "sync/bytes",
    "sync/read_bytes",
    "sync/changed_fraction",
)


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_the_commands(empty: Path) -> None:
    small_recipes(empty, toy_sft=1, quickstart_lora=2)
    (empty / "tools").symlink_to(ROOT / "tools")
    write_toy(empty / "data" / "toy")
    typed(empty, "megatron-rl train recipes/toy_sft.yaml")
    # a policy that knows nothing is right too rarely to learn from it
    (empty / "uneven.py").write_text(REWARD)
    with (empty / "recipes" / "quickstart_lora.yaml").open("a") as recipe:
        recipe.write(f"reward: {{name: '{empty}/uneven.py:by_answer'}}\n")
    large = "dapo-qwen3_32b-1n8g-int8-lora.yaml"
    (empty / "recipes" / large).write_text(f"base: {ROOT}/recipes/{large}\n")
    blocks = re.findall(
        r"```bash\n(.*?)```",
        PAGE.read_text().replace("@120", "@2"),
        re.DOTALL,
    )
    said = [typed(empty, f"set -e\n{block}") for block in blocks]
    assert "Qwen3-32B" in said[0]
    assert (
        read_metrics(empty / "runs" / "quickstart_lora" / "metrics.jsonl")[-1]["progress/step"] == 2
    )
    merged, again, base = (
        HfFolder(empty / name)
        for name in ("exported/merged", "exported/again", "runs/toy_sft/model")
    )
    name = "model.layers.0.self_attn.q_proj.weight"
    assert bool((merged.get(name) == again.get(name)).all()) and bool(
        (merged.get(name) != base.get(name)).any()
    )


def _repeated(lines: list[dict[str, float]]) -> list[dict[str, float]]:
    return [
        {
            key: one
            for key, one in line.items()
            if not key.startswith(("time/", "perf/", *PATCHES)) and key[-2:] != "_s"
        }
        for line in lines
    ]


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_a_run_goes_on_and_is_looked_into(empty: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    write_toy(empty / "data" / "toy")
    small_recipes(empty, quickstart_lora=8)
    (empty / "uneven.py").write_text(REWARD)
    toy = empty / "data" / "toy" / "model"
    run = empty / "runs" / "quickstart_lora"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(toy)).save_pretrained(
        empty / "weights"
    )
    shutil.copy(empty / "weights" / "model.safetensors", toy)
    train = (
        "megatron-rl train recipes/quickstart_lora.yaml model.path=data/toy/model "
        "reward.name=uneven.py:by_answer run.steps=3 run.if_exists=resume checkpoint.every=2 "
        "sync.full_every=3 learner.n_minibatches=2"
    )
    typed(empty, train)
    whole = read_metrics(run / "metrics.jsonl")
    typed(empty, "megatron-rl mismatch runs/quickstart_lora -n 2")
    shutil.rmtree(run / "checkpoints" / "step_3")
    typed(empty, train)
    assert _repeated(read_metrics(run / "metrics.jsonl")) == _repeated(whole)
    # the second minibatch meets adapters whose products are infinite
    huge = "optim.lr=1e20 optim.min_lr=1e20"
    typed(empty, f"{train} {huge} run.steps=4 'run.resume_allow=[optim.lr, optim.min_lr]' || true")
    said = typed(empty, "megatron-rl rerun-step runs/quickstart_lora/dumps/nonfinite_*")
    assert re.search(r"decoder\.layers\.0\.\S+\.lora", said)
    then, now = re.findall(r"^(?:then|now) +(\S.*?)(?:, on other ranks)?$", said, re.MULTILINE)
    assert then == now
