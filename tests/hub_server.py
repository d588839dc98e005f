"""A Hugging Face hub on loopback with repositories in memory, for the real client: model and data
set info, trees, files with ranges, redirects of large files to another host, faults.
"""

import hashlib
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hub_uploads import Uploads

API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?")
FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
LARGE = (".safetensors", ".parquet", ".bin")  # stored by Git LFS
TOKEN = "hf_of_the_tests"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class Repository:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False

    def commit_of(self, revision: str) -> str | None:
        found = self.refs.get(revision, revision)
        return found if found in self.commits else None


@dataclass
class Fault:
    """What happens to the next `times` requests whose method and path match."""

    path: str  # a regular expression, such as GET /cdn/
    times: int = 1
    status: int = 0  # of the response, instead of the content
    cut: int | None = None  # bytes of the content before the connection is closed
    content: bytes | None = None  # in place of the right one, as if it were complete
    headers: Mapping[str, str] = field(default_factory=dict)


class HubServer:
    """Repositories, faults to come, and the requests so far."""

    token = TOKEN

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.faults: list[Fault] = []
        self.stored: dict[str, bytes] = {}  # large files that were uploaded, by digest
        self.requests: list[str] = []  # method, path and range
        self.closed = False
        self.tokens: dict[str, set[str | None]] = {"hub": set(), "cdn": set()}
        self._servers = [_Server(self, "hub"), _Server(self, "cdn")]

    @property
    def url(self) -> str:
        return self._servers[0].url

    @property
    def cdn(self) -> str:
        return self._servers[1].url

    def add(
        self,
        name: str,
        files: Mapping[str, bytes] | Path,
        kind: str = "model",
        ref: str = "main",
        gated: bool = False,
    ) -> str:
        """Commit files, or those of a folder, to a branch or tag; return the commit."""
        if isinstance(files, Path):
            folder = files
            files = {
                str(path.relative_to(folder)): path.read_bytes()
                for path in sorted(folder.rglob("*"))
                if path.is_file()
            }
        one = self.repositories.setdefault((kind, name), Repository())
        one.gated = gated
        about = f"{len(one.commits)} {sorted((key, sha256(value)) for key, value in files.items())}"
        commit = hashlib.sha1(about.encode()).hexdigest()
        one.commits[commit] = dict(files)
        one.refs[ref] = commit
        return commit

    def files(self, name: str) -> Mapping[str, bytes]:
        """Files of a model at its newest commit."""
        repository = self.repositories["model", name]
        return repository.commits[repository.refs["main"]]

    def fetched(self) -> list[str]:
        """Names of the files whose content was requested."""
        found = [FILE.search(line) for line in self.requests if line.startswith("GET")]
        return [match[4].partition(" ")[0] for match in found if match]

    def fault_for(self, request: str) -> Fault | None:
        for fault in self.faults:
            if fault.times and re.search(fault.path, request):
                fault.times -= 1
                return fault
        return None

    def close(self) -> None:
        self.closed = True  # connections that a client keeps open are not answered either
        for server in self._servers:
            server.close()


class _Server:
    def __init__(self, hub: HubServer, role: str) -> None:
        handler = type("Handler", (_Handler,), {"hub": hub, "role": role})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(Uploads, BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer
    role: str

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        request = f"{self.command} {path}"
        if "Range" in self.headers:
            request += f" {self.headers['Range']}"
        self.hub.requests.append(request)
        if self.hub.closed:
            self.close_connection = True
            return
        self.hub.tokens[self.role].add(self.headers.get("Authorization"))
        self._fault = self.hub.fault_for(request)
        if self._fault and self._fault.status:
            self._send(self._fault.status, b"a fault", dict(self._fault.headers))
        elif path.startswith("/cdn/"):
            self._stored(path.removeprefix("/cdn/"))
        elif found := API.fullmatch(self.path.partition("?")[0]):
            self._api(*found.groups())
        elif found := FILE.fullmatch(path):
            self._file("dataset" if found[1] else "model", *found.groups()[1:])
        else:
            self._refuse(404, "")

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code} if code else {})

    def _api(self, kinds: str, name: str, what: str | None, revision: str | None) -> None:
        repository = self.hub.repositories.get((kinds.removesuffix("s"), name))
        if repository is None:
            self._refuse(401, "RepoNotFound")
            return
        commit = repository.commit_of(urllib.parse.unquote(revision or "main"))
        if commit is None:
            self._refuse(404, "RevisionNotFound")
            return
        files = repository.commits[commit]
        found: Any
        if what == "tree":
            found = [
                {"type": "file", "path": file, "size": len(content)} | _blob(file, content, "oid")
                for file, content in files.items()
            ]
        else:
            listed = [
                {"rfilename": file, "size": len(content)} | _blob(file, content, "blobId")
                for file, content in files.items()
            ]
            found = {"id": name, "sha": commit, "siblings": listed}
            found |= {"gated": repository.gated, "private": repository.private}
        self._send(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    def _file(self, kind: str, name: str, revision: str, file: str) -> None:
        repository = self.hub.repositories.get((kind, name))
        if repository is None:
            self._refuse(401, "RepoNotFound")
            return
        if repository.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._refuse(403, "GatedRepo")
            return
        commit = repository.commit_of(revision)
        if commit is None:
            self._refuse(404, "RevisionNotFound")
            return
        content = repository.commits[commit].get(file)
        if content is None:
            self._refuse(404, "EntryNotFound")
            return
        about = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        if file.endswith(LARGE):
            linked = {"X-Linked-Size": str(len(content)), "X-Linked-ETag": f'"{sha256(content)}"'}
            place = {"Location": f"{self.hub.cdn}/cdn/{sha256(content)}"}
            self._send(302, b"", about | linked | place)
            return
        self._content(content, about)

    def _stored(self, digest: str) -> None:
        """A large file, by its digest."""
        contents = (
            content
            for repository in self.hub.repositories.values()
            for files in repository.commits.values()
            for content in files.values()
        )
        self._content(next(one for one in contents if sha256(one) == digest), {})

    def _content(self, content: bytes, headers: dict[str, str]) -> None:
        if self._fault and self._fault.content is not None:
            content = self._fault.content
        ranged = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if ranged is None:
            self._send(200, content, headers | {"Accept-Ranges": "bytes"})
            return
        start = int(ranged[1])
        about = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        self._send(206, content[start:], headers | about)

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self._fault and self._fault.cut is not None:
            content = content[: self._fault.cut]
            self.close_connection = True
        self.wfile.write(content)


def _blob(file: str, content: bytes, key: str) -> dict[str, Any]:
    found: dict[str, Any] = {key: hashlib.sha1(content).hexdigest()}
    if file.endswith(LARGE):
        size = len(content)
        # the API of trees calls the digest oid
        found["lfs"] = {"sha256": sha256(content), "oid": sha256(content), "size": size}
        found["lfs"]["pointerSize"] = 134
    return found


def write_weights(model: Path, max_file_bytes: int) -> None:
    """Write random weights, in shards, beside a config.json."""
    import torch

    from megatron_rl.models.hf_folder import write_folder
    from megatron_rl.models.mapping import stored_params
    from megatron_rl.models.shape import ModelShape

    hf_config = json.loads((model / "config.json").read_text())
    torch.manual_seed(0)
    tensors = {
        name: torch.randn(size, dtype=torch.bfloat16) / 50
        for param in stored_params(ModelShape.from_hf(hf_config))
        for name, size in param.sizes.items()
    }
    write_folder(model, tensors, hf_config, max_file_bytes=max_file_bytes)


@contextmanager
def hub_server() -> Iterator[HubServer]:
    server = HubServer()
    try:
        yield server
    finally:
        server.close()


def use(server: HubServer, home: Path, patch: pytest.MonkeyPatch) -> None:
    """Let huggingface_hub in this process, which has read its variables, use this hub."""
    from huggingface_hub import constants

    patch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name, value in variables(server, home).items():  # for processes of the test
        patch.setenv(name, value)


def variables(server: HubServer, home: Path) -> dict[str, str]:
    """Environment of a process that uses this hub, with a cache of its own."""
    return {"HF_ENDPOINT": server.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
