"""Published tables, or generated tasks, to one file for a run:

    python tools/prepare_data.py dapo_math_17k dapo-math-17k.parquet -o data/dapo_math/train.parquet
    python tools/prepare_data.py math MATH/train --keep-between 0.2 0.8 --pass-rates rates.jsonl -o
    data/sanity.parquet
    python tools/prepare_data.py reasoning_gym chain_sum --count 10000 -o
    data/chain_sum/train.parquet

Inputs are files or folders that are here already. What comes out has the columns `prompt` (text),
`answer`, `data_source`, `question` (the prompt without an instruction) and `metadata` (JSON), one
row for each prompt. Rows with one prompt are one row; prompts whose rows disagree on the answer are
left out. Counts and a checksum are printed, and stand in the file's own metadata too; the same
input gives the same checksum. `--show N` prints rows and writes nothing.
"""

from __future__ import annotations

from megatron_rl.processes.interrupts import leaving_at_once

with leaving_at_once():
    import argparse
    import hashlib
    import json
    import sys
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from dataclasses import dataclass
    from itertools import chain, islice
    from pathlib import Path
    from typing import Any

    import pyarrow as pa
    import pyarrow.parquet as pq

    from megatron_rl.config import ConfigError
    from megatron_rl.data.answers import Unusable, after_hashes, boxed_or_plain, whole_number
    from megatron_rl.data.dataset import distinct
    from megatron_rl.data.layouts import field, has
    from megatron_rl.data.rows import read_rows
    from megatron_rl.data.toy import entries
    from megatron_rl.files import replacing
    from megatron_rl.processes.process import run_script

PIECE = 1024  # rows of a row group: what one draw has to decode
SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("prompt", "answer", "data_source", "question", "metadata")]
)
INSTRUCTIONS = {
    "none": "{}",
    "answer_line": "{}\n\nThink step by step. The last line of your response must be: Answer: followed by the answer.",
    "boxed": "{}\n\nThink step by step, and put the final answer within \\boxed{...}.",
    "answer_tags": "{}\n\nGive the final answer between <answer> and </answer>.",
}
_KEPT = (
    "level",
    "type",
    "subject",
    "difficulty",
    "unique_id",
    "id",
    "ID",
    "url",
    "year",
    "source_dataset",
    "index",
)


@dataclass(frozen=True)
class Kind:
    """Layout of a published table: columns that may hold the question and the answer, the
    first that is there.
    """

    questions: tuple[str, ...]
    answers: tuple[str, ...]
    answer: Callable[[str], str] = str.strip


KINDS = {
    "dapo_math_17k": Kind(
        ("prompt",), ("reward_model.ground_truth", "label", "answer", "solution")
    ),
    "aime_2024": Kind(
        ("prompt", "problem", "question"), ("reward_model.ground_truth", "answer"), whole_number
    ),
    "aime_2025": Kind(
        ("prompt", "problem", "question"), ("reward_model.ground_truth", "answer"), whole_number
    ),
    "gsm8k": Kind(("question",), ("answer",), after_hashes),
    "math": Kind(("problem", "question"), ("answer", "solution"), boxed_or_plain),
    "math500": Kind(("problem", "question"), ("answer", "solution"), boxed_or_plain),
    "deepscaler": Kind(("problem", "question"), ("answer",), boxed_or_plain),
}


@dataclass(frozen=True)
class Tables:
    """Rows of published tables."""

    name: str
    kind: Kind
    files: Sequence[tuple[str, Sequence[dict[str, Any]]]]

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for path, rows in self.files:
            for number, row in enumerate(rows):
                yield f"row {number} of {path}", row

    def question_and_answer(self, where: str, row: dict[str, Any]) -> tuple[str, str]:
        try:
            question = question_of(row, self.kind)
            answer = self.kind.answer(text_of(row, self.kind.answers))
            if not question.strip() or not answer:
                raise Unusable("an empty question or answer")
        except Unusable as error:
            raise ConfigError(
                f"{where} has {error}; remove it, or name the kind of this table"
            ) from None
        return question, answer

    def metadata(self, row: dict[str, Any]) -> dict[str, Any]:
        return {name: row[name] for name in _KEPT if name in row}


@dataclass(frozen=True)
class Generated:
    """Entries of tasks of reasoning-gym; the same each time that they are read."""

    name: str
    tasks: Sequence[str]
    count: int
    seed: int
    settings: Mapping[str, Any]

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        return entries(self.tasks, self.count, self.seed, self.settings)

    def question_and_answer(self, where: str, row: dict[str, Any]) -> tuple[str, str]:
        return row["question"], "" if row["answer"] is None else str(row["answer"])

    def metadata(self, row: dict[str, Any]) -> dict[str, Any]:
        return row["metadata"]


def question_of(row: Mapping[str, Any], kind: Kind) -> str:
    name = next((name for name in kind.questions if has(row, name)), None)
    if name is None:
        raise Unusable(f"{', '.join(row) or 'no columns'}, and no {' or '.join(kind.questions)}")
    asked = field(row, name)
    if isinstance(asked, list) and len(asked) == 1 and isinstance(asked[0], dict):
        asked = asked[0].get("content")  # a conversation of one message
    if not isinstance(asked, str):
        raise Unusable(f"a {name!r} that is neither text nor one message")
    return asked


def text_of(row: Mapping[str, Any], names: tuple[str, ...]) -> str:
    for name in names:
        if has(row, name):
            value = field(row, name)
            if isinstance(value, list) and len(value) == 1:
                value = value[0]
            if isinstance(value, (str, int, float)):
                return str(value)
            raise Unusable(f"a {name!r} that is {type(value).__name__}")
    raise Unusable(f"{', '.join(row) or 'no columns'}, and no {' or '.join(names)}")


def pass_rates(path: str) -> dict[str, float]:
    """By prompt, as an evaluation has written them: rows with `prompt` and `pass_rate`."""
    rows = read_rows("--pass-rates", Path(path))
    rates = {}
    for number, row in enumerate(rows):
        try:
            rates[row["prompt"]] = float(row["pass_rate"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"--pass-rates: {rows.place(number)} lacks text in 'prompt' or a number in "
                f"'pass_rate' ({error})"
            ) from None
    return rates


class Prepared:
    """The rows that stay, counted. They are read twice: once to know which, once to write them."""

    def __init__(self, source: Tables | Generated, instruction: str) -> None:
        self._source = source
        self._instruction = instruction
        self.rates: Mapping[str, float] | None = None
        self.between = (0.0, 1.0)
        found = distinct(
            (question.encode(), answer.encode())
            for question, answer in (
                source.question_and_answer(where, row) for where, row in source
            )
        )
        self._kept = found.rows
        self._found = found
        self.rows = self.written = self.outside = 0
        self._sum = hashlib.sha256()

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        """In the order of SCHEMA."""
        source = self._source
        kept = chain(map(int, self._kept), [-1])
        awaited = next(kept)
        for self.rows, (where, row) in enumerate(source, 1):
            if self.rows - 1 != awaited:
                continue
            awaited = next(kept)
            question, answer = source.question_and_answer(where, row)
            prompt = self._instruction.replace("{}", question)
            if self.rates is not None and not self._is_between(prompt, question):
                self.outside += 1
                continue
            metadata = json.dumps(source.metadata(row), ensure_ascii=False, default=str)
            made = (prompt, answer, source.name, question, metadata)
            self._sum.update(json.dumps(made).encode())
            self.written += 1
            yield made

    def _is_between(self, prompt: str, question: str) -> bool:
        assert self.rates is not None
        low, high = self.between
        rate = self.rates.get(prompt, self.rates.get(question))
        return rate is not None and low <= rate <= high

    def summary(self) -> dict[str, Any]:
        """Once all rows have been read."""
        return {
            "kind": self._source.name,
            "rows": self.rows,
            "duplicates": self._found.duplicates,
            "with_two_answers": self._found.conflicts,
            "outside_pass_rates": self.outside,
            "prompts": self.written,
            "sha256": self._sum.hexdigest(),
        }


def source(options: argparse.Namespace) -> Tables | Generated:
    if options.kind == "reasoning_gym":
        try:
            own = json.loads(options.options)
        except (ValueError, RecursionError):
            own = None
        if not isinstance(own, dict) or options.count < 1:
            given = f"--options {options.options[:80]} --count {options.count}"
            raise ConfigError(f"{given}: expected a JSON object, and 1 or more")
        return Generated(options.kind, options.inputs, options.count, options.seed, own)
    files = [(path, read_rows("INPUT", Path(path))) for path in options.inputs]
    return Tables(options.kind, KINDS[options.kind], files)


def write(prepared: Prepared, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        with pq.ParquetWriter(partial, SCHEMA, compression="zstd") as file:
            rows = iter(prepared)
            while piece := list(islice(rows, PIECE)):
                file.write_batch(
                    pa.record_batch(
                        [list(column) for column in zip(*piece, strict=True)], schema=SCHEMA
                    )
                )
            file.add_key_value_metadata({"prepared": json.dumps(prepared.summary())})
        if not prepared.written:
            raise ConfigError(f"no prompt is left to write ({prepared.summary()})")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=[*KINDS, "reasoning_gym"])
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="files or folders; for reasoning_gym names of tasks",
    )
    parser.add_argument("-o", "--output", type=Path, help="the .parquet file to write")
    parser.add_argument(
        "--instruction", choices=INSTRUCTIONS, default="none", help="what is added to each question"
    )
    parser.add_argument(
        "--show",
        type=int,
        default=0,
        metavar="N",
        help="print N rows and the counts, write nothing",
    )
    parser.add_argument("--pass-rates", metavar="FILE", help="rows with prompt and pass_rate")
    parser.add_argument(
        "--keep-between",
        nargs=2,
        type=float,
        metavar=("LOW", "HIGH"),
        help="of --pass-rates: 0.2 0.8",
    )
    parser.add_argument("--count", type=int, default=1000, help="reasoning_gym: rows of each task")
    parser.add_argument(
        "--seed", type=int, default=1, help="reasoning_gym: another seed, other rows"
    )
    parser.add_argument(
        "--options", default="{}", metavar="JSON", help="reasoning_gym: the task's own settings"
    )
    options = parser.parse_args(arguments)
    if options.show < 1 and options.output is None:
        parser.error("name the file to write with -o, or look with --show 3")
    if options.output and options.output.suffix != ".parquet":
        parser.error(
            f"--output {options.output}: Parquet is written; name a file that ends in .parquet"
        )
    if options.keep_between and not options.pass_rates:
        parser.error("--keep-between: of which rates? name their file with --pass-rates")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        prepared = Prepared(source(options), INSTRUCTIONS[options.instruction])
        if options.pass_rates:
            prepared.rates = pass_rates(options.pass_rates)
            prepared.between = tuple(options.keep_between or (0.2, 0.8))
        if options.show > 0:
            rows = iter(prepared)
            for row in islice(rows, options.show):
                print(
                    json.dumps(
                        dict(zip(SCHEMA.names, row, strict=True)), ensure_ascii=False, indent=2
                    )
                )
            for _ in rows:
                pass
        else:
            write(prepared, options.output)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (ValueError, TypeError, AssertionError) as error:  # of a task's own settings
        print(f"error: {options.kind} {' '.join(options.inputs)}: {error}", file=sys.stderr)
        return 2
    print(json.dumps(prepared.summary()))
    return 0


if __name__ == "__main__":
    run_script(main)
