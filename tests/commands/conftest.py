"""A folder with damaged and valid texts, records, links, models and runs, shared by all tests of command lines."""

import gzip
import json
import os
import shutil
import signal
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file

import recnmt_hf
import recnmt_hf.data
from recnmt_hf.hub.engines import export_ctranslate2
from recnmt_hf.training.checkpoints import mark_complete


# Module that writes a file when it is run.
CODE = """
import pathlib
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
pathlib.Path({marker!r}).touch()
class Foreign(PreTrainedModel): pass
class ForeignConfig(PreTrainedConfig): model_type = "foreign"
class ForeignTokenizer(PreTrainedTokenizerFast): pass
"""


def edit_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def make_texts(world):
    plain = "The dog sleeps .\nA cat sees the bird .\nBirds sing .\n"
    files = {
        "one.en": plain,
        "one.de": "Der Hund .\nEine Katze .\nJa .\n",
        "two.de": "Der Hund .\nJa .\n",
        "empty.txt": "",
        "blank.txt": "\n \n\n",
        "bom.en": "\ufeff" + plain,
        "crlf.en": plain.replace("\n", "\r\n"),
        "cr.en": plain.replace("\n", "\r"),
        "nul.en": plain.replace("dog", "d\0g"),
        "separators.en": "The\u2028dog\u2029sleeps\x0b.\x0c\nA\x85cat\x1c.\nBirds\x1e.\n",
        "new\nline.en": plain,
        "gold": "0-0 1p1\n0-0\n0-0\n",
        "far": "0-0\n99-0\n0-0\n",
        "short.gold": "0-0\n",
        "yes": "y\nyes\n",
        "recipe.yaml": "model: {preset: tiny}\n",
    }
    for name, text in files.items():
        (world / name).write_text(text, encoding="utf-8", newline="")
    (world / "latin1.en").write_bytes("gut\nschön\n".encode("latin-1"))
    (world / "good.gz").write_bytes(gzip.compress(plain.encode()))
    (world / "cut.gz").write_bytes(gzip.compress(os.urandom(3000).hex().encode() + b"\n")[:-200])
    (world / "folder").mkdir()
    (world / "folder" / "kept.txt").write_text("kept\n")
    (world / "link.en").symlink_to("one.en")
    os.link(world / "one.en", world / "hard.en")


def make_records(world):
    good = [{"source": "The dog sleeps .", "tokens": [7, 8, 2]}, {"source": "Birds sing .", "tokens": [9, 2]}]
    second = {
        "no-source": '{"tokens": [7, 2]}',
        "tokens-far": '{"source": "A", "tokens": [7, 99999]}',
        "deep": "[" * 20000,
        "empty": '{"source": "", "tokens": []}',
    }
    for name, line in second.items():
        (world / f"{name}.jsonl").write_text(f"{json.dumps(good[0])}\n{line}\n{json.dumps(good[1])}\n")
    (world / "good.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in good))


def make_trees(world, tokenizer):
    """Write trees of the texts, good and bad ones, and a model that reads them."""

    def tree(*heads):
        rows = [[str(i), f"w{i}", *"____", str(head), "dep", "_", "_"] for i, head in enumerate(heads, start=1)]
        return "".join("\t".join(row) + "\n" for row in rows) + "\n"

    first, second, third = tree(2, 3, 0, 3), tree(2, 3, 0, 5, 3, 3), tree(2, 0, 2)
    files = {
        "one": first + second + third,
        "short": first + second,
        "count": first + tree(0, 1) + third,
        "cycle": first + tree(2, 3, 2, 5, 3, 3) + third,
    }
    for name, text in files.items():
        (world / f"{name}.conllu").write_text(text)
    config = recnmt_hf.GCNRNMTConfig.from_preset("tiny", vocab_size=len(tokenizer), d_model=8, num_relations=3)
    recnmt_hf.GCNRNMTForConditionalGeneration(config).save_pretrained(world / "gcn")
    relations = recnmt_hf.data.Relations(("<unk>", "dep", "<piece>"))
    recnmt_hf.data.TokenizerPair(tokenizer, relations=relations).save(world / "gcn")


def make_models(world, model, tokenizer):
    shutil.copytree(model, world / "model")

    def variant(name):
        return shutil.copytree(world / "model", world / name)

    weights = load_file(world / "model" / "model.safetensors")
    pickled = variant("pickled")
    (pickled / "model.safetensors").unlink()
    torch.save(weights, pickled / "pytorch_model.bin")
    wide = {name: torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 1) for name, tensor in weights.items()}
    save_file(wide, variant("wrong-shapes") / "model.safetensors", metadata={"format": "pt"})
    first = next(name for name in weights if name.endswith("fc1.weight"))
    weights[first].fill_(float("nan"))
    save_file(weights, variant("nan-weights") / "model.safetensors", metadata={"format": "pt"})
    edit_json(variant("absurd-positions") / "config.json", max_position_embeddings=10**9)
    (variant("broken-generation") / "generation_config.json").write_text("{")
    words = (f"{letter}{number}" for letter in "abcdefghij" for number in range(200))
    recnmt_hf.train_tokenizer(words, "space", 2000).save_pretrained(variant("foreign-tokenizer"))
    for name in ("code", "code-tokenizer"):
        (variant(name) / "foreign.py").write_text(CODE.format(marker=str(world / "code-was-run")))
    named = {"AutoConfig": "foreign.ForeignConfig", "AutoModelForSeq2SeqLM": "foreign.Foreign"}
    edit_json(world / "code" / "config.json", model_type="foreign", auto_map=named)
    auto_map = {"AutoTokenizer": ["foreign.ForeignTokenizer", "foreign.ForeignTokenizer"]}
    file = world / "code-tokenizer" / "tokenizer_config.json"
    edit_json(file, tokenizer_class="ForeignTokenizer", auto_map=auto_map)
    config = recnmt_hf.BiARNTransformerConfig.from_preset("tiny", vocab_size=len(tokenizer))
    recnmt_hf.BiARNTransformerForConditionalGeneration(config).save_pretrained(world / "biarn")
    tokenizer.save_pretrained(world / "biarn")


def make_runs(world):
    log = [{"step": step, "eval_bleu": float(step)} for step in (10, 20, 30)]
    for step in (10, 20, 30):
        folder = shutil.copytree(world / "model", world / "run" / f"checkpoint-{step}")
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": log}))
        mark_complete(folder)


@pytest.fixture(scope="session")
def world(tmp_path_factory, tiny_folder, tokenizer):
    """Return the folder in which the hostile command lines run."""
    world = tmp_path_factory.mktemp("world")
    make_texts(world)
    make_records(world)
    make_models(world, tiny_folder, tokenizer)
    make_trees(world, tokenizer)
    if find_spec("ctranslate2"):
        export_ctranslate2(world / "model", world / "ct2")
    make_runs(world)
    return world


@pytest.fixture
def default_handlers():
    """Install the handlers of a foreground process; tests in the background inherit ignored signals."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield handlers
    for number, handler in before.items():
        signal.signal(number, handler)
