#!/usr/bin/env python
"""
Execute the notebooks of this folder, and store their outputs in them.

    pip install -e ".[notebooks]"
    python scripts/notebooks/execute.py                 # all: some minutes on one core
    python scripts/notebooks/execute.py fine_tune       # one

`fine_tune.ipynb` starts from a model of the Hub. This script needs no network: it first trains a tiny MarianMT model on
short generated sentences, and passes its folder to the notebook.
"""

import argparse
import base64
import io
import json
import os
import tempfile
from pathlib import Path

import nbformat
import sentencepiece
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image
from transformers import MarianConfig, MarianMTModel, MarianTokenizer, set_seed

import recnmt_hf


FOLDER = Path(__file__).resolve().parent
COLORS = 160  # of the pictures that are stored


def make_marian(folder: Path, steps: int) -> Path:
    """Train a tiny MarianMT model on generated sentences without subordinate clauses; save it with its tokenizer."""
    set_seed(1)
    folder.mkdir(parents=True)
    pairs = recnmt_hf.generate_corpus(max(400, 20 * steps), 0, 0, 0, max_depth=0, deep_depth=1)["train"]
    (folder / "train.tsv").write_text("".join(f"{pair.en}\t{pair.de}\n" for pair in pairs), encoding="utf-8")
    texts = [text for pair in pairs for text in pair[:2]]
    for name in ("source", "target"):
        prefix, options = str(folder / name), {"minloglevel": 2, "hard_vocab_limit": False, "vocab_size": 600}
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_prefix=prefix, **options)
        (folder / f"{name}.model").rename(folder / f"{name}.spm")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "source.spm"))
    names = [pieces.id_to_piece(number) for number in range(pieces.get_piece_size())]
    symbols = dict.fromkeys(["</s>", "<unk>", *(name for name in names if name != "<s>"), "<pad>"])
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    files = [str(folder / name) for name in ("source.spm", "target.spm", "vocab.json")]
    tokenizer = MarianTokenizer(*files, source_lang="en", target_lang="de")
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in SIZES.items()}
    controls = {"pad_token_id": vocabulary["<pad>"], "eos_token_id": 0, "decoder_start_token_id": vocabulary["<pad>"]}
    config = MarianConfig(
        vocab_size=len(vocabulary), d_model=64, dropout=0.0, scale_embedding=True, max_length=64, **sizes, **controls
    )
    model = recnmt_hf.from_marian(MarianMTModel(config)).train()
    corpus, cache = {"tsv": str(folder / "train.tsv")}, str(folder / "data")
    data = recnmt_hf.prepare_dataset(corpus, "en", "de", tokenizer, tokenizer, cache)
    arguments = recnmt_hf.TranslationTrainingArguments(
        output_dir=str(folder / "training"),
        max_steps=steps,
        max_tokens=1024,
        learning_rate=4e-3,
        warmup_steps=steps // 10,
        lr_scheduler_type="linear",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    recnmt_hf.TranslationTrainer(model, arguments, tokenizer=tokenizer, train_dataset=data).train()
    marian = recnmt_hf.to_marian(model)
    marian.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


SIZES = {"layers": 2, "attention_heads": 4, "ffn_dim": 128}


def execute(path: Path, folder: Path, **settings: object) -> NotebookNode:
    """
    Execute a notebook in a folder, and return it with its outputs. Settings, such as `steps=2`, are the environment
    variables that its first cell reads, such as `RECNMT_NOTEBOOK_STEPS`.
    """
    notebook = nbformat.read(path, as_version=4)
    own = {f"RECNMT_NOTEBOOK_{name.upper()}": str(value) for name, value in settings.items()}
    # Without progress bars, and without the warning that they could be prettier.
    quiet = {"TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore:IProgress", "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **quiet, "IPYTHONDIR": str(folder / "ipython"), **own}
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, kernel_name="python3", resources=resources, record_timing=False, timeout=3600)
    client.execute(env=environment)
    return clean(notebook)


def clean(notebook: NotebookNode) -> NotebookNode:
    """Remove what differs from machine to machine, and reduce the colors of pictures."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            output.pop("metadata", None) if output.output_type == "stream" else output.metadata.clear()
            if picture := output.get("data", {}).get("image/png"):
                output.data["image/png"] = shrink(picture)
    return notebook


def shrink(picture: str) -> str:
    """Return a PNG picture with few colors; both are base64."""
    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    output = io.BytesIO()
    image.quantize(COLORS, dither=Image.Dither.NONE).save(output, "PNG", optimize=True)
    return base64.b64encode(output.getvalue()).decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="notebooks, without .ipynb (default: all)")
    names = parser.parse_args().names or sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            path, settings = FOLDER / f"{name}.ipynb", {}
            if name == "fine_tune":
                settings["model"] = os.path.relpath(make_marian(Path(folder) / "marian", 1000), folder)
            nbformat.write(execute(path, Path(folder), **settings), path)
            print(path)


if __name__ == "__main__":
    main()
