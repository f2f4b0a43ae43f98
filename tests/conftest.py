"""Settings of the whole suite: offline, deterministic, one thread per worker; shared fixtures."""

import contextlib
import json
import os
import subprocess
import sys
import textwrap


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

sys.path.insert(0, os.path.dirname(__file__))  # the shared runners

from pathlib import Path

import pytest
import torch

import recnmt_hf
from recnmt_hf.data.generated import generate_corpus
from recnmt_hf.data.tokenization import train_tokenizer


def pytest_generate_tests(metafunc):
    """Runs the model contract once for each variant that a class names."""
    if "variant" in metafunc.fixturenames and metafunc.cls is not None:
        variants = metafunc.cls.variants
        metafunc.parametrize("variant", variants.values(), ids=variants.keys())


@pytest.fixture(autouse=True)
def seeded():
    torch.set_num_threads(1)  # tests run side by side
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def corpus():
    """A small generated corpus."""
    return generate_corpus(train=600, validation=40, test=40, test_deep=20)


@pytest.fixture(scope="session")
def tokenizer(corpus):
    """A joint BPE tokenizer of that corpus."""
    return train_tokenizer((text for pair in corpus["train"] for text in pair[:2]), "bpe", 400)


@pytest.fixture(scope="session")
def tiny_folder(tokenizer, tmp_path_factory):
    """A saved random tiny model with that tokenizer."""
    torch.manual_seed(1)
    config = recnmt_hf.NMTTransformerConfig.from_preset("tiny", vocab_size=len(tokenizer), max_position_embeddings=128)
    model = recnmt_hf.NMTTransformerForConditionalGeneration(config)
    folder = tmp_path_factory.mktemp("tiny") / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def repository():
    return Path(__file__).resolve().parents[1]


# Runs what it is sent, and answers each with a line of JSON: what `found` holds then, or the error.
OTHER = """
    import contextlib, json, os, sys, traceback

    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == "recnmt_hf":
                raise ImportError("recnmt_hf is not installed here")

    if sys.argv[1] == "stranger":
        sys.meta_path.insert(0, Absent())
    for line in sys.stdin:
        folder, code = json.loads(line)
        os.chdir(folder)
        own = {}
        try:
            with contextlib.redirect_stdout(sys.stderr):
                exec(code, own)
            if sys.argv[1] == "stranger":
                assert not any(name.split(".")[0] == "recnmt_hf" for name in sys.modules)
            answer = {"found": own["found"]}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)
"""


@contextlib.contextmanager
def other_process(kind, home, **environment):
    """
    A function that runs code in a folder, in one process of its own, and returns what the code left in `found`. A
    stranger cannot import recnmt_hf.
    """
    settings = {"HF_HOME": str(home), "OMP_NUM_THREADS": "1", **({"PYTHONPATH": ""} if kind == "stranger" else {})}
    with (
        open(home / f"{kind}.txt", "w") as errors,
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(OTHER), kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **settings, **environment},
        ) as process,
    ):

        def run(code, folder):
            process.stdin.write(json.dumps([str(folder), textwrap.dedent(code)]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line, (home / f"{kind}.txt").read_text()[-3000:]
            answer = json.loads(line)
            assert "error" not in answer, answer["error"]
            return answer["found"]

        yield run
        process.stdin.close()


@pytest.fixture(scope="session")
def stranger(tmp_path_factory):
    """
    Runs code in a folder, in a process that cannot import recnmt_hf, and returns what it left in `found`. One process
    for all, since it takes longest to import torch.
    """
    with other_process("stranger", tmp_path_factory.mktemp("stranger")) as run:
        yield run


@pytest.fixture(scope="session")
def real_data():
    """The folder of real corpora; tests that use it skip where it is absent."""
    folder = Path(os.environ.get("RECNMT_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("real corpora are absent; name their folder in RECNMT_DATA")
    return folder
