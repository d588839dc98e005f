"""The hub module with the real client, against a hub on loopback: what is listed, downloaded and
found again, and the sentence for each fault.
"""

import errno
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from hub_server import TOKEN, Fault, HubServer, hub_server, sha256, use

from megatron_rl import hub

NAME = "org/small"
SHARD = bytes(range(256)) * (48 << 10)  # 12 MiB, more than a piece of the client's
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"[]",
    "model-1.safetensors": SHARD,
    "model-2.safetensors": b"second",
    "pytorch_model.bin": b"pickle",
    "modeling.py": b"code",
    "original/params.json": b"{}",
    "consolidated.safetensors": b"again",
}
NEEDED = hub.SMALL_FILES + hub.WEIGHTS


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.chdir(tmp_path)
    with hub_server() as server:
        server.commit = server.add(NAME, FILES)
        use(server, tmp_path / "home", monkeypatch)
        yield server


def the(text: str) -> hub.HubId:
    found = hub.parse(text)
    assert found is not None
    return found


def blobs(home: Path) -> list[int]:
    return sorted(path.stat().st_size for path in home.rglob("blobs/*"))


def test_a_text_is_an_id_unless_it_is_a_path(empty: Path) -> None:
    assert hub.parse("Qwen/Qwen3-8B") == hub.HubId("Qwen/Qwen3-8B")
    assert hub.parse("o/n@refs/pr/1") == hub.HubId("o/n", "refs/pr/1")
    (empty / "mine").mkdir()
    paths = (
        "models/Qwen3-8B",
        "runs/dapo@120",
        "mine/model",
        "/a/b",
        "./a/b",
        "a",
        "a/b/c",
        "",
        "a/b@",
    )
    assert [text for text in paths if hub.parse(text)] == []


def test_only_the_files_of_a_model_are_downloaded_and_found_without_the_hub(
    server: HubServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    listing = hub.list_files(the(NAME))
    assert listing.id == hub.HubId(NAME, server.commit)
    wanted = {"config.json", "tokenizer.json", "model-1.safetensors", "model-2.safetensors"}
    assert listing.matching(NEEDED) == {name: len(FILES[name]) for name in wanted}

    assert hub.cached(the(NAME), ("config.json",)) is None
    folder = hub.download(the(NAME), hub.SMALL_FILES)
    assert folder.name == server.commit
    assert hub.cached(the(NAME), NEEDED) is None  # the weights are not there
    assert hub.download(listing.id, NEEDED) == folder
    assert {path.name for path in folder.iterdir()} == wanted

    server.close()
    before = len(server.requests)
    assert hub.download(listing.id, NEEDED) == folder
    for text in (NAME, f"{NAME}@{server.commit}"):
        assert hub.cached(the(text), NEEDED) == folder
        assert hub.local_folder(text) == folder
    assert hub.local_folder("org/other") == Path("org/other")
    assert len(server.requests) == before
    assert "\r" not in capfd.readouterr().err  # no bars in a log


def test_a_revision_is_its_own_folder(server: HubServer) -> None:
    tagged = server.add(NAME, {"config.json": b'{"a": 1}'}, ref="v2")
    assert hub.download(the(f"{NAME}@v2"), hub.SMALL_FILES).name == tagged
    assert hub.download(the(NAME), hub.SMALL_FILES).name == server.commit


def test_a_data_set_is_found_beside_a_model_of_its_name(server: HubServer) -> None:
    server.add(NAME, {"data/train.parquet": b"rows"}, kind="dataset")
    one = hub.parse(NAME, "dataset")
    assert one is not None
    folder = hub.download(one, ("data/*.parquet",))
    assert (folder / "data" / "train.parquet").read_bytes() == b"rows"


def test_a_lost_connection_continues_where_it_was_lost(server: HubServer) -> None:
    server.faults.append(Fault("GET /cdn/", cut=11 << 20))
    folder = hub.download(the(NAME), ("model-1.safetensors",))
    assert (folder / "model-1.safetensors").read_bytes() == SHARD
    ranges = [line for line in server.requests if "bytes=" in line]
    assert len(ranges) == 1 and int(re.findall(r"bytes=(\d+)-", ranges[0])[0]) >= 10 << 20


def test_the_token_is_sent_to_the_hub_but_not_to_the_host_of_large_files(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    server.add("org/gated", FILES, gated=True)
    hub.download(the("org/gated"), NEEDED)
    assert server.tokens == {"hub": {f"Bearer {TOKEN}"}, "cdn": {None}}


WRONG = {
    "missing": ("org/none", None, "shows no model 'org/none'.*correct the name"),
    "revision": (f"{NAME}@v9", None, "no revision 'v9'; name a branch, tag or commit"),
    "invalid": ("org/a--b", None, "not a valid id; write ORG/NAME"),
    "gated": ("org/gated", None, r"is gated; accept its terms at http://\S+/org/gated, then run"),
    "token": (
        NAME,
        Fault(
            "GET /api/models",
            status=401,
            headers={"X-Error-Message": "Invalid credentials in Authorization header"},
        ),
        "refuses access.*renew HF_TOKEN",
    ),
    "rate": (NAME, Fault("GET /api/models", status=429), "limits the rate.*later"),
    "down": (NAME, Fault("GET /api/models", status=503), "answered with status 503.*later"),
    "down in the middle": (NAME, Fault("GET /cdn/", 9, status=503), "status 503.*later"),
    # a file of the list that the hub does not have
    "file": (
        NAME,
        Fault("(GET|HEAD) /org/small/resolve", 9, 404, headers={"X-Error-Code": "EntryNotFound"}),
        "status 404.*later",
    ),
    "refused": (NAME, Fault("(GET|HEAD) /org/small/resolve", 9, 403), "status 403.*HF_TOKEN"),
    "rate in the middle": (NAME, Fault("GET /cdn/", 99, 429), "limits the rate.*later"),
    "cut off in each attempt": (
        NAME,
        Fault("GET /cdn/", 99, cut=9),
        "was not received.*HF_HUB_ETAG_TIMEOUT",
    ),
    "cut off": (NAME, Fault("GET /cdn/", 9, content=b"short"), "size 12582912 but has size 5"),
    # the pointer that Git LFS stores in the place of the file
    "pointer": (
        NAME,
        Fault("GET /cdn/", 9, content=b"version https://git-lfs.github.com/spec/v1\n"),
        "was not received.*try again",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_fault_is_one_sentence_and_leaves_nothing_half_written(
    server: HubServer, tmp_path: Path, case: str
) -> None:
    text, fault, said = WRONG[case]
    server.add("org/gated", FILES, gated=True)
    if fault:
        server.faults.append(fault)
    with pytest.raises(hub.HubError, match=said) as caught:
        hub.download(the(text), ("config.json", "model-1.safetensors"))
    assert "\n" not in str(caught.value)
    assert hub.cached(the(text), ("config.json", "model-1.safetensors")) is None
    assert set(blobs(tmp_path / "home")) <= {len(FILES["config.json"])}


def test_a_stopped_process_leaves_nothing_that_is_used(server: HubServer, tmp_path: Path) -> None:
    """huggingface_hub gives each process a partial file of its own: it starts at the first byte."""
    left = tmp_path / "home/hub/models--org--small/blobs" / f"{sha256(SHARD)}.0a1b2c3d.incomplete"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    folder = hub.download(the(NAME), ("model-1.safetensors",))
    assert (folder / "model-1.safetensors").read_bytes() == SHARD
    assert not any("bytes=" in line for line in server.requests)


def test_a_full_disk_names_the_cache_and_leaves_nothing(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(url: str, file: BinaryIO, **more: Any) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    with pytest.raises(hub.HubError, match=r"cannot be written.*No space left.*free space"):
        hub.download(the(NAME), NEEDED)
    assert hub.cached(the(NAME), NEEDED) is None
    assert blobs(tmp_path / "home") == []


def test_what_cannot_be_written_names_the_cache(server: HubServer, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(hub.HubError, match=r"cannot be written to the cache \S+/hub .*HF_HOME"):
        hub.download(the(NAME), NEEDED)


def test_offline_the_cache_serves_what_it_holds(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(hub.HubUnreachable, match=r"HF_HUB_OFFLINE is set; run `megatron-rl fetch"):
        hub.download(the(NAME), hub.SMALL_FILES)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    folder = hub.download(the(NAME), hub.SMALL_FILES)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.download(the(NAME), hub.SMALL_FILES) == folder
    with pytest.raises(hub.HubUnreachable, match="not complete in the cache"):
        hub.download(the(NAME), NEEDED)


def test_without_a_network_the_way_out_is_named(server: HubServer) -> None:
    server.close()
    with pytest.raises(hub.HubUnreachable, match=r"not received from http.*`megatron-rl fetch"):
        hub.download(the(NAME), hub.SMALL_FILES)
