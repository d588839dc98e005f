"""docs/lora.md: its commands, run as they stand on the page."""

import re
from pathlib import Path

import pytest
from helpers import small_recipes, typed

from megatron_rl.data.toy import write_toy
from megatron_rl.models.hf_folder import HfFolder
from megatron_rl.runs.metrics_file import read_metrics

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "lora.md"


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_the_commands(empty: Path) -> None:
    small_recipes(empty, toy_sft=1, quickstart_lora=2)
    (empty / "tools").symlink_to(ROOT / "tools")
    write_toy(empty / "data" / "toy")
    typed(empty, "megatron-rl train recipes/toy_sft.yaml")
    # a policy that knows nothing is right too rarely to learn from it
    (empty / "uneven.py").write_text(
        "def by_answer(row, answer_key, response):\n    return sum(map(ord, response)) % 3 / 2\n"
    )
    with (empty / "recipes" / "quickstart_lora.yaml").open("a") as recipe:
        recipe.write(f"reward: {{name: '{empty}/uneven.py:by_answer'}}\n")
    large = "dapo-qwen3_32b-1n8g-int8-lora.yaml"
    (empty / "recipes" / large).write_text(f"base: {ROOT}/recipes/{large}\n")
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text().replace("@120", "@2"), re.DOTALL)
    said = [typed(empty, f"set -e\n{block}") for block in blocks]
    assert "Qwen3-32B" in said[0]
    assert read_metrics(empty / "runs" / "quickstart_lora" / "metrics.jsonl")[-1]["progress/step"] == 2
    merged, again, base = (
        HfFolder(empty / name) for name in ("exported/merged", "exported/again", "runs/toy_sft/model")
    )
    name = "model.layers.0.self_attn.q_proj.weight"
    assert bool((merged.get(name) == again.get(name)).all()) and bool((merged.get(name) != base.get(name)).any())
