"""Tokenizer of a Hugging Face folder: chat templates, encoding, decoding, stop tokens."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from megatron_rl.config import ConfigError
from megatron_rl.data.control_tokens import ControlTokens, Marked, marked
from megatron_rl.files import JsonObject, read_json

Messages = Sequence[Mapping[str, Any]]
_BATCH = 1024  # texts that are encoded at once, on all cores
# for each token that a text may have: of a much longer one only the beginning is looked at
_CHARACTERS = 32


class FolderTokenizer:
    """Tokenizer of a Hugging Face folder. Transformers (without torch) only for chat templates."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as Backend

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"model.path: {folder} holds no tokenizer.json; save one there with the model"
            )
        self._folder = folder
        try:
            self._backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"model.path: {path} is not a readable tokenizer ({error})") from None
        self._chat: Any = None
        self._loading = Lock()
        self.stop_token_ids = _stop_tokens(folder, self._backend)
        self._control = ControlTokens(self._backend, self.stop_token_ids)

    def encode(self, prompt: str | Messages) -> list[int]:
        """Token ids of a prompt. Control tokens that it spells are the data's; those that messages
        spell are text.
        """
        text = self.text(prompt)
        if isinstance(text, Marked):
            return self._control.encode(text)
        # without the GIL
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return encoding.ids

    def encode_as_text(self, text: str) -> list[int]:
        """Token ids of a text as messages have it."""
        return self.encode(marked(self._control.mark_texts(text)))

    def text(self, prompt: str | Messages, options: Mapping[str, Any] | None = None) -> str:
        """The model's input: a plain prompt, or messages in the chat template with `options`."""
        if isinstance(prompt, str):
            return prompt
        try:
            return self._render(list(prompt), options or {})
        except Exception as error:  # transformers and jinja raise families of their own
            first = str(error).strip().split("\n")[0]
            raise ConfigError(
                f"model.path: the chat template of {self._folder} does not take a prompt that is a "
                f"list of messages ({type(error).__name__}: {first}); add a template, or make "
                "data.prompt_key a column of plain text"
            ) from None

    def render(
        self, messages: Messages, options: Mapping[str, Any], *, tools: Sequence[Any], opened: bool
    ) -> str:
        """Render a conversation; `opened`: with a generation prompt. Raises what jinja raises."""
        given: JsonObject = {**options, "add_generation_prompt": opened}
        if tools:
            given["tools"] = self._control.mark_texts(list(tools))
        return self._render(list(messages), given)

    def template(self) -> str:
        """The chat template itself; empty where there is none."""
        return _template(self._folder)

    def _render(self, messages: list[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        with self._loading:  # threads may render
            if self._chat is None:
                from transformers import PreTrainedTokenizerFast

                self._chat = PreTrainedTokenizerFast.from_pretrained(
                    self._folder, local_files_only=True
                )
        options = {"add_generation_prompt": True, **options}
        text = self._chat.apply_chat_template(
            self._control.mark(messages), tokenize=False, **options
        )
        return self._control.rendered(text)

    def encode_texts(self, texts: Sequence[str], at_most: int) -> list[list[int]]:
        """Token ids of each text; of one that has far more than `at_most`, only the first ones."""
        beginnings = [self._beginning(text, at_most) for text in texts]
        batches = (
            beginnings[start : start + _BATCH] for start in range(0, len(beginnings), _BATCH)
        )
        encodings = (
            self._backend.encode_batch_fast(batch, add_special_tokens=False) for batch in batches
        )
        found = [encoding.ids for some in encodings for encoding in some]
        for place, text in enumerate(beginnings):
            if isinstance(text, Marked):
                found[place] = self.encode(text)
        return found

    def _beginning(self, text: str, at_most: int) -> str:
        size = _CHARACTERS * at_most
        while size < len(text):
            if len(self._backend.encode(text[:size], add_special_tokens=False)) > 2 * at_most:
                return text[:size]
            size *= 4
        return text

    def decode(self, token_ids: Sequence[Sequence[int]]) -> list[str]:
        return self._backend.decode_batch(
            [list(row) for row in token_ids], skip_special_tokens=True
        )

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Text with the special tokens in it, as it stands in a rendered conversation."""
        return self._backend.decode(list(token_ids), skip_special_tokens=False)


def without_stops(token_ids: Sequence[int], stops: Sequence[int]) -> list[int]:
    """Return a response's tokens without its final stop tokens."""
    end = len(token_ids)
    while end and token_ids[end - 1] in stops:
        end -= 1
    return list(token_ids[:end])


def has_template(folder: Path) -> bool:
    try:
        return bool(_template(folder))
    except ConfigError:
        return False


def _template(folder: Path) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8", errors="replace")
    found = _read_json(folder / "tokenizer_config.json").get("chat_template") or ""
    if isinstance(found, str):
        return found
    return " ".join(str(one.get("template")) for one in found)


def _stop_tokens(folder: Path, backend: Any) -> tuple[int, ...]:
    """End-of-sequence ids: from generation_config.json, else config.json, else the tokenizer."""
    for name in ("generation_config.json", "config.json"):
        eos = _read_json(folder / name).get("eos_token_id")
        if eos is not None:
            if isinstance(eos, list):
                return tuple(eos)
            return (int(eos),)
    token = _read_json(folder / "tokenizer_config.json").get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    found = backend.token_to_id(token) if token else None
    if found is None:
        raise ConfigError(
            f"model.path: no eos_token_id in {folder}/config.json or generation_config.json; add "
            "one"
        )
    return (found,)


def _read_json(path: Path) -> JsonObject:
    try:
        return read_json(path) if path.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"model.path: {error}") from None
