"""Settings of the whole suite: offline, deterministic, one thread per worker; shared fixtures."""

import gc
import os
import sys


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # also of the processes that tests start

sys.path.insert(0, os.path.dirname(__file__))  # the shared runners
sys.path.extend(
    os.path.join(os.path.dirname(os.path.dirname(__file__)), "scripts", folder)
    for folder in ("", "benchmarks", "examples", "experiments", "notebooks")
)

from pathlib import Path

import pytest
import torch
from other_processes import other_process


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are imported

import recnmt_hf
from recnmt_hf.data.generated import generate_corpus
from recnmt_hf.data.tokenization import train_tokenizer


gc.set_threshold(50_000, 20, 50)


def pytest_collection_finish():
    """
    Exempt the imported packages from garbage collection, which accelerate runs before and after every training: looking
    through their objects takes longer than a small test.
    """
    gc.collect()
    gc.freeze()


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


@pytest.fixture(scope="session")
def stranger(tmp_path_factory):
    """
    Runs code in a folder, in a process that cannot import recnmt_hf, and returns what it left in `found`. One process
    for all, since it takes longest to import torch.
    """
    with other_process("stranger", tmp_path_factory.mktemp("stranger")) as run:
        yield run


PRINTED = """
    import contextlib, io
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec({code!r}, {{}})
    found = said.getvalue().strip()
"""


@pytest.fixture
def cards_of_one_process(stranger, tmp_path, monkeypatch):
    """Run the code of cards in the process of `stranger`: starting one for each card takes seconds."""
    monkeypatch.setattr("recnmt_hf.hub.card.run_isolated", lambda code: stranger(PRINTED.format(code=code), tmp_path))


@pytest.fixture(scope="session")
def other_python(tmp_path_factory):
    """As `stranger`, in a process that can import recnmt_hf."""
    with other_process("other", tmp_path_factory.mktemp("other")) as run:
        yield run


@pytest.fixture(scope="session")
def real_data():
    """The folder of real corpora; tests that use it skip where it is absent."""
    folder = Path(os.environ.get("RECNMT_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("real corpora are absent; name their folder in RECNMT_DATA")
    return folder
