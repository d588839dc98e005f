from __future__ import annotations

import pytest

from megatron_rl.data.tokenizer import FolderTokenizer
from megatron_rl.data.toy import write_toy

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if stars is defined %}*{% endif %}{% endfor %}="
)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FolderTokenizer:
    """The toy's, with a template of chats."""
    folder = tmp_path_factory.mktemp("toy")
    write_toy(folder)
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    return FolderTokenizer(folder / "model")
