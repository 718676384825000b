"""A Hub on this machine: an HTTP server with the part of the Hub's API that its own client calls to read and write model repos.

Repos, commits, branches and tokens are real; large files go through the LFS protocol, as .safetensors and pictures do on the Hub.
"""

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

LARGE = (".safetensors", ".png", ".webp")


class Refused(Exception):
    """An answer that is no success: status, the Hub's code for it, a text, and what else its body holds."""

    def __init__(self, status: int, code: str = "", text: str = "", **more: str) -> None:
        super().__init__(text)
        self.status, self.code, self.text, self.more = status, code, text, more


@dataclass
class Repo:
    """Commits hold all files of their moment; refs name commits."""

    private: bool = False
    gated_for: set[str] | None = None  # users who were let in; None: not gated
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, files: dict[str, bytes], ref: str = "main", message: str = "") -> str:
        sha = hashlib.sha1(f"{ref}{len(self.commits)}".encode()).hexdigest()
        self.commits[sha] = {**self.commits.get(self.refs.get(ref, ""), {}), **files}
        self.refs[ref] = sha
        self.messages.append(message)
        return sha

    def at(self, revision: str) -> str:
        sha = self.refs.get(revision, revision)
        if sha not in self.commits:
            raise Refused(404, "RevisionNotFound", "Invalid rev id")
        return sha

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.at(revision)]


def oid_of(path: str, blob: bytes) -> str:
    if path.endswith(LARGE):
        return hashlib.sha256(blob).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(blob) + blob).hexdigest()


class FakeHub:
    """The server; `with FakeHub() as hub` runs it.

    Attributes:
        repos: id -> Repo. tokens: token -> user. requests: "METHOD path" of everything that was asked.
        lying: path of a file -> what goes wrong with it: "huge" (its size is said to be 300 MiB) or "cut" (half of it is sent).
        failing: "" or "answer", every answer is a 500, or "hang up", there is none.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.tokens: dict[str, str] = {}
        self.requests: list[str] = []
        self.lying: dict[str, str] = {}
        self.failing = ""
        self.large: dict[str, bytes] = {}
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> "FakeHub":
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def add(self, repo_id: str, files: dict[str, bytes], **options: Any) -> Repo:
        self.repos[repo_id] = Repo(**options)
        self.repos[repo_id].commit({".gitattributes": b"*.safetensors filter=lfs\n", **files})
        return self.repos[repo_id]


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    # -- who asks, and for what

    @property
    def user(self) -> str | None:
        told = self.headers.get("authorization")
        if told is None:
            return None
        user = self.hub.tokens.get(told.removeprefix("Bearer "))
        if user is None:
            raise Refused(401, text="Invalid credentials in Authorization header")
        return user

    def repo(self, repo_id: str, *, content: bool = False, write: bool = False) -> Repo:
        repo, user = self.hub.repos.get(repo_id), self.user
        hidden = repo is None or (repo.private and user != repo_id.split("/")[0])
        if repo is None or hidden:
            raise Refused(401 if user is None else 404, "RepoNotFound", "Repository not found")
        if content and repo.gated_for is not None and user not in repo.gated_for:
            raise Refused(401 if user is None else 403, "GatedRepo", f"Access to model {repo_id} is restricted")
        if write and user != repo_id.split("/")[0]:
            raise Refused(401 if user is None else 403, text="Forbidden")
        return repo

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None, size: int | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if size is None else size))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def json(self, value: Any, status: int = 200) -> None:
        self.answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def handle_one(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        self.body = self.rfile.read(length) if length else b""
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.hub.requests.append(f"{self.command} {unquote(url.path)}")
        try:
            if self.hub.failing == "hang up":
                self.close_connection = True
                return
            if self.hub.failing:
                raise Refused(500, text="the server is on fire")
            self.route([unquote(part) for part in url.path.strip("/").split("/")])
        except Refused as error:
            headers = {"X-Error-Message": error.text, **({"X-Error-Code": error.code} if error.code else {})}
            self.answer(error.status, json.dumps({"error": error.text, **error.more}).encode(), headers)

    do_GET = do_HEAD = do_POST = do_PUT = handle_one

    def route(self, parts: list[str]) -> None:
        match parts:
            case ["api", "repos", "create"]:
                self.create()
            case ["api", "validate-yaml"]:
                self.validate()
            case ["api", "models", user, name]:
                self.info(f"{user}/{name}", "main")
            case ["api", "models", user, name, "revision", revision]:
                self.info(f"{user}/{name}", revision)
            case ["api", "models", user, name, "branch", branch]:
                self.branch(f"{user}/{name}", branch)
            case ["api", "models", user, name, "preupload", revision]:
                self.preupload(f"{user}/{name}", revision)
            case ["api", "models", user, name, "commit", revision]:
                self.commit(f"{user}/{name}", revision)
            case [user, name, "info", "lfs", "objects", "batch"]:
                self.lfs(f"{user}/{name.removesuffix('.git')}")
            case ["lfs", oid]:
                self.upload(oid)
            case [user, name, "resolve", revision, *path]:
                self.resolve(f"{user}/{name}", revision, "/".join(path))
            case _:
                raise Refused(404, text=f"this hub does not know {self.command} {self.path}")

    # -- reading

    def info(self, repo_id: str, revision: str) -> None:
        repo = self.repo(repo_id)
        sha = repo.at(revision)
        siblings = [{"rfilename": path} for path in sorted(repo.commits[sha])]
        self.json({"id": repo_id, "sha": sha, "private": repo.private, "siblings": siblings})

    def resolve(self, repo_id: str, revision: str, path: str) -> None:
        repo = self.repo(repo_id, content=True)
        sha = repo.at(revision)
        blob = repo.commits[sha].get(path)
        if blob is None:
            raise Refused(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": sha, "ETag": f'"{oid_of(path, blob)}"'}
        lie = self.hub.lying.get(path)
        if self.command == "HEAD":
            self.answer(200, headers=headers, size=300 * 2**20 if lie == "huge" else len(blob))
        else:
            self.answer(200, blob[: len(blob) // 2] if lie == "cut" else blob, headers)

    # -- writing

    def create(self) -> None:
        told = json.loads(self.body)
        user = self.user
        if user is None:
            raise Refused(401, text="Invalid username or password.")
        repo_id = f"{told.get('organization') or user}/{told['name']}"
        if repo_id in self.hub.repos:
            raise Refused(409, text="You already created this model repo", url=f"{self.hub.endpoint}/{repo_id}")
        if not repo_id.startswith(f"{user}/"):
            raise Refused(403, text="You don't have the rights to create a model under this namespace")
        self.hub.add(repo_id, {}, private=told.get("visibility") == "private")
        self.json({"url": f"{self.hub.endpoint}/{repo_id}"})

    def validate(self) -> None:
        text = json.loads(self.body)["content"]
        try:
            held = yaml.safe_load(text.split("---\n")[1]) if text.startswith("---\n") else {}
            wrong = [name for name in ("license", "library_name", "pipeline_tag") if not isinstance(held.get(name, ""), str)]
        except yaml.YAMLError as error:
            wrong = [str(error)]
        self.json({"errors": [{"message": each} for each in wrong], "warnings": []}, 400 if wrong else 200)

    def branch(self, repo_id: str, branch: str) -> None:
        repo = self.repo(repo_id, write=True)
        if branch in repo.refs:
            raise Refused(409, text="Reference already exists")
        repo.refs[branch] = repo.refs["main"]
        self.json({}, 201)

    def preupload(self, repo_id: str, revision: str) -> None:
        repo = self.repo(repo_id, write="create_pr" not in self.query)
        there = repo.files(revision)
        files = [
            {
                "path": each["path"],
                "uploadMode": "lfs" if each["path"].endswith(LARGE) else "regular",
                "shouldIgnore": False,
                "oid": oid_of(each["path"], there[each["path"]]) if each["path"] in there else None,
            }
            for each in json.loads(self.body)["files"]
        ]
        self.json({"files": files})

    def lfs(self, repo_id: str) -> None:
        self.repo(repo_id)
        objects = []
        for each in json.loads(self.body)["objects"]:
            upload = {"upload": {"href": f"{self.hub.endpoint}/lfs/{each['oid']}", "header": {}}}
            objects.append({**each, **({} if each["oid"] in self.hub.large else {"actions": upload})})
        self.json({"transfer": "basic", "objects": objects})

    def upload(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Refused(400, text="not the object that was announced")
        self.hub.large[oid] = self.body
        self.answer(200)

    def commit(self, repo_id: str, revision: str) -> None:
        wants_pr = "create_pr" in self.query
        repo = self.repo(repo_id, write=not wants_pr)
        head = repo.at(revision)
        files, header = {}, {}
        for line in self.body.splitlines():
            told = json.loads(line)
            value = told["value"]
            if told["key"] == "header":
                header = value
            elif told["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif told["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
        if header.get("parentCommit", head) != head:
            raise Refused(412, text="A commit has happened since. Please refresh and try again.")
        ref = "refs/pr/1" if wants_pr else revision
        if wants_pr:
            repo.refs[ref] = head
        sha = repo.commit(files, ref, header["summary"])
        pr = f"{self.hub.endpoint}/{repo_id}/discussions/1" if wants_pr else None
        self.json({"commitUrl": f"{self.hub.endpoint}/{repo_id}/commit/{sha}", "commitOid": sha, "pullRequestUrl": pr})
