"""Stock vLLM: the logprob of every token of some texts, for each of some folders.

`python -P plain_logprobs.py`, in a process of its own that imports nothing of this project. Reads
{"folders": [...], "rows": [[token id, ...], ...], "arguments": {...of vllm.LLM}} from stdin; writes
a line of JSON per folder: a list of numbers per row, its first token left out, or {"error": ...}.
"""

import json
import os
import sys
from typing import Any


def main() -> None:
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM writes to both
    request = json.load(sys.stdin)
    from vllm import LLM, SamplingParams

    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=1.0, detokenize=False)
    for folder in request["folders"]:
        try:
            llm: Any = LLM(model=folder, skip_tokenizer_init=True, **request["arguments"])
            answers = llm.generate(
                [{"prompt_token_ids": row} for row in request["rows"]], asked, use_tqdm=False
            )
            found: Any = [
                [
                    position[token].logprob
                    for token, position in zip(row[1:], answer.prompt_logprobs[1:], strict=True)
                ]
                for row, answer in zip(request["rows"], answers, strict=True)
            ]
            llm.llm_engine.engine_core.shutdown()
            del llm
        except (
            Exception
        ) as error:  # of every kind: what vLLM says of a folder that it does not take
            found = {"error": f"{type(error).__name__}: {error}"}
        said.write(json.dumps(found) + "\n")
        said.flush()


if __name__ == "__main__":
    main()
