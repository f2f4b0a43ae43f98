"""Publishing: what is uploaded and what is not, to a server that speaks the Hub's own words; loading from there."""

import json
import os
import shlex
import shutil
import subprocess
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from loopback_hub import ONLINE, loopback_hub, upload
from other_processes import other_process
from safetensors.torch import load_file
from user_errors import rejects

import recnmt_hf
from recnmt_hf.commands.main import main
from recnmt_hf.families import FAMILIES
from recnmt_hf.hub import card as card_module
from recnmt_hf.hub.card import run_isolated, write_card
from recnmt_hf.hub.publishing import check_contents, contains_token, files_of, is_allowed, prepare_repository, recipe_of
from recnmt_hf.training.evidence import Evidence, TestScore, sum_of_lines
from recnmt_hf.training.testing import add_score


pytestmark = pytest.mark.usefixtures("cards_of_one_process")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A finished run, with what a careless user has put beside the model."""
    folder = tmp_path_factory.mktemp("publishing") / "run"
    recipe = recnmt_hf.Recipe(
        model={"type": "gret", "preset": "tiny", "fields": {"d_model": 32}},
        data={kind: [{"generated": kind, "size": size}] for kind, size in (("train", 60), ("validation", 10))}
        | {"cache_dir": str(folder.parent / "prepared")},
        tokenizer={"kind": "word", "joint": False},
        training={"max_steps": 4, "eval_steps": 2, "save_steps": 2, "max_tokens": 500, "baseline_steps": 2},
        test={"test": {"generated": "test", "size": 5}},
        average={"count": 1},
        decoding={"beams": 2, "length_penalty": 0.7},
    )
    recnmt_hf.train(recipe, folder)
    for name in ("optimizer.pt", "training_args.bin", "events.out.tfevents.1", ".env", "notes.txt", "data.tsv"):
        (folder / "model" / name).write_text("private")
    return folder


@pytest.fixture(scope="module")
def repository_folder(run_folder, tmp_path_factory):
    return prepare_repository(run_folder, tmp_path_factory.mktemp("prepared") / "repository", "tester/model")


@pytest.mark.slow
def test_what_a_repository_holds(run_folder, repository_folder):
    names = set(files_of(repository_folder))
    for needed in (
        *("README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"),
        *("target_tokenizer/tokenizer.json", "modeling_gret.py", "configuration_gret.py", "seq2seq_base.py"),
        *("recipe.yaml", "evidence.json", "translations/test.de"),
    ):
        assert needed in names
    assert all(map(is_allowed, names))
    own = load_file(run_folder / "model/model.safetensors")
    found = load_file(repository_folder / "model.safetensors")
    assert own.keys() == found.keys() and all(torch.equal(own[name], found[name]) for name in own)
    settings = json.loads((repository_folder / "generation_config.json").read_text())
    assert (settings["num_beams"], settings["length_penalty"], settings["max_length"]) == (2, 0.7, 256)
    everything = b"".join(path.read_bytes() for path in repository_folder.rglob("*") if path.is_file())
    assert str(run_folder.parent).encode() not in everything and b"private" not in everything
    translated = (repository_folder / "translations/test.de").read_text().splitlines()
    assert len(translated) == 5 and translated == (run_folder / "model-test.de").read_text().splitlines()


def test_the_card_says_what_is_known(repository_folder):
    card = ModelCard.load(repository_folder / "README.md")
    assert card.data.language == ["en", "de"] and card.data.pipeline_tag == "translation"
    assert card.data.library_name == "transformers" and {"recnmt_hf", "gret"} <= set(card.data.tags)
    (result,) = card.data.eval_results
    score = Evidence.load(repository_folder).tests[0]
    assert result.metric_value == round(score.scores["bleu"], 4) and result.metric_args["signature"] == score.signature
    words = ['name = "tester/model"', "Translates English to German: GRET of", "28.46 (p < .05) | +1.26"]
    words += ["Beam 2, log-probability divided by ((5 + length) / 6)^0.7", "| step | validation loss |"]
    assert [each for each in words if each not in card.text] == []
    # What the code in the card prints is what it printed.
    code = card.text.partition("```python\n")[2].partition("```")[0]
    said = card.text.partition("```text\n")[2].partition("\n```")[0]
    printed = []
    exec(code.replace("tester/model", str(repository_folder)), {"print": printed.append})
    assert printed == [said]


TRANSLATES = """
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
    model = AutoModelForSeq2SeqLM.from_pretrained({name!r}, trust_remote_code=True{more})
    tokenizer = AutoTokenizer.from_pretrained({name!r}, trust_remote_code=True{more})
    batch = tokenizer(["the dog sleeps .", "we see the cat ."], padding=True, return_tensors="pt")
    found = [type(model).__name__, model.generate(**batch, max_new_tokens=9).tolist()]
"""


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_loads_where_the_package_is_absent(model_type, tokenizer, tmp_path, stranger):
    """In shards and half precision too; the same tokens as here."""
    prefix = FAMILIES[model_type].prefix
    config = getattr(recnmt_hf, f"{prefix}Config").from_preset("tiny", vocab_size=len(tokenizer), d_model=32)
    torch.manual_seed(3)
    model = getattr(recnmt_hf, f"{prefix}ForConditionalGeneration")(config)
    model.init_weights()
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    folder = prepare_repository(tmp_path / "model", tmp_path / "out", "tester/model", shard="100KB")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    found = stranger(TRANSLATES.format(name=str(folder), more=""), tmp_path)
    own = {}
    exec(textwrap.dedent(TRANSLATES.format(name=str(folder), more="")), own)
    assert found == own["found"] and found[0] == f"{prefix}ForConditionalGeneration"
    assert isinstance(own["model"], type(model)) and own["model"].dtype == torch.bfloat16


COMMAND = """
    import contextlib, io
    from recnmt_hf.commands.main import main
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main({words!r})
    found = [code, said.getvalue()]
"""


@pytest.mark.slow
def test_pushing_and_loading_by_name(run_folder, repository_folder, tmp_path):
    """Equal weights and translations; a second push sends what changed; branch, tag, proposal, refusals."""
    folder = tmp_path / "repository"
    shutil.copytree(repository_folder, folder)
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
    with (
        loopback_hub() as (hub, address),
        other_process("publisher", tmp_path / "own", HF_ENDPOINT=address, **ONLINE) as publisher,
        other_process("stranger", tmp_path / "other", HF_ENDPOINT=address, **ONLINE) as reader,
    ):

        def send(licence=None, **to):
            """Return the address of the upload, and the files that it sends."""
            if licence is not None:
                card = ModelCard.load(folder / "README.md")
                card.data.license = licence
                card.save(folder / "README.md")
            return upload(publisher, hub, folder, **{"name": "tester/model", **to})

        words = ["publish", str(run_folder), "tester/model", "--private", "--tag", "v1"]
        code, said = publisher(COMMAND.format(words=words), tmp_path)
        repository = hub.repositories["tester/model"]
        assert code == 0 and repository.private and f"{address}/tester/model/commit/" in said
        assert set(hub.uploaded) == set(repository.commits[repository.at("v1")]) and all(map(is_allowed, hub.uploaded))
        assert "model.safetensors" in said and f"\n{len(hub.uploaded)} files" in said
        assert send()[1] == []
        (folder / "translations/second.de").write_text("Hund\n")
        assert set(send("mit")[1]) == {"README.md", "translations/second.de"}
        (folder / "translations/second.de").unlink()
        assert send("cc0-1.0", branch="next")[1] == ["README.md"]
        said, uploaded = send("afl-3.0", pull_request=True)
        assert said.endswith("discussions/1") and uploaded == ["README.md"]
        revisions = {each: repository.commits[repository.at(each)] for each in ("v1", "main", "next", "refs/pr/1")}
        cards = [files["README.md"].decode() for files in revisions.values()]
        licences = [card.partition("\nlicense: ")[2].split("\n")[0] for card in cards]
        assert licences == ["", "mit", "cc0-1.0", "afl-3.0"]
        # What is no longer there goes with the next upload.
        assert ["translations/second.de" in files for files in revisions.values()] == [False, True, False, False]

        found = reader(TRANSLATES.format(name="tester/model", more=", revision='v1'"), tmp_path)
        own = {}
        local = str(run_folder / "model")
        exec(textwrap.dedent(TRANSLATES.format(name=local, more="")), own)
        settings = {"num_beams": 2, "length_penalty": 0.7, "max_length": None, "max_new_tokens": 9}
        assert found == ["GRETForConditionalGeneration", own["model"].generate(**own["batch"], **settings).tolist()]

        # Whatever the Hub rejects becomes one sentence: a card, an upload, a name, or no answer at all.
        assert '"license" must be one of' in send("nonsense", name="tester/fresh")[0]
        hub.refuse = 403
        assert send("apache-2.0")[0].startswith("tester/model: ")
        hub.refuse = None
        assert send(name="no/such/name")[0].startswith("no/such/name: ")


def test_dry_run_and_card(run_folder, tmp_path, capsys):
    words = ["publish", str(run_folder / "model"), "tester/model", "--dry-run", "--output", str(tmp_path / "out")]
    (tmp_path / "notes.md").write_text("## Why\n\n- a\n  - b\n")
    assert main([*words, "--notes", str(tmp_path / "notes.md"), "--sentence", "the dog sleeps ."]) == 0
    card = (tmp_path / "out/README.md").read_text()
    assert "## Why\n\n- a\n  - b" in card and 'tokenizer(["the dog sleeps ."]' in card
    assert main(words) == 2 and str(tmp_path / "out") in capsys.readouterr().err
    odd = shutil.copytree(run_folder / "model", tmp_path / "my model's")
    evidence = Evidence.load(odd)
    evidence.tests[0].scores, evidence.tests[0].references = {"rouge1": 40.0}, 2
    evidence.languages = ["zh-CN", "zh-CN"]
    evidence.save(odd)
    assert main(["publish", "--card-only", str(odd), "--license", "mit"]) == 0
    card = ModelCard.load(odd / "README.md")
    command = card.text.partition("| recnmt translate ")[2].partition("\n")[0]
    assert shlex.split(command) == [str(odd)] and card.data.license == "mit"
    assert "Summarizes texts in Chinese: " in card.text and "(2 references)" in card.text
    assert card.data.pipeline_tag == card.data.eval_results[0].task_type == "summarization"


def test_code_of_the_folder_neither_runs_nor_is_published(run_folder, tmp_path):
    """Also where its files name code of another folder beside the installed class, which is loaded in its place."""
    folder = shutil.copytree(run_folder / "model", tmp_path / "model")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for path in (folder / "evil.py", folder / "modeling_gret.py", elsewhere / "evil.py"):
        path.write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'code-was-run')!r}).touch()\n")
    for place in ("", f"{elsewhere}--"):
        tokenizers = [f"{place}evil.Evil", f"{place}evil.Evil"]
        models = {"AutoConfig": f"{place}evil.EvilConfig"}
        models |= dict.fromkeys(("AutoModel", "AutoModelForSeq2SeqLM"), f"{place}evil.EvilModel")
        values = {"config.json": models, "tokenizer_config.json": {"AutoTokenizer": tokenizers}}
        for name, value in {**values, "target_tokenizer/tokenizer_config.json": tokenizers}.items():
            settings = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps({**settings, "auto_map": value}))
        write_card(folder)
        out = prepare_repository(folder, tmp_path / f"out{len(place)}", "tester/model")
        assert not (tmp_path / "code-was-run").exists()
        assert not any(b"evil" in path.read_bytes().lower() for path in out.rglob("*") if path.is_file())
        source = Path(recnmt_hf.__file__).parent / "models"
        assert all(path.read_bytes() == (source / path.name).read_bytes() for path in out.glob("*.py"))


def test_the_code_of_cards_runs_in_isolation(tmp_path, monkeypatch):
    """Without recnmt_hf, access tokens and other secrets, modules of the working folder, and for a limited time."""
    (tmp_path / "json.py").write_text("raise SystemExit('a module of the working folder')")
    monkeypatch.chdir(tmp_path)
    for name in ("HF_TOKEN", "HF_HOME", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret")
    seen = json.loads(run_isolated("import json, os\nprint(json.dumps(dict(os.environ)))"))
    assert "secret" not in json.dumps(seen) and seen["HF_HUB_OFFLINE"] == "1" and seen["PATH"] == os.environ["PATH"]
    assert run_isolated("print('Größe', '你好')") == "Größe 你好"
    with rejects("import of recnmt_hf halted"):
        run_isolated("import recnmt_hf")
    monkeypatch.setattr(card_module, "TIME_LIMIT", 0.5)
    with pytest.raises(subprocess.TimeoutExpired):
        run_isolated("import time\ntime.sleep(60)")


def test_contents_are_checked_again(tmp_path):
    for name in ("model.bin", "translations/a/b.de", "../x", "runs/log.txt", "model.safetensors.pt"):
        assert not is_allowed(name)
    (tmp_path / "README.md").write_text("a card")
    check_contents(tmp_path)
    (tmp_path / "config.json").symlink_to("/etc/passwd")
    with rejects(field="config.json"):
        check_contents(tmp_path)


def pickle(folder):
    """Replace the weights by code that would run where they are read."""
    (folder / "model.safetensors").unlink()
    harm = type("Harm", (), {"__reduce__": lambda self: (os.mkdir, ("harm",))})
    torch.save({"a": harm()}, folder / "pytorch_model.bin")


def link(folder):
    path = folder / "translations/test.de"
    path.symlink_to(path.rename(folder / "elsewhere"))


def name_another_file(folder):
    evidence = folder / "evidence.json"
    evidence.write_text(evidence.read_text().replace("translations/test.de", "translations/../modeling_gret.py"))


def tell_a_secret(folder):
    Evidence(example="hf_" + "a" * 34).save(folder)


CHANGES = {pickle: "model", link: "test.de is a symbolic link", name_another_file: "modeling_gret.py"}
CHANGES[tell_a_secret] = "seems to contain an access token"


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_published(run_folder, tmp_path, monkeypatch, change):
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(run_folder / "model", tmp_path / "model")
    change(folder)
    with rejects(CHANGES[change]):
        prepare_repository(folder, tmp_path / "out", "tester/model")
    assert not (tmp_path / "out").exists() and not (tmp_path / "harm").exists()


def test_the_recipe_of_a_run_is_published_with_its_own_model_alone(run_folder, tmp_path, capsys):
    recipe = yaml.safe_load((run_folder / "recipe.yaml").read_text())
    shutil.copytree(run_folder / "model", tmp_path / "run/model")
    for other in (
        {"password": "unrelated"},
        {**recipe, "password": "unrelated"},
        {**recipe, "data": {**recipe["data"], "train": [{"tsv": "unrelated.tsv"}]}},
        {"extends": str(run_folder / "recipe.yaml"), "training": {"max_steps": 9}},
    ):
        (tmp_path / "run/recipe.yaml").write_text(yaml.safe_dump(other))
        assert recipe_of(tmp_path / "run/model", Evidence.load(run_folder / "model")) is None
        assert f"{tmp_path / 'run/recipe.yaml'} is not published" in capsys.readouterr().err
    out = prepare_repository(tmp_path / "run", tmp_path / "out", "tester/model")
    assert "recipe.yaml" not in files_of(out)
    shutil.copy(run_folder / "recipe.yaml", tmp_path / "run/recipe.yaml")
    (tmp_path / "run/model/evidence.json").unlink()
    assert recipe_of(tmp_path / "run/model", Evidence()) is None


def test_a_published_recipe_is_that_of_the_run(run_folder, repository_folder):
    """And is published again from a copy of the repository."""
    published = yaml.safe_load((repository_folder / "recipe.yaml").read_text())
    own = yaml.safe_load((run_folder / "recipe.yaml").read_text())
    assert own["data"].pop("cache_dir").startswith("/") and own["data"].pop("num_proc", None) is None
    for name in ("report_to", "run_name", "project", "logging_dir"):
        own["training"].pop(name, None)
    assert published == own
    evidence = Evidence.load(repository_folder)
    assert yaml.safe_load(recipe_of(repository_folder, evidence)) == published


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Helsinki-NLP/opus-mt and / or", "Helsinki-NLP/opus-mt and / or"),
        ("hf://datasets/a/b and /home/me/a.en", "hf://datasets/a/b and a.en"),
        ("/home/me/my data/a.en", "a.en"),
        ("~me/x/a.en", "a.en"),
        ("./x/../..//home/me/../a.en", "a.en"),
        ("path=/home/me/a.json,other=x/../../me/b", "path=a.json,other=b"),
        ("simplecache::file:///home/me/a.en", "simplecache::file:a.en"),
        ("zip://a.en::https://u:p@h/x.zip", "zip://a.en::https://***@h/x.zip"),
        ("FILE://localhost/home/me/a.en", "FILE:a.en"),
    ],
)
def test_places_of_this_machine_shrink_to_names(text, expected):
    evidence = Evidence(
        recipe={"data": {"train": [{"source": text, "cache_dir": text}]}},
        tests=[TestScore("a", {}, "", 1, "", "", {}, "", baseline=text, dataset=[{"source": text}])],
    )
    assert evidence.recipe == {"data": {"train": [{"source": expected}]}}
    assert evidence.tests[0].dataset == [{"source": expected}] and evidence.tests[0].baseline == expected


def test_tokens_are_found_behind_whatever_stands_before_them():
    token = "hf_" + "aB3" * 11
    texts = [token, f'token="{token}"', f"_{token}", json.dumps(f"\n{token}"), json.dumps(json.dumps(f"\n{token}"))]
    texts += [start + "a" * 34 for start in ("\\u0068f_", "\\x68f_", "hf\\_", "hf_oauth_")]
    for text in texts:
        assert contains_token(text.encode() + b"\xff"), text
    assert not any(contains_token(other.encode()) for other in ("hf_short", "half_" + "a" * 34, "\\" * 1000))


def test_scores_of_later_tests_join_the_card(run_folder, tmp_path, capsys):
    """`recnmt test`, against a baseline that was tested before; on other sentences it is refused."""
    for name in ("old", "new"):
        shutil.copytree(run_folder / "model", tmp_path / name)
    sources, references = tmp_path / "a.en", tmp_path / "a.de"
    sources.write_text("the dog sleeps .\nwe see the cat .\n")
    references.write_text("der Hund schläft .\nwir sehen die Katze .\n")
    words = ["--set", "mine", str(sources), str(references), "--beams", "1"]
    against_old = ["test", str(tmp_path / "new"), *words, "--baseline", str(tmp_path / "old")]
    assert main(against_old) == 2 and "mine" in capsys.readouterr().err
    assert main(["test", str(tmp_path / "old"), *words]) == 0
    assert main(against_old) == 0
    assert "p = 1.0000 (approximate randomization, 1000 samples)" in capsys.readouterr().out
    score = Evidence.load(tmp_path / "new").tests[-1]
    assert (score.name, score.baseline, score.p_value, score.decoding["beams"]) == ("mine", "old", 1.0, 1)
    assert score.source_sha256 == sum_of_lines(["the dog sleeps .", "we see the cat ."])
    assert main(["publish", "--card-only", str(tmp_path / "new")]) == 0
    assert "| mine | 2 |" in (tmp_path / "new/README.md").read_text()
    references.write_text("anders .\nanders .\n")
    assert main(against_old) == 2 and "mine" in capsys.readouterr().err


def test_two_tests_at_once_keep_both_scores(tmp_path):
    """The second one reads the evidence only once the first one has written it."""
    at_once = threading.Barrier(2)

    def test(name):
        at_once.wait(10)
        with Evidence.changing(tmp_path) as evidence:
            time.sleep(0.02)  # without a lock the other one would read the same
            score = TestScore(name, {"bleu": 1.0}, "", 1, "", "", {}, f"translations/{name}.txt")
            add_score(evidence, tmp_path, score, ["ja"])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(test, ("one", "two")))
    assert sorted(test.name for test in Evidence.load(tmp_path).tests) == ["one", "two"]
    assert sorted(path.name for path in (tmp_path / "translations").iterdir()) == ["one.txt", "two.txt"]


@pytest.mark.parametrize("place", ["evidence.json", "translations", "translations/test.de", "README.md"])
def test_nothing_is_written_through_links_of_a_model_folder(tiny_folder, tmp_path, place):
    folder, outside = shutil.copytree(tiny_folder, tmp_path / "model"), tmp_path / "outside"
    (folder / place).parent.mkdir(exist_ok=True)
    if place == "translations":
        outside.mkdir()
    else:
        outside.write_text("{}")
    (folder / place).unlink(missing_ok=True)
    (folder / place).symlink_to(outside)
    score = TestScore("test", {"BLEU": 1.0}, "", 1, "", "", {}, "translations/test.de")
    with rejects(str(folder / place)), Evidence.changing(folder) as evidence:
        write_card(folder)
        add_score(evidence, folder, score, ["ja"])
    assert list(outside.iterdir()) == [] if outside.is_dir() else outside.read_text() == "{}"


def test_damaged_evidence_is_rejected(tmp_path):
    broken = (b"", b'{"model": {', bytes(range(256)), b"[1]", b"[" * 100_000, b'{"tests": [{"scores": 1}]}')
    for content in (*broken, b'{"model": {"type": "\\ud800"}}'):  # the last one could be read, but not saved again
        (tmp_path / "evidence.json").write_bytes(content)
        with rejects(str(tmp_path / "evidence.json")):
            Evidence.load(tmp_path)
