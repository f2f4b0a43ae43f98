"""Marian's own files: imported models compute what Marian computed, and are given back unchanged."""

import gzip
import json
import math
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from marian_writers import FLOAT32, INT8, INTGEMM8, is_quantized, settings_bytes, write_bin, write_items, write_npz
from transformers import AutoModelForSeq2SeqLM
from user_errors import rejects

import recnmt_hf
from recnmt_hf.commands.main import main
from recnmt_hf.hub.marian_files import export_marian_file, import_marian_file, read_marian_file
from recnmt_hf.hub.marian_settings import SETTINGS, TABLE, Settings


sentencepiece = pytest.importorskip("sentencepiece")
pytest.importorskip("sacremoses")

# Models that Marian 1.12.42 trained, with what its scorer and its decoder say of them.
ENGINE = Path(__file__).parent / "marian"
RESULTS = json.loads((ENGINE / "results.json").read_text())
PAIRS = [tuple(pair) for pair in RESULTS["pairs"]]
# The norm of this one applies to averages, but neither to what is averaged nor to the gate.
UNSUPPORTED = "average-pre.npz"
MODELS = [name for name in RESULTS["models"] if name.endswith(".npz") and name != UNSUPPORTED]


def vocabularies_of(name):
    """The files of the vocabularies of a model, and their SentencePiece models."""
    files = [str(ENGINE / f"{side}.spm") for side in (("source", "target") if "-two." in name else ("joint", "joint"))]
    return files, [sentencepiece.SentencePieceProcessor(model_file=file) for file in files]


def copied(folder, name="ssru.npz", **changes):
    """A copy of a model that a test may overwrite: path, vocabularies, settings, arrays."""
    content = read_marian_file(ENGINE / name)
    settings = {**content.settings, **changes}
    path = write_npz(folder / "model.npz", settings, content.arrays)
    return path, vocabularies_of(name)[0], settings, content.arrays


@pytest.fixture(scope="module", params=MODELS)
def imported(request, tmp_path_factory):
    """The name of a model, and the folder that the command writes."""
    folder = tmp_path_factory.mktemp("marian") / "own"
    files, _ = vocabularies_of(request.param)
    assert main(["convert", str(ENGINE / request.param), "--vocabs", *files, "-o", str(folder)]) == 0
    return request.param, folder


@pytest.mark.parametrize("name", [name for name in RESULTS["models"] if name != UNSUPPORTED])
def test_marian_itself_computes_the_same(name, tmp_path):
    """
    Scores of its scorer; the greedy translations of its decoder, and its scores of the best of 4 beams (another rule
    ends its search). Its decoder is left out for pre-norm self-attention, where it contradicts its scorer.
    """
    expected, path = RESULTS["models"][name], ENGINE / name
    files, models = vocabularies_of(name)
    translator = recnmt_hf.Translator.from_pretrained(import_marian_file(path, files, tmp_path / "own"))
    sources = [source for source, _ in PAIRS]
    ids = [[*models[0].encode(source), models[0].eos_id()] for source in sources]
    assert [translator.encode_source(source).ids for source in sources] == ids
    scored = dict(zip(PAIRS, expected.get("scores", []), strict=False))
    best = zip(sources, expected.get("best_of_4", []), strict=False)
    scored |= {(source, found[0]): found[1] for source, found in best if found}
    found = [score.log_prob for score in translator.score(*zip(*scored, strict=True))]
    # Marian's arithmetic in 8 bits rounds the inputs of layers, too.
    np.testing.assert_allclose(found, list(scored.values()), atol=0.15 if path.suffix == ".bin" else 5e-4, rtol=0)
    if "greedy" in expected:
        found = translator(sources, beams=1, max_length_factor=3, max_length_extra=0)
        assert [translation.text for translation in found] == expected["greedy"]


def test_settings_of_an_imported_model(imported):
    """Generation without unknown and padding tokens, as marian-decoder does it; the head that aligns words."""
    name, folder = imported
    models, settings = vocabularies_of(name)[1], read_marian_file(ENGINE / name).settings
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    config, generation = model.config, model.generation_config
    rows = max(map(len, models))
    assert (config.pad_token_id, config.decoder_start_token_id, config.vocab_size) == (rows, rows, rows + 1)
    layer = settings["transformer-guided-alignment-layer"]
    assert config.alignment_head == [settings["dec-depth"] - 1 if layer == "last" else int(layer) - 1, 0]
    assert (generation.num_beams, generation.suppress_tokens) == (1, [models[1].unk_id()])
    assert not model.get_input_embeddings().weight[rows].any()
    assert (model.final_logits_bias[0, len(models[1]) :] == -1e4).all()
    generated = model.generate(torch.tensor([[5, 6, models[0].eos_id()]]), do_sample=True, max_new_tokens=60, top_k=0)
    assert not set(generated[0, 1:].tolist()) & {models[1].unk_id(), *range(len(models[1]), rows)}


def test_arrays_and_settings_are_given_back(imported, tmp_path):
    name, folder = imported
    assert main(["convert", str(folder), "-o", str(tmp_path / "back/model.npz")]) == 0
    old, new = read_marian_file(ENGINE / name), read_marian_file(tmp_path / "back/model.npz")
    assert new.settings == old.settings and new.arrays.keys() == old.arrays.keys()
    assert all(np.array_equal(new.arrays[array], values) for array, values in old.arrays.items())
    with np.load(tmp_path / "back/model.npz") as content:
        assert all(content[array].flags.c_contiguous for array in old.arrays)
        assert content["special:model.yml"].tobytes().endswith(b"\0")
    search = yaml.safe_load((tmp_path / "back/model.decoder.yml").read_text())
    files = [str(tmp_path / "back" / file) for file in search["vocabs"]]
    config = str(tmp_path / "back/model.decoder.yml")
    words = [str(tmp_path / "back/model.npz"), "-o", str(tmp_path / "again"), "--vocabs", *files, "--config", config]
    assert main(["convert", *words]) == 0
    assert (tmp_path / "again/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_older_releases(tmp_path):
    """Their gelu, their name of the output matrix, and the defaults of settings that they do not store."""
    path, files, settings, arrays = copied(tmp_path, "self-untied-two.npz")
    new = import_marian_file(path, files, tmp_path / "new")
    arrays["decoder_ff_logit_out_W"] = arrays.pop("decoder_ff_logit_out_Wt").T
    absent = {"transformer-rnn-projection", "transformer-pool", "dec-cell", "transformer-guided-alignment-layer"}
    write_npz(path, {name: value for name, value in settings.items() if name not in absent}, arrays)
    old = import_marian_file(path, files, tmp_path / "old")
    assert (old / "model.safetensors").read_bytes() == (new / "model.safetensors").read_bytes()
    for version, kind in (("v1.9.56 1234567", "quick_gelu"), ("v1.12.3", "gelu")):
        path, files, *_ = copied(tmp_path, "self-gelu-guided.npz", version=version)
        own = import_marian_file(path, files, tmp_path / kind)
        assert AutoModelForSeq2SeqLM.from_pretrained(own).config.activation_function == kind


def test_settings_for_the_decoder(tmp_path, capsys):
    path, files, *_ = copied(tmp_path)
    config = tmp_path / "decoder.yml"
    search = {"models": ["x"], "beam-size": 6, "normalize": 0.7, "max-length-factor": 2, "allow-unk": True}
    config.write_text(yaml.safe_dump(search))
    import_marian_file(path, files, tmp_path / "own", config)
    generation = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "own").generation_config
    assert (generation.num_beams, generation.length_penalty, generation.suppress_tokens) == (6, 0.7, None)
    command = f"recnmt translate {tmp_path / 'own'} --beams 6 --length-penalty-type hf --length-penalty 0.7"
    assert f"{command} --max-length-extra 0 --max-length-factor 2\n" in capsys.readouterr().err
    config.write_text("output-sampling: true")
    with rejects(field="output-sampling"):
        import_marian_file(path, files, tmp_path / "other", config)
    assert not (tmp_path / "other").exists()


def test_binary_files(tmp_path):
    """In 8 bits, all matrices (embeddings in forks only) are within half a step of the original."""
    _, files, settings, arrays = copied(tmp_path)
    path = write_bin(tmp_path / "model.bin", settings, arrays, "fork")
    for file, fork in ((ENGINE / "ssru.bin", "upstream"), (path, "fork")):
        content = read_marian_file(file)
        assert content.settings == settings and content.arrays.keys() == arrays.keys()
        for name, values in arrays.items():
            half = np.abs(values).max() / 127 * 0.5001 if is_quantized(name, fork) else 0
            np.testing.assert_allclose(content.arrays[name], values, atol=half, rtol=0)
            assert (content.arrays[name] != values).any() == is_quantized(name, fork)
    assert main(["convert", str(path), "--vocabs", *files, "-o", str(tmp_path / "own")]) == 0
    half = {name: values.astype(np.float16) for name, values in arrays.items()}
    content = read_marian_file(write_bin(path, settings, half, None))
    assert all((content.arrays[name] == values).all() for name, values in half.items())


def refused(path, files, folder, words, field=None):
    """Assert that a model is refused with these words, and nothing is written."""
    before = sorted(folder.iterdir())
    with rejects(words, field=field):
        import_marian_file(path, files, folder / "out")
    assert sorted(folder.iterdir()) == before


# Settings with values that are refused together with others, or by a rule of their own.
TOGETHER = {
    "dec-cell": ["gru"],
    "transformer-guided-alignment-layer": ["3", 0, "first"],
    "transformer-postprocess": ["da", "n"],
    "transformer-postprocess-top": ["n"],
    "transformer-flux": [88],
}


def test_every_setting_is_known_and_has_a_value_that_we_compute(tmp_path):
    """Others are refused, and named with their value; nothing is written."""
    path, files, settings, arrays = copied(tmp_path)
    for name, allowed in {**SETTINGS, "transformer-flux": ()}.items():
        strange = ["strange", -1, 10**9, [1, 1]] + (["4", True] if isinstance(allowed, range) else [])
        for value in TOGETHER.get(name, []) + (strange if allowed else []):
            write_npz(path, {**settings, name: value}, arrays)
            refused(path, files, tmp_path, f"{name}={value!r}, which is not supported", name)
    for name in TABLE["required"]:
        write_npz(path, {other: value for other, value in settings.items() if other != name}, arrays)
        refused(path, files, tmp_path, "which is not supported", name)
    path, files, *_ = copied(tmp_path, UNSUPPORTED)
    refused(path, files, tmp_path, "which is not supported", "transformer-preprocess")


def test_arrays_and_vocabularies_of_other_models(tmp_path):
    path, files, settings, arrays = copied(tmp_path)
    for name, shape in (("Wpos", (8, 16)), ("decoder_l1_rnn_Wf", (16, 8)), ("decoder_l1_rnn_bf", (16,))):
        write_npz(path, settings, {**arrays, name: np.zeros(shape, np.float32)})
        refused(path, files, tmp_path, name, field=str(path))
    write_npz(path, settings, {name: values for name, values in arrays.items() if name != "decoder_l1_rnn_bf"})
    refused(path, files, tmp_path, "decoder_l1_rnn_bf", field=str(path))
    write_npz(path, {**settings, "dim-emb": 2**16, "transformer-dim-ffn": 2**20}, arrays)  # not allocated
    refused(path, files, tmp_path, "Wemb", field=str(path))
    write_npz(path, settings, {**arrays, "Wemb": np.full_like(arrays["Wemb"], np.nan)})
    refused(path, files, tmp_path, "These weights are NaN or infinite")
    write_npz(path, settings, arrays)
    target = str(ENGINE / "target.spm")
    refused(path, [files[0], target], tmp_path, "do not belong to one model", target)
    garbage = tmp_path / "garbage.spm"
    for content in (b"", b"no protocol buffer", Path(files[0]).read_bytes()[:700]):
        garbage.write_bytes(content)
        refused(path, [str(garbage), files[1]], tmp_path, "is not a SentencePiece model", str(garbage))


def test_damaged_and_foreign_npz_files(tmp_path):
    """No code of a file is run."""
    path, files, settings, arrays = copied(tmp_path)
    content = path.read_bytes()
    place = content.index(arrays["decoder_l1_rnn_W"].tobytes()[:64])
    damaged = [content[: len(content) // 2], content[:place] + bytes(64) + content[place + 64 :]]
    for wrong in (np.array([["a pickled object"]], dtype=object), *(np.zeros((90, 16), kind) for kind in "lb")):
        damaged.append(write_npz(path, settings, {**arrays, "Wemb": wrong}).read_bytes())
    np.savez(path, **arrays)  # without settings
    damaged.append(path.read_bytes())
    torch.save({name: torch.from_numpy(values) for name, values in arrays.items()}, path)
    for wrong in (*damaged, path.read_bytes(), b"<html>Not found</html>"):
        path.write_bytes(wrong)
        refused(path, files, tmp_path, str(path), str(path))
    for text in (b"- 1\n- 2\0", b"\xff\0", b"a: !!python/object:os.system x\0", b"[" * 5000, b"a: &a [*a]\0"):
        np.savez(path, **{"special:model.yml": np.frombuffer(text, np.int8)}, **arrays)
        refused(path, files, tmp_path, str(path), str(path))


def test_damaged_and_foreign_binary_files(tmp_path):
    _, files, settings, arrays = copied(tmp_path)
    path = write_bin(tmp_path / "model.bin", settings, arrays)
    content = path.read_bytes()
    damaged = [content[:size] for size in (0, 12, 200, 3000, len(content) - 1)]
    damaged.append(np.array([1, 2**60], "<u8").tobytes() + bytes(64))
    damaged.append(write_bin(path, settings, arrays, version=2).read_bytes())
    value, text = np.float32(1).tobytes(), settings_bytes(settings).tobytes()
    settings_item, quantized = ("special:model.yml", INT8, (len(text),), text), INTGEMM8["fork"]
    for item in (
        ("a_W", 0x10002, (1, 1), value * 2),  # a type of one kind of processor
        ("Wemb", FLOAT32, (2, 2), value),
        ("Wemb", FLOAT32, (1, 1), value * 2),  # neither its length nor padded
        ("Wemb", FLOAT32, (-1, 1), value),
        ("Wemb", FLOAT32, (-1, -1), value),
        ("Wemb", FLOAT32, (2**31 - 1,) * 3, value),
        ("Wemb", quantized, (1, 4), b"1234"),  # no scale
        ("Wemb", quantized, (1, 4), b"1234" + np.float32(0).tobytes()),
        ("Wemb", quantized, (1, 4), b"1234" + np.float32(np.nan).tobytes()),
        *(("a_W", quantized, shape, bytes(math.prod(shape)) + value) for shape in ((4,), (16, 24))),  # blocks of 16
    ):
        damaged.append(write_items(path, [item, settings_item]).read_bytes())
    for items in ([("a", FLOAT32, (1,), value)] * 2 + [settings_item], [("a", FLOAT32, (1,), value)]):
        damaged.append(write_items(path, items).read_bytes())
    for wrong in damaged:
        path.write_bytes(wrong)
        refused(path, files, tmp_path, str(path), str(path))


def test_files_that_expand_to_much_more_than_they_have(tmp_path):
    """Compressed within the file or as a whole, or without an end, they are refused before they fill the memory."""
    path, files, settings, arrays = copied(tmp_path)
    np.savez_compressed(path, **{"special:model.yml": settings_bytes(settings)}, **arrays)
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert all((read_marian_file(path).arrays[name] == values).all() for name, values in arrays.items())
    bomb = tmp_path / "bomb.npz"
    np.savez_compressed(bomb, **{"special:model.yml": settings_bytes(settings)}, Wemb=np.zeros(2**25, np.float32))
    squeezed, endless = tmp_path / "bomb.gz", tmp_path / "endless.npz"
    squeezed.write_bytes(gzip.compress(bytes(2**20), 1) * 100)
    endless.symlink_to("/dev/zero")
    cases = [(faulty, files[1], None) for faulty in (bomb, squeezed, endless)]
    cases += [(path, endless, None), (path, files[1], endless)]
    for number, (model, vocabulary, config) in enumerate(cases):
        tracemalloc.start()
        with rejects(field=str(model if number < 3 else endless)):
            import_marian_file(model, [files[0], vocabulary], tmp_path / "out", config)
        assert tracemalloc.get_traced_memory()[1] < 2**26 + 2**24
        tracemalloc.stop()
    levels = "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(8))
    config = tmp_path / "decoder.yml"
    for text in (f"a0: &a0 [1]\n{levels}", f"beam-size: 1 # {'x' * 2**17}"):
        config.write_text(text)
        with rejects(field=str(config)):
            import_marian_file(path, files, tmp_path / "out", config)


def changed_folder(folder, target, **fields):
    """A copy of a model's folder with other values in config.json."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **fields}))
    return target


def test_models_that_marian_cannot_run(tokenizer, tmp_path):
    path, files, *_ = copied(tmp_path)
    own = import_marian_file(path, files, tmp_path / "own")
    config = recnmt_hf.NMTTransformerConfig.from_preset("student_tiny", d_model=16, vocab_size=len(tokenizer))
    config.decoder_start_token_id = config.pad_token_id
    recnmt_hf.NMTTransformerForConditionalGeneration(config).save_pretrained(tmp_path / "source tokenizer")
    tokenizer.save_pretrained(tmp_path / "source tokenizer")
    changes = {"position_embedding_type": "marian", "activation_function": "tanh", "decoder_start_token_id": 5}
    changes |= {"encoder_attention_heads": 8, "layer_norm_eps": 1e-5, "scale_embedding": False}
    for field, value in changes.items():
        folder = changed_folder(own, tmp_path / field, **{field: value}, marian_settings=None)
        (folder / "generation_config.json").unlink()
    for field in ("source tokenizer", *changes):
        with rejects(field=field):
            export_marian_file(tmp_path / field, tmp_path / "out/model.npz")
    symbols = json.loads((own / "vocab.json").read_text())
    first, second = list(symbols)[5:7]  # other ids than the SentencePiece model's
    symbols[first], symbols[second] = symbols[second], symbols[first]
    permuted = changed_folder(own, tmp_path / "permuted", tokenizer_stamps=None)
    (permuted / "vocab.json").write_text(json.dumps(symbols))
    with rejects(field="source tokenizer"):
        export_marian_file(permuted, tmp_path / "out/model.npz")
    model = AutoModelForSeq2SeqLM.from_pretrained(own)
    with torch.no_grad():
        model.get_input_embeddings().weight[model.config.pad_token_id] = 1
    model.save_pretrained(own)
    with rejects(field="decoder_start_token_id"):
        export_marian_file(own, tmp_path / "out/model.npz")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", MODELS)
def test_a_fine_tuned_and_a_foreign_model(name, tmp_path):
    """Changed weights are exported; without the settings of a file, those of the configuration are written."""
    path, files, settings, arrays = copied(tmp_path, name)
    own = import_marian_file(path, files, tmp_path / "own")
    model = AutoModelForSeq2SeqLM.from_pretrained(own)
    with torch.no_grad():
        model.model.decoder.layers[0].fc1.weight += 0.125
    del model.config.marian_settings
    model.save_pretrained(own)
    export_marian_file(own, tmp_path / "out/model.npz")
    content = read_marian_file(tmp_path / "out/model.npz")
    np.testing.assert_allclose(content.arrays["decoder_l1_ffn_W1"], arrays["decoder_l1_ffn_W1"] + 0.125, atol=1e-6)
    fields = [Settings(each, "").fields() for each in (settings, content.settings)]
    assert fields[0] == fields[1]  # the release too, which decides what gelu means
