"""Requests by which the real client makes repositories and commits, for the hub of hub_server.py."""

import base64
import hashlib
import json
import re
from typing import Any

CREATE = "/api/repos/create"
COMMIT = re.compile(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main")
BATCH = re.compile(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch")
STORE = "/cdn/upload/"


class Uploads:
    """Mixin of the handler. Tokens other than the hub's are refused."""

    hub: Any
    headers: Any
    role: str
    _fault: Any = None

    def do_POST(self) -> None:
        body = self._body()
        path = self.path
        self.hub.requests.append(f"POST {path}")
        if fault := self.hub.fault_for(f"POST {path}"):
            self._json(fault.status, {"error": "a fault"})
        elif self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._json(401, {"error": "Invalid credentials in Authorization header"})
        elif path == CREATE:
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._json(200, {})
        elif found := BATCH.fullmatch(path):
            self._batch(json.loads(body))
        elif (found := COMMIT.fullmatch(path)) and found[2] == "preupload":
            modes = [
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if one["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for one in json.loads(body)["files"]
            ]
            self._json(200, {"files": modes})
        elif found:
            self._commit(found[1], [json.loads(line) for line in body.splitlines()])
        else:
            self._json(404, {})

    def do_PUT(self) -> None:
        """Content of a large file, which has to be that of its digest."""
        body = self._body()
        digest = self.path.removeprefix(STORE)
        self.hub.requests.append(f"PUT {self.path}")
        if fault := self.hub.fault_for(f"PUT {self.path}"):
            self._json(fault.status, {})
            return
        assert self.role == "cdn"
        assert hashlib.sha256(body).hexdigest() == digest
        self.hub.stored[digest] = body
        self._json(200, {})

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        url = {"url": f"{self.hub.url}/{name}"}
        if ("model", name) in self.hub.repositories:
            self._json(409, {"error": "You already created this model repo"} | url)
            return
        self.hub.add(name, {})
        self.hub.repositories["model", name].private = asked.get("visibility") == "private"
        self._json(200, url)

    def _batch(self, asked: dict[str, Any]) -> None:
        """Where to put the large files that are not here yet."""
        found = []
        for one in asked["objects"]:
            if one["oid"] not in self.hub.stored:
                one["actions"] = {"upload": {"href": f"{self.hub.cdn}{STORE}{one['oid']}"}}
            found.append(one)
        self._json(200, {"transfer": "basic", "objects": found})

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        files = dict(self.hub.files(name))
        for line in lines:
            about = line["value"]
            if line["key"] == "file":
                files[about["path"]] = base64.b64decode(about["content"])
            elif line["key"] == "lfsFile":
                files[about["path"]] = self.hub.stored[about["oid"]]
            elif line["key"] == "deletedFile":
                del files[about["path"]]
        commit = self.hub.add(name, files)
        url = f"{self.hub.url}/{name}/commit/{commit}"
        self._json(200, {"commitUrl": url, "commitOid": commit})

    def _body(self) -> bytes:
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _json(self, status: int, content: dict[str, Any]) -> None:
        self._send(status, json.dumps(content).encode(), {"Content-Type": "application/json"})
