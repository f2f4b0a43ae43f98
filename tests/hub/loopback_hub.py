"""A server on this machine that speaks what the Hub's client says: repositories, commits, large files, revisions."""

import base64
import fnmatch
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


# Environment of processes that speak to the server.
ONLINE = {"HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_fake", "HF_HUB_OFFLINE": "0"}
UPLOAD = """
    from pathlib import Path
    from recnmt_hf.hub.publishing import Destination, prepare_space, upload
    from recnmt_hf.models.user_errors import UserError
    try:
        folder = Path({folder!r})
        if not folder.exists():
            prepare_space({models!r}, folder, "tester/page")
        found = upload(folder, Destination(**{to!r}))
    except UserError as error:
        found = str(error)
"""


def git_oid(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def is_large(name):
    return fnmatch.fnmatch(name, "*.safetensors")


class Repository:
    def __init__(self, private):
        self.private = private
        self.commits = {}  # sha -> files
        self.revisions = {"main": self.commit({})}

    def commit(self, files):
        sha = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits[sha] = files
        return sha

    def at(self, revision):
        return self.revisions.get(revision, revision if revision in self.commits else None)


class Hub:
    """The state of the server, and what was asked of it."""

    def __init__(self):
        self.repositories, self.large, self.uploaded = {}, {}, []
        self.refuse = None  # a status with which all that writes is answered, with the access token


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, status, body=b"", **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def handle_any(self):
        path, body = unquote(urlsplit(self.path).path), self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.hub.refuse and self.command in ("POST", "PUT"):
            self.answer(self.hub.refuse, {"error": f"refused {self.headers.get('Authorization')}"})
            return
        try:
            for method, pattern, function in ROUTES:
                if self.command in method and (found := re.fullmatch(pattern, path)):
                    function(self, body, *found.groups())
                    return
            raise LookupError("RepoNotFound")
        except LookupError as error:
            self.answer(404, {"error": str(error)}, X_Error_Code=str(error))

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any

    def create(self, body):
        wish = json.loads(body)
        name = f"{wish.get('organization') or 'tester'}/{wish['name']}"
        if name in self.hub.repositories:
            self.answer(409, {"error": "exists", "url": f"{self.home}/{name}"})
            return
        self.hub.repositories[name] = Repository(wish.get("private", False) or wish.get("visibility") == "private")
        self.answer(200, {"url": f"{self.home}/{name}", "name": name, "id": name})

    @property
    def home(self):
        return f"http://{self.headers['Host']}"

    def validate(self, body):
        is_wrong = "\nlicense: nonsense\n" in json.loads(body)["content"]
        errors = [{"message": '"license" must be one of [mit]'}] if is_wrong else []
        self.answer(400 if errors else 200, {"errors": errors, "warnings": []})

    def find(self, name, revision="main"):
        """Return a repository, and the commit and the files of a revision."""
        repository = self.hub.repositories.get(name)
        sha = repository and repository.at(revision)
        if sha is None:
            raise LookupError("RepoNotFound" if repository is None else "RevisionNotFound")
        return repository, sha, repository.commits[sha]

    def info(self, body, name, revision="main"):
        repository, sha, files = self.find(name, revision)
        siblings = [{"rfilename": file} for file in files]
        self.answer(200, {"id": name, "sha": sha, "private": repository.private, "siblings": siblings, "tags": []})

    def tree(self, body, name, revision, folder):
        entries = []
        for file, data in self.find(name, revision)[2].items():
            if file.startswith(f"{folder}/" if folder else ""):
                entry = {"type": "file", "path": file, "size": len(data), "oid": git_oid(data)}
                if is_large(file):
                    sha256 = hashlib.sha256(data).hexdigest()
                    entry |= {"lfs": {"oid": sha256, "size": len(data), "pointerSize": 130}, "oid": "0" * 40}
                entries.append(entry)
        if folder and not entries:
            raise LookupError("EntryNotFound")
        self.answer(200, entries)

    def preupload(self, body, name, revision):
        present, files = self.find(name, revision)[2], []
        for file in json.loads(body)["files"]:
            known, mode = present.get(file["path"]), "lfs" if is_large(file["path"]) else "regular"
            oid = known and (hashlib.sha256(known).hexdigest() if mode == "lfs" else git_oid(known))
            files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.answer(200, {"files": files})

    def large_batch(self, body, name):
        objects = []
        for each in json.loads(body)["objects"]:
            actions = {"upload": {"href": f"{self.home}/large/{each['oid']}"}}
            objects.append({**each, **({} if each["oid"] in self.hub.large else {"actions": actions})})
        self.answer(200, {"transfer": "basic", "objects": objects})

    def large_file(self, body, oid):
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.large[oid] = body
        self.answer(200, {})

    def commit(self, body, name, revision):
        repository, _, files = self.find(name, revision)
        files = dict(files)
        for entry in map(json.loads, body.decode().splitlines()):
            key, value = entry["key"], entry["value"]
            if key == "deletedFile":
                files.pop(value["path"])
            elif key != "header":
                self.hub.uploaded.append(value["path"])
                is_small = key == "file"
                files[value["path"]] = base64.b64decode(value["content"]) if is_small else self.hub.large[value["oid"]]
        sha = repository.commit(files)
        answer = {"success": True, "commitOid": sha, "commitUrl": f"{self.home}/{name}/commit/{sha}"}
        if "create_pr=1" in self.path:
            answer["pullRequestUrl"] = f"{self.home}/{name}/discussions/1"
            revision = "refs/pr/1"
        repository.revisions[revision] = sha
        self.answer(200, answer)

    def branch(self, body, name, branch):
        repository, sha, _ = self.find(name)
        repository.revisions[branch] = sha
        self.answer(200, {})

    def tag(self, body, name, revision):
        repository, sha, _ = self.find(name, revision)
        repository.revisions[json.loads(body)["tag"]] = sha
        self.answer(200, {})

    def resolve(self, body, name, revision, file):
        _, sha, files = self.find(name, revision)
        if file not in files:
            raise LookupError("EntryNotFound")
        self.answer(200, files[file], ETag=f'"{git_oid(files[file])}"', X_Repo_Commit=sha, Accept_Ranges="none")


NAME, KIND = r"([\w.-]+/[\w.-]+)", "(?:models|spaces)"
ROUTES = [
    (("POST",), "/api/repos/create", Handler.create),
    (("POST",), "/api/validate-yaml", Handler.validate),
    (("POST",), f"/api/{KIND}/{NAME}/preupload/(.+)", Handler.preupload),
    (("POST",), f"/(?:spaces/)?{NAME}\\.git/info/lfs/objects/batch", Handler.large_batch),
    (("PUT",), "/large/([0-9a-f]+)", Handler.large_file),
    (("POST",), f"/api/{KIND}/{NAME}/commit/(.+)", Handler.commit),
    (("POST",), f"/api/{KIND}/{NAME}/branch/(.+)", Handler.branch),
    (("POST",), f"/api/{KIND}/{NAME}/tag/(.+)", Handler.tag),
    (("GET",), f"/api/{KIND}/{NAME}/tree/(refs/pr/\\d+|[^/]+)(?:/(.+))?", Handler.tree),
    (("GET", "HEAD"), f"/api/{KIND}/{NAME}/revision/(.+)", Handler.info),
    (("GET", "HEAD"), f"/api/{KIND}/{NAME}", Handler.info),
    (("GET", "HEAD"), f"/(?:spaces/)?{NAME}/resolve/(refs/pr/\\d+|[^/]+)/(.+)", Handler.resolve),
]


def upload(publisher, hub, folder, models=(), **to):
    """Upload a folder, a Space of models if it is absent, from another process; its answer, and the files it sends."""
    before = len(hub.uploaded)
    said = publisher(UPLOAD.format(folder=str(folder), models=list(models), to=to), folder.parent)
    return said, hub.uploaded[before:]


@contextmanager
def loopback_hub():
    """Yields the state and the address of a running server."""
    hub = Hub()
    with ThreadingHTTPServer(("127.0.0.1", 0), type("OwnHandler", (Handler,), {"hub": hub})) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield hub, f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
