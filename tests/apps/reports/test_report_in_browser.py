"""Text of models, data sets and servers in a report in a browser: none of it is executed."""

import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from run_factory import make_config, make_scored, make_yaml

from megatron_rl.apps.reports.report import write_report
from megatron_rl.logs import logger
from megatron_rl.tracking.console import PlainDisplay
from megatron_rl.tracking.record import Recorder

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
RUNS = "document.body.setAttribute('data-ran','yes');document.title='ran'"
HOSTILE = (
    f"<script>{RUNS}</script>",
    f"</script><script>{RUNS}</script>",
    f'</pre></td></table><img src=x onerror="{RUNS}">',
    f"' onmouseover='{RUNS}' autofocus onfocus='{RUNS}' x='",
    f'<a href="javascript:{RUNS}">here</a><iframe srcdoc="<script>parent.{RUNS}</script>"></iframe>',
    f'<!--<script>{RUNS}//--></style></title></textarea><svg onload="{RUNS}">',
    "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x1b[0m\r\x00\x08\x7f\x9b31m",
    "from right \u202e to left, a null \x00, half a pair \ufffd",
    "<b>" + "long " * 200_000,
)


def hostile_run(folder: Path) -> tuple[Path, str]:
    """A run with hostile text everywhere, and its terminal output."""
    config = make_config()
    said = StringIO()
    with Recorder(
        config.log, make_yaml(config, "run"), folder / "run", 3, PlainDisplay(said)
    ) as recorder:
        for step in range(1, 4):
            scored, prox_BT = make_scored(len(HOSTILE), seed=step)
            bad = [worded(one, text) for one, text in zip(scored, HOSTILE, strict=True)]
            lengths = [len(one.rollout.token_ids) for one in bad]
            pieces = {row: [text] * lengths[row] for row, text in enumerate(HOSTILE)}
            recorder.rollouts(
                step, bad, prox_logprobs_BT=prox_BT, pieces=pieces, truths=list(HOSTILE)
            )
            recorder.log(step, {"reward/mean": 0.5, "loss/total": 0.1})
            logger("server").info(HOSTILE[0])
    return folder / "run", said.getvalue()


def worded(one, text: str):
    prompt = replace(
        one.rollout.prompt,
        text=text,
        row={"answer": text, "prompt": text},
    )
    rollout = replace(
        one.rollout,
        prompt=prompt,
        finish_reason=text[:300],
        format=text[:300],
    )
    return replace(one, rollout=rollout, text=text, error=text[:500])


@pytest.mark.fault(
    "prompts, answers and errors hold scripts, escapes, half characters",
    "a report shows them; none runs",
)
@pytest.mark.skipif(BROWSER is None, reason="needs a Chromium")
def test_nothing_of_them_runs(tmp_path: Path) -> None:
    run, screen = hostile_run(tmp_path)
    assert not set(screen) & set("\x1b\x07\x00\x08\x9b"), "a terminal would act on it"
    page = tmp_path / "again.html"
    write_report([run], page)
    found = opened(page, tmp_path / "profile")
    seen = Elements()
    seen.feed(found)
    assert "main" in seen.tags
    assert not seen.tags & {"iframe", "img", "object", "embed", "base"}
    assert not [
        name for name, value in seen.attributes if name.startswith("on") or name == "data-ran"
    ]
    assert not [
        value
        for _, value in seen.attributes
        if (value or "").strip().lower().startswith("javascript:")
    ]
    assert "<title>ran" not in found
    assert "&lt;script&gt;document.body" in found
    assert len(found) < 10 * len(HOSTILE[-1]) + 8 * 2**20


class Elements(HTMLParser):
    """Tags and attributes of a document."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[tuple[str, str | None]] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= set(attrs)


def opened(page: Path, profile: Path) -> str:
    """The document after all of its scripts have run."""
    words = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={profile}",
    ]
    words += ["--virtual-time-budget=10000", "--dump-dom", page.as_uri()]
    return subprocess.run(
        words,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout
