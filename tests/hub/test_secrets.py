"""Passwords, signatures and access tokens: read from recipes and URLs, and never written, printed or logged."""

import base64
import json
import threading
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import pytest
import yaml
from loopback_hub import loopback_hub

from recnmt_hf.commands.main import main
from recnmt_hf.data.corpora import load_pairs
from recnmt_hf.models.user_errors import UserError, masked
from recnmt_hf.training.evidence import Evidence


SECRET = "zebra/41@secret"
# As it stands in a file of the user, as a URL has it, and as HTTP sends it.
FORMS = [SECRET, quote(SECRET, safe=""), base64.b64encode(f"user:{SECRET}".encode()).decode()]


class Server(BaseHTTPRequestHandler):
    """Serves files to those who know the secret, and repeats it to all others."""

    files: dict[str, bytes]

    def log_message(self, *args):
        pass

    def do_GET(self):
        url = urlsplit(self.path)
        known = {f"Basic {FORMS[2]}", f"X-Amz-Signature={SECRET}", f"v=1&access_token={SECRET}"}
        allowed = known & {self.headers.get("Authorization", ""), unquote(url.query)}
        body = self.files.get(url.path, b"") if allowed else b""
        status = 200 if body else 404 if allowed else 401
        body = body or f"{self.path} {self.headers.get('Authorization')} {SECRET}".encode()
        self.send_response(status, "OK" if status == 200 else f"No {SECRET}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET


@pytest.fixture
def server(corpus, tmp_path, monkeypatch):
    """Address of the server, with the user and the password, and without them; `datasets` may download from it."""
    for name, value in {"HF_HUB_OFFLINE": False, "HF_DATASETS_CACHE": tmp_path / "cache"}.items():
        monkeypatch.setattr(f"datasets.config.{name}", value)
    monkeypatch.setattr("datasets.config.DOWNLOADED_DATASETS_PATH", tmp_path / "cache/downloads")
    lines = [(p.en, p.de, f"{p.en}\t{p.de}", json.dumps({"en": p.en, "de": p.de})) for p in corpus["train"][:60]]
    names, columns = ("/a.en", "/a.de", "/a.tsv", "/a.jsonl"), zip(*lines, strict=True)
    contents = {name: "\n".join(column).encode() for name, column in zip(names, columns, strict=True)}
    contents["/short.de"] = b"Eins"
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Server,), {"files": contents})) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        place = f"127.0.0.1:{http.server_port}"
        yield f"http://user:{FORMS[1]}@{place}", f"http://{place}"
        http.shutdown()


def assert_no_secret(*texts):
    for text in texts:
        for form in FORMS:
            assert form not in text, text[max(text.find(form) - 200, 0) :][:400]


def assert_no_secret_in(folder):
    for path in filter(Path.is_file, folder.rglob("*")):
        assert_no_secret(str(path), path.read_bytes().decode("latin1").replace("\\/", "/"))


@pytest.mark.usefixtures("cards_of_one_process")
def test_a_secret_is_neither_stored_nor_printed(server, tmp_path, monkeypatch, capfd):
    """Through training, resuming, preparation, card, repository, Space and Hub; the files are read all the same."""
    private, public = server
    recipe = {
        "model": {"type": "gret", "preset": "tiny", "fields": {"d_model": 32}},
        "data": {
            "train": [
                {"source": f"{private}/a.en", "target": f"{public}/a.de?X-Amz-Signature={FORMS[1]}"},
                {"dataset": "json", "data_files": [f"{public}/a.jsonl?v=1&access_token={FORMS[1]}"]},
            ],
            "validation": [{"tsv": f"simplecache::{private}/a.tsv"}],
        },
        "tokenizer": {"kind": "word"},
        "training": {"max_steps": 2, "eval_steps": 2, "save_steps": 2, "max_tokens": 500, "hub_token": SECRET},
        "test": {"own": {"jsonl": f"{private}/a.jsonl"}},
        "average": {"count": 1},
    }
    file, run, data = tmp_path / "own.yaml", tmp_path / "out/run", tmp_path / "out/data"
    file.write_text(yaml.safe_dump(recipe))
    for words in (
        ["train", str(file), "--print-recipe"],
        ["train", str(file), "--output", str(run)],
        ["train", str(file), "--output", str(run), "--resume", "training.max_steps=4"],
        ["prepare", str(file), "--output", str(data), "--workers", "2"],
        ["train", str(file), "--output", str(tmp_path / "out/second"), f"data.prepared={data}"],
        ["publish", "--card-only", str(run)],
        ["publish", str(run), "tester/model", "--dry-run", "--output", str(tmp_path / "out/repository")],
        ["publish", "--space", "tester/page", str(run), "--dry-run", "--output", str(tmp_path / "out/space")],
    ):
        assert main(words) == 0, capfd.readouterr().err
        if "--card-only" in words:  # as an earlier version wrote it
            card = run / "model/README.md"
            card.write_text(card.read_text().replace("***@", f"user:{FORMS[1]}@"))
    monkeypatch.setenv("HF_TOKEN", SECRET)
    with loopback_hub() as (hub, address):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        hub.refuse = 403
        assert main(["publish", str(run), "tester/model", "--output", str(tmp_path / "out/again")]) == 2
    printed = capfd.readouterr()
    assert "tester/model: http" in printed.err and "Resuming from" in printed.out + printed.err
    assert_no_secret(printed.out, printed.err)
    assert FORMS[1] in card.read_text()
    card.unlink()
    assert_no_secret_in(tmp_path / "out")
    stored = yaml.safe_load((run / "recipe.yaml").read_text())
    hidden = public.replace("://", "://***@")
    assert stored["data"]["train"][0] == {"source": f"{hidden}/a.en", "target": f"{public}/a.de?X-Amz-Signature=***"}
    assert stored["training"]["hub_token"] == "***"
    assert Evidence.load(run / "model").recipe["data"]["validation"] == [{"tsv": f"simplecache::{hidden}/a.tsv"}]


def wrong_corpora(private, public):
    """Corpora that cannot be read, most of them because of an error that repeats the secret."""
    signature = f"X-Amz-Signature={FORMS[1]}"
    yield from ({"tsv": f"{place}/none.tsv"} for place in (private, f"simplecache::{private}"))
    yield {"tsv": f"{public}/none.tsv?{signature}"}
    yield {"tsv": f"http://user:{FORMS[1]}@127.0.0.1:9/a.tsv"}
    yield {"tsv": f"http://user:{FORMS[1]}@127.0.0.1:port/a.tsv"}
    yield {"tsv": f"unknown://user:{FORMS[1]}@host/a.tsv"}
    yield {"tsv": f"{private}/a.en"}
    yield {"jsonl": f"{private}/a.jsonl", "target_column": "fr"}
    yield {"source": f"{private}/a.en", "target": f"{public}/short.de?{signature}"}
    for file in ("none.jsonl", "a.tsv", "a.jsonl"):
        yield {"dataset": "json", "data_files": f"{private}/{file}", "target_column": "fr"}
    yield {"tsv": [f"{private}/a.tsv"]}
    yield {"tsv": f"{private}/a.tsv", "kind": f"{private}/a.tsv"}
    yield f"{private}/a.tsv"


def test_no_error_repeats_a_secret(server, tmp_path, capfd):
    """Neither its message nor its traceback; of the interface in Python and of the commands."""
    for number, corpus in enumerate(wrong_corpora(*server)):
        with pytest.raises(UserError) as found:
            list(load_pairs(corpus, "en", "de"))
        assert_no_secret("".join(traceback.format_exception(found.value)))
        file = tmp_path / f"{number}.yaml"
        file.write_text(yaml.safe_dump({"data": {"train": [corpus]}}))
        assert main(["prepare", str(file), "--output", str(tmp_path / "out" / str(number))]) == 2
    file.write_text(yaml.safe_dump({"training": {"hub_token": [SECRET]}}))
    for words in (["train", str(file)], ["evaluate", "out", "--references", f"{server[0]}/none"]):
        assert main(words) == 2
    printed = capfd.readouterr()
    assert_no_secret(printed.out, printed.err)
    assert_no_secret_in(tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://user:a@b@host/x.en", "https://***@host/x.en"),
        ("https://token@host:80/x@y", "https://***@host:80/x@y"),
        ("zip://a.en::https://u:p@host/x.zip", "zip://a.en::https://***@host/x.zip"),
        ("https://h/x?versionId=2&X-Amz-Signature=ab%2F&X=1", "https://h/x?versionId=2&X-Amz-Signature=***&X=1"),
        ("https://a.blob/x?sv=1&sig=abc=, line 3", "https://a.blob/x?sv=1&sig=***, line 3"),
        (f"a hf_{'aB3' * 11}.", "a ***."),
        ("abfs://container@account.dfs/x.en", "abfs://container@account.dfs/x.en"),
        ("github://user:repository@main/x.en", "github://user:repository@main/x.en"),
        ("me@host.org, key=1; s3://bucket/token=1/x", "me@host.org, key=1; s3://bucket/token=1/x"),
    ],
)
def test_what_is_masked(text, expected):
    assert masked(text) == masked(expected) == expected
    assert masked({"a": [text], "password": text, "key": 1}) == {"a": [expected], "password": "***", "key": 1}
