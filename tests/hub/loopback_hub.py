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


LICENCES = ("apache-2.0", "mit", "cc0-1.0", "afl-3.0", "other")


def git_oid(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def is_large(name):
    return fnmatch.fnmatch(name, "*.safetensors")


class Repository:
    def __init__(self, private):
        self.private = private
        self.commits = {}  # sha -> files
        self.revisions = {"main": self.commit({}, "initial")}
        self.pull_requests = 0

    def commit(self, files, message):
        sha = hashlib.sha1(repr((len(self.commits), sorted(files), message)).encode()).hexdigest()
        self.commits[sha] = dict(files)
        return sha

    def at(self, revision):
        return self.revisions.get(revision, revision if revision in self.commits else None)


class Hub:
    """The state of the server, and what was asked of it."""

    def __init__(self):
        self.repositories, self.large, self.collections = {}, {}, []
        self.requests, self.uploaded = [], []
        self.refuse = None  # a status with which all that writes is answered
        self.echoes = False  # whether that answer repeats the access token


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

    def missing(self, code):
        self.answer(404, {"error": code}, X_Error_Code=code)

    def read(self):
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            data = b""
            while size := int(self.rfile.readline().strip() or b"0", 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def handle_any(self):
        path, body = unquote(urlsplit(self.path).path), self.read()
        self.hub.requests.append((self.command, path))
        if self.hub.refuse and self.command in ("POST", "PUT"):
            token = self.headers.get("Authorization") if self.hub.echoes else ""
            self.answer(self.hub.refuse, {"error": f"refused {token}"})
            return
        for method, pattern, function in ROUTES:
            found = re.fullmatch(pattern, path)
            if found and self.command in method:
                function(self, body, *found.groups())
                return
        self.missing("RepoNotFound")

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any

    def who(self, body):
        self.answer(200, {"name": "tester", "type": "user", "orgs": [], "auth": {"type": "access_token"}})

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

    def verified(self, body):
        self.answer(200, {})

    def validate(self, body):
        found = re.search("^license: (.*)$", json.loads(body)["content"], re.MULTILINE)
        if found and found[1] not in LICENCES:
            self.answer(400, {"errors": [{"message": f'"license" must be one of {list(LICENCES)}'}], "warnings": []})
        else:
            self.answer(200, {"errors": [], "warnings": []})

    def repository(self, name, revision="main"):
        found = self.hub.repositories.get(name)
        if found is None:
            self.missing("RepoNotFound")
        elif found.at(revision) is None:
            self.missing("RevisionNotFound")
        else:
            return found, found.at(revision), found.commits[found.at(revision)]
        return None

    def info(self, body, name, revision=None):
        if found := self.repository(name, revision or "main"):
            repository, sha, files = found
            siblings = [{"rfilename": file} for file in files]
            self.answer(200, {"id": name, "sha": sha, "private": repository.private, "siblings": siblings, "tags": []})

    def tree(self, body, name, revision, folder):
        if found := self.repository(name, revision):
            entries = []
            for file, data in found[2].items():
                if file.startswith(f"{folder}/" if folder else ""):
                    entry = {"type": "file", "path": file, "size": len(data), "oid": git_oid(data)}
                    if is_large(file):
                        sha256 = hashlib.sha256(data).hexdigest()
                        entry |= {"lfs": {"oid": sha256, "size": len(data), "pointerSize": 130}, "oid": "0" * 40}
                    entries.append(entry)
            if folder and not entries:
                self.missing("EntryNotFound")
                return
            self.answer(200, entries)

    def preupload(self, body, name, revision):
        if found := self.repository(name, revision):
            files = []
            for file in json.loads(body)["files"]:
                known = found[2].get(file["path"])
                mode = "lfs" if is_large(file["path"]) else "regular"
                oid = None
                if known is not None:
                    oid = hashlib.sha256(known).hexdigest() if mode == "lfs" else git_oid(known)
                files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
            self.answer(200, {"files": files})

    def large_batch(self, body, name):
        objects = []
        for each in json.loads(body)["objects"]:
            place = f"{self.home}/large/{each['oid']}"
            actions = {"upload": {"href": place}, "verify": {"href": f"{self.home}/verify"}}
            objects.append({**each, **({} if each["oid"] in self.hub.large else {"actions": actions})})
        self.answer(200, {"transfer": "basic", "objects": objects})

    def large_file(self, body, oid):
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.large[oid] = body
        self.answer(200, {})

    def commit(self, body, name, revision):
        found = self.repository(name, revision)
        if not found:
            return
        repository, _, files = found
        files, message = dict(files), ""
        for line in filter(None, body.decode().split("\n")):
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                message = value["summary"]
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
                self.hub.uploaded.append(value["path"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
                self.hub.uploaded.append(value["path"])
            elif entry["key"] == "deletedFile":
                files.pop(value["path"])
        sha = repository.commit(files, message)
        answer = {"success": True, "commitOid": sha, "commitUrl": f"{self.home}/{name}/commit/{sha}"}
        if "create_pr=1" in self.path:
            repository.pull_requests += 1
            repository.revisions[f"refs/pr/{repository.pull_requests}"] = sha
            answer["pullRequestUrl"] = f"{self.home}/{name}/discussions/{repository.pull_requests}"
        else:
            repository.revisions[revision] = sha
        self.answer(200, answer)

    def branch(self, body, name, branch):
        if found := self.repository(name):
            if branch in found[0].revisions:
                self.answer(409, {"error": "exists"})
                return
            found[0].revisions[branch] = found[1]
            self.answer(200, {})

    def tag(self, body, name, revision):
        if found := self.repository(name, revision):
            found[0].revisions[json.loads(body)["tag"]] = found[1]
            self.answer(200, {})

    def collect(self, body, slug):
        self.hub.collections.append((slug, json.loads(body)["item"]["id"]))
        about = {"slug": slug, "title": slug, "owner": {"name": "tester"}, "items": [], "private": False}
        about |= {"lastUpdated": "2026-01-01T00:00:00.000Z", "theme": "blue", "position": 0, "upvotes": 0}
        self.answer(200, about)

    def resolve(self, body, name, revision, file):
        if found := self.repository(name, revision):
            data = found[2].get(file)
            if data is None:
                self.missing("EntryNotFound")
                return
            self.answer(200, data, ETag=f'"{git_oid(data)}"', X_Repo_Commit=found[1], Accept_Ranges="none")


NAME, KIND = r"([\w.-]+/[\w.-]+)", "(?:models|spaces)"
ROUTES = [
    (("GET",), "/api/whoami-v2", Handler.who),
    (("POST",), "/api/repos/create", Handler.create),
    (("POST",), "/api/validate-yaml", Handler.validate),
    (("POST",), f"/api/{KIND}/{NAME}/preupload/(.+)", Handler.preupload),
    (("POST",), f"/(?:spaces/)?{NAME}\\.git/info/lfs/objects/batch", Handler.large_batch),
    (("PUT",), "/large/([0-9a-f]+)", Handler.large_file),
    (("POST",), "/verify", Handler.verified),
    (("POST",), f"/api/{KIND}/{NAME}/commit/(.+)", Handler.commit),
    (("POST",), f"/api/{KIND}/{NAME}/branch/(.+)", Handler.branch),
    (("POST",), f"/api/{KIND}/{NAME}/tag/(.+)", Handler.tag),
    (("POST",), "/api/collections/(.+)/items", Handler.collect),
    (("GET",), f"/api/{KIND}/{NAME}/tree/(refs/pr/\\d+|[^/]+)(?:/(.+))?", Handler.tree),
    (("GET", "HEAD"), f"/api/{KIND}/{NAME}/revision/(.+)", Handler.info),
    (("GET", "HEAD"), f"/api/{KIND}/{NAME}", Handler.info),
    (("GET", "HEAD"), f"/(?:spaces/)?{NAME}/resolve/(refs/pr/\\d+|[^/]+)/(.+)", Handler.resolve),
]


@contextmanager
def loopback_hub():
    """Yields the state and the address of a running server."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OwnHandler", (Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
