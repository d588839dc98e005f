"""Weights of any kind -> a plain Hugging Face folder. What an import was made of comes back byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megatron_rl.models.weight_files import EMBEDDING, TIED_COPY, header_entries
from megatron_rl.workshop.conversion import kept
from megatron_rl.workshop.conversion.sources import Source
from megatron_rl.workshop.conversion.to_folder import Beside, write_folder
from megatron_rl.workshop.conversion.weights import Get, Weights


def export_folder(source: Source, target: Path, note: Callable[[str], None]) -> None:
    weights, beside = source.plain, source.beside
    if beside.headers:
        weights = kept.with_extras(_with_tied_copy(weights, beside) if source.shape.tied else weights, beside.folder)
    write_folder(weights, target, beside, command="export", job=source.job, inputs=[source.path], note=note)


def _with_tied_copy(weights: Weights, beside: Beside) -> Weights:
    """Some folders hold tied embeddings twice."""
    if not any(TIED_COPY in header_entries(raw, Path(file)) for file, raw in beside.headers.items()):
        return weights

    def opened() -> Get:
        get = weights.open()
        return lambda name: get(EMBEDDING if name == TIED_COPY else name)

    return Weights({**weights.specs, TIED_COPY: replace(weights.specs[EMBEDDING], name=TIED_COPY)}, opened)
