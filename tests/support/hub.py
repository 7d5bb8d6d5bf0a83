"""A small server with as much of the Hugging Face hub's API as an upload takes, on a real socket, for HF_ENDPOINT."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_abcdefghijklmnopqrst"
OWNER = "me"


class Hub(ThreadingHTTPServer):
    """`repos`: (kind, name) -> {"private", "branches": branch -> path -> bytes}; `commits`: the paths of each commit.
    The next commit is refused where `failing` is set, as one that goes over a quota is."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[tuple[str, str], dict[str, Any]] = {}
        self.commits: list[list[str]] = []
        self.failing = False
        self.agents: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if found := re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+)(?:/revision/(.+))?", self.path):
            repo = self.server.repos.get((found[1], found[2]))
            if repo:
                return self._say(200, {"id": found[2], "sha": "0" * 40, "private": repo["private"]})
        return self._say(404, {"error": "Repository not found"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.agents.add(self.headers["User-Agent"])
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._say(401, {"error": "Invalid username or password."})
        if self.path == "/api/validate-yaml":
            return self._say(200, {"errors": [], "warnings": []})
        if self.path == "/api/repos/create":
            return self._create(json.loads(body))
        action = re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+)/(branch|preupload|commit)/([^?]+)", self.path)
        assert action, self.path
        branches = self.server.repos[action[1], action[2]]["branches"]
        if action[3] == "branch":
            if action[4] in branches:
                return self._say(409, {"error": "Reference already exists"})
            branches[action[4]] = dict(branches["main"])
            return self._say(200, {})
        if action[4] not in branches:
            return self._say(404, {"error": "Revision not found"})
        if action[3] == "preupload":
            return self._preupload(branches[action[4]], json.loads(body))
        return self._commit(action[2], branches[action[4]], [json.loads(line) for line in body.splitlines()])

    def _create(self, asked: dict[str, Any]) -> None:
        owner = asked.get("organization")
        name, kind = f"{owner or OWNER}/{asked['name']}", asked.get("type", "model")
        if owner not in (None, OWNER):
            return self._say(
                403, {"error": f"You don't have the rights to create a {kind} under the namespace {owner}"}
            )
        place = f"{self.server.url}/{'datasets/' if kind == 'dataset' else ''}{name}"
        if (kind, name) in self.server.repos:
            return self._say(409, {"error": "You already created this repo", "url": place})
        self.server.repos[kind, name] = {"private": asked.get("visibility") == "private", "branches": {"main": {}}}
        return self._say(200, {"url": place, "name": name})

    def _preupload(self, files: dict[str, bytes], asked: dict[str, Any]) -> None:
        """All files are regular ones. Those that are there come with their id in git."""
        answer = []
        for file in asked["files"]:
            there = files.get(file["path"])
            oid = hashlib.sha1(b"blob %d\0" % len(there) + there).hexdigest() if there is not None else None
            answer.append({"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": oid})
        self._say(200, {"files": answer})

    def _commit(self, name: str, files: dict[str, bytes], lines: list[dict[str, Any]]) -> None:
        if self.server.failing:
            self.server.failing = False
            return self._say(403, {"error": "Private repository storage limit reached"})
        new = {
            line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines if line["key"] == "file"
        }
        files.update(new)
        self.server.commits.append(sorted(new))
        self._say(200, {"commitUrl": f"{self.server.url}/{name}/commit/{'1' * 40}", "commitOid": "1" * 40})

    def _say(self, status: int, answer: Any) -> None:
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        if "error" in answer:
            self.send_header("X-Error-Message", answer["error"])
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass
