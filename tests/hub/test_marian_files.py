"""Marian's own files: imported models compute what Marian computes, and are given back unchanged."""

import gzip
import io
import json
import math
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from marian_reference import (
    FLOAT32,
    INT8,
    INTGEMM8,
    MarianModel,
    is_quantized,
    random_arrays,
    settings_bytes,
    settings_for,
    write_bin,
    write_items,
    write_npz,
)
from transformers import AutoModelForSeq2SeqLM, MarianConfig, MarianMTModel
from user_errors import rejects

import recnmt_hf
from recnmt_hf.commands.main import main
from recnmt_hf.hub.marian_files import export_marian_file, import_marian_file
from recnmt_hf.hub.marian_format import read_marian_file
from recnmt_hf.hub.marian_settings import REQUIRED, SETTINGS


sentencepiece = pytest.importorskip("sentencepiece")
pytest.importorskip("sacremoses")

SSRU = {"transformer_decoder_autoreg": "rnn"}
AAN = {"transformer_decoder_autoreg": "average-attention", "transformer_dim_aan": 20}
PRE_NORM = {
    "transformer_preprocess": "n",
    "transformer_postprocess": "da",
    "transformer_postprocess_top": "n",
    "transformer_postprocess_emb": "",
}
SEPARATE = {"tied_embeddings_all": False, "tied_embeddings": True}
# Name -> whether the sides have vocabularies of their own, and changed settings.
MODELS = {
    "self-attention": (False, {}),
    "pre-norm": (True, {**PRE_NORM, **SEPARATE, "transformer_ffn_activation": "gelu"}),
    "source and target tied": (False, {"tied_embeddings_all": False, "tied_embeddings_src": True}),
    "untied": (False, {"tied_embeddings_all": False, "transformer_decoder_dim_ffn": 28, "dec_depth": 1}),
    "SSRU": (False, {**SSRU, "transformer_ffn_activation": "swish"}),
    "SSRU with projection": (True, {**SSRU, **SEPARATE, "transformer_rnn_projection": True, "output_omit_bias": True}),
    "SSRU and pre-norm": (False, {**SSRU, **PRE_NORM}),
    "average": (False, AAN),
    "exact gelu": (
        False,
        {
            **AAN,
            "transformer_ffn_activation": "gelu",
            "transformer_aan_activation": "gelu",
            "version": "v1.12.42 b7be0e964",
        },
    ),
    "average of the model's width": (True, {**AAN, **SEPARATE, "transformer_dim_aan": 16, "enc_depth": 1}),
    "average without gate": (False, {**AAN, "transformer_aan_nogate": True, "transformer_aan_activation": "relu"}),
    "average without feed-forward block": (False, {**AAN, "transformer_aan_depth": 1}),
}


@pytest.fixture(scope="session")
def vocabularies(corpus, tmp_path_factory):
    """Files of a joint vocabulary with Marian's ids, and of two of different sizes with others."""
    folder = tmp_path_factory.mktemp("spm")
    english, german = ([pair[side] for pair in corpus["train"]] for side in (0, 1))
    settings = {
        "joint": (english + german, {"vocab_size": 90, "bos_id": -1, "eos_id": 0, "unk_id": 1}),
        "source": (english, {"vocab_size": 70}),
        "target": (german, {"vocab_size": 78, "unk_id": 2, "eos_id": 1, "bos_id": 0}),
    }
    for name, (texts, fields) in settings.items():
        model = io.BytesIO()
        options = {"minloglevel": 2, "num_threads": 1, **fields}
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=model, **options)
        (folder / f"{name}.spm").write_bytes(model.getvalue())
    return folder


def files_of(folder, is_separate):
    """The two files, and their SentencePiece models."""
    files = [str(folder / f"{name}.spm") for name in (("source", "target") if is_separate else ("joint", "joint"))]
    return files, [sentencepiece.SentencePieceProcessor(model_file=file) for file in files]


def write_model(folder, vocabularies, name, write=write_npz, file="model.npz", **changes):
    """Write a model of `MODELS`. Returns its file, the vocabularies' files and models, settings and arrays."""
    is_separate, own = MODELS[name]
    files, models = files_of(vocabularies, is_separate)
    settings = settings_for([len(model) for model in models], **own, **changes)
    arrays = random_arrays(settings)
    return write(folder / file, settings, arrays), files, models, settings, arrays


def tokens(models, pair):
    """The ids of a sentence pair, each with its end token."""
    return [[*model.encode(text), model.eos_id()] for model, text in zip(models, pair, strict=True)]


@pytest.fixture(scope="module", params=MODELS)
def imported(request, vocabularies, tmp_path_factory):
    """The folder that the command writes, and everything that [`write_model`] returns."""
    folder = tmp_path_factory.mktemp("marian")
    model, files, *written = write_model(folder, vocabularies, request.param)
    assert main(["convert", str(model), "--vocabs", *files, "-o", str(folder / "own")]) == 0
    return folder / "own", model, files, *written


def test_log_probabilities_and_greedy_translations_are_marians(imported, corpus):
    """Zero start vector, positions, norms and the scale of embeddings, against NumPy."""
    folder, _, _, models, settings, arrays = imported
    reference, pairs = MarianModel(settings, arrays), [pair[:2] for pair in corpus["test"][:4]]
    translator = recnmt_hf.Translator.from_pretrained(folder)
    assert [translator.encode_source(source).ids for source, _ in pairs] == [tokens(models, pair)[0] for pair in pairs]
    scores = translator.score(*zip(*pairs, strict=True))
    for pair, score in zip(pairs, scores, strict=True):
        expected = reference.log_probs(*tokens(models, pair)).sum()
        assert score.log_prob == pytest.approx(expected, abs=2e-4)
    found = translator([source for source, _ in pairs], beams=1, max_length_factor=0.0, max_length_extra=20)
    for pair, translation in zip(pairs, found, strict=True):
        target = models[1]
        expected = reference.greedy(tokens(models, pair)[0], target.eos_id(), [target.unk_id()], 20)
        assert translation.hypotheses[0].tokens == expected


def test_settings_of_an_imported_model(imported):
    """Generation without unknown and padding tokens, as marian-decoder does it; the head that aligns words."""
    folder, _, _, models, settings, _ = imported
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    config, generation = model.config, model.generation_config
    rows = max(map(len, models))
    assert (config.pad_token_id, config.decoder_start_token_id, config.vocab_size) == (rows, rows, rows + 1)
    assert config.alignment_head == [settings["dec-depth"] - 1, 0]
    assert (generation.num_beams, generation.suppress_tokens) == (1, [models[1].unk_id()])
    assert not model.get_input_embeddings().weight[rows].any()
    assert (model.final_logits_bias[0, len(models[1]) :] == -1e4).all()
    generated = model.generate(torch.tensor([[5, 6, models[0].eos_id()]]), do_sample=True, max_new_tokens=60, top_k=0)
    assert not set(generated[0, 1:].tolist()) & {models[1].unk_id(), *range(len(models[1]), rows)}


def test_words_are_aligned_by_the_recorded_head(imported, corpus, capsys):
    """`recnmt align` links each word to the source word with the largest attention of Marian's alignment head."""
    folder, _, _, models, settings, arrays = imported
    source, target = corpus["test"][1][:2]
    ids = tokens(models, (source, target))
    weights = MarianModel(settings, arrays)(*ids)[1][-1][0]
    words = [
        [number for number, word in enumerate(text.split()) for _ in model.encode(word)]
        for text, model in zip((source, target), models, strict=True)
    ]
    assert [len(side) + 1 for side in words] == [len(side) for side in ids]  # this text has no pieces across words
    matrix = np.zeros((len(target.split()), len(source.split()) + 1))
    for j, own in enumerate(words[1]):
        for i, other in enumerate([*words[0], len(source.split())]):
            matrix[own, other] += weights[j, i] / words[1].count(own)
    links = [f"{row.argmax()}-{j}" for j, row in enumerate(matrix) if row.argmax() < len(source.split())]
    assert main(["align", str(folder), "--text", source, target]) == 0
    assert sorted(capsys.readouterr().out.split()) == sorted(links)


def test_arrays_and_settings_are_given_back(imported, tmp_path, capsys):
    folder, model, files, *_ = imported
    assert main(["convert", str(folder), "-o", str(tmp_path / "back/model.npz")]) == 0
    with np.load(model) as old, np.load(tmp_path / "back/model.npz") as new:
        assert set(old.files) == set(new.files)
        for name in set(old.files) - {"special:model.yml"}:
            assert new[name].dtype == np.float32 and np.array_equal(old[name], new[name])
            assert new[name].flags.c_contiguous
        texts = [file["special:model.yml"].tobytes() for file in (old, new)]
    assert texts[1].endswith(b"\0")
    assert len({json.dumps(yaml.safe_load(text.split(b"\0")[0]), sort_keys=True) for text in texts}) == 1
    search = yaml.safe_load((tmp_path / "back/model.decoder.yml").read_text())
    for name, file in zip(search["vocabs"], files, strict=True):
        own, given = (sentencepiece.SentencePieceProcessor(model_file=str(one)) for one in
                      (tmp_path / "back" / name, file))  # fmt: skip
        assert [own.id_to_piece(i) for i in range(len(own))] == [given.id_to_piece(i) for i in range(len(given))]
    assert import_marian_file(tmp_path / "back/model.npz", [tmp_path / "back" / one for one in search["vocabs"]],
                              tmp_path / "again")  # fmt: skip
    weights = [(place / "model.safetensors").read_bytes() for place in (folder, tmp_path / "again")]
    assert weights[0] == weights[1]


# -- files that Marian 1.12.42 trained ---------------------------------------------------------------------------------

ENGINE = Path(__file__).parent / "marian"
RESULTS = json.loads((ENGINE / "results.json").read_text())


@pytest.mark.parametrize("name", RESULTS["models"])
def test_marian_itself_computes_the_same(name, tmp_path):
    """
    Scores of its scorer; the greedy translations of its decoder, and its scores of the best of 4 beams (another rule
    ends its search). Its decoder is left out for pre-norm self-attention, where it contradicts its scorer.
    """
    expected, path = RESULTS["models"][name], ENGINE / name
    files, models = files_of(ENGINE, "-two." in name)
    pairs = [tuple(pair) for pair in RESULTS["pairs"]]
    sources = [source for source, _ in pairs]
    is_rounded = path.suffix == ".bin"
    if not is_rounded:
        content = read_marian_file(path)
        reference = MarianModel(content.settings, content.arrays)
        found = [reference.log_probs(*tokens(models, pair)).sum() for pair in pairs]
        np.testing.assert_allclose(found, expected["scores"], atol=5e-4, rtol=0)
    if name == "average-pre.npz":  # the norm is applied to averages, but neither to what is averaged nor to the gate
        refused(path, files, tmp_path, "which is not supported", "transformer-preprocess")
        return
    translator = recnmt_hf.Translator.from_pretrained(import_marian_file(path, files, tmp_path / "own"))
    scored = dict(zip(pairs, expected.get("scores", []), strict=False))
    best = zip(sources, expected.get("best_of_4", []), strict=False)
    scored |= {(source, found[0]): found[1] for source, found in best if found}
    found = [score.log_prob for score in translator.score(*zip(*scored, strict=True))]
    # Marian's arithmetic in 8 bits rounds the inputs of layers, too.
    np.testing.assert_allclose(found, list(scored.values()), atol=0.15 if is_rounded else 5e-4, rtol=0)
    if "greedy" in expected:
        found = translator(sources, beams=1, max_length_factor=3, max_length_extra=0)
        assert [translation.text for translation in found] == expected["greedy"]


def test_marian_itself_rounds_the_same():
    """In 8 bits, all matrices but embeddings are within half a step of the original."""
    rounded, original = (read_marian_file(ENGINE / f"ssru.{ending}") for ending in ("bin", "npz"))
    assert rounded.is_quantized and rounded.settings == original.settings
    changed = {name for name, values in original.arrays.items() if (rounded.arrays[name] != values).any()}
    assert changed == {name for name in original.arrays if is_quantized(name, "upstream")}
    for name in changed:
        half = np.abs(original.arrays[name]).max() / 127 * 0.5001
        np.testing.assert_allclose(rounded.arrays[name], original.arrays[name], atol=half, rtol=0)


# -- binary files ------------------------------------------------------------------------------------------------------


EIGHT_BITS = {"transformer_dim_ffn": 32}  # all matrices have dimensions that Marian can store in 8 bits


@pytest.mark.parametrize("fork", ["upstream", "fork"])
@pytest.mark.parametrize("name", ["SSRU", "pre-norm"])
def test_8_bit_weights_are_converted(fork, name, vocabularies, corpus, tmp_path, capsys):
    """Within half a step of the original weights, and with a message."""
    path, files, models, settings, arrays = write_model(
        tmp_path, vocabularies, name, lambda *content: write_bin(*content, fork=fork), "model.bin", **EIGHT_BITS
    )
    content = read_marian_file(path)
    assert content.is_quantized and content.settings == settings and content.arrays.keys() == arrays.keys()
    for array, values in arrays.items():
        found = content.arrays[array]
        if is_quantized(array, fork):
            step = np.abs(values).max() / 127
            assert 0 < np.abs(found - values).max() <= step * 0.5001
        else:
            np.testing.assert_array_equal(found, values)
    assert main(["convert", str(path), "--vocabs", *files, "-o", str(tmp_path / "own")]) == 0
    assert "8-bit weights" in capsys.readouterr().err
    pair = corpus["test"][0][:2]
    expected = MarianModel(settings, content.arrays).log_probs(*tokens(models, pair)).sum()
    (found,) = recnmt_hf.Translator.from_pretrained(tmp_path / "own").score(*([text] for text in pair))
    assert found.log_prob == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_other_binary_files(dtype, vocabularies, tmp_path, capsys):
    """The same weights as of a .npz file, without a message about 8 bits."""
    _, files, _, settings, arrays = write_model(tmp_path, vocabularies, "SSRU")
    arrays = {name: values.astype(dtype) for name, values in arrays.items()}
    write_bin(tmp_path / "model.bin", settings, arrays, fork=None)
    write_npz(tmp_path / "model.npz", settings, arrays)
    for ending in ("npz", "bin"):
        assert main(["convert", str(tmp_path / f"model.{ending}"), "--vocabs", *files,
                     "-o", str(tmp_path / ending)]) == 0  # fmt: skip
    assert "8-bit" not in capsys.readouterr().err
    weights = [(tmp_path / ending / "model.safetensors").read_bytes() for ending in ("npz", "bin")]
    assert weights[0] == weights[1]


# -- settings of the search --------------------------------------------------------------------------------------------


def test_settings_for_the_decoder(vocabularies, tmp_path, capsys):
    path, files, *_ = write_model(tmp_path, vocabularies, "SSRU")
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


# -- bad input ---------------------------------------------------------------------------------------------------------


def refused(path, files, folder, code, field=None):
    """Assert that a model is refused with this code, and nothing is written."""
    before = sorted(folder.iterdir())
    with rejects(code, field=field) as caught:
        import_marian_file(path, files, folder / "out")
    assert sorted(folder.iterdir()) == before
    return str(caught.value)


# Settings with values that are refused together with others, or by a rule of their own.
TOGETHER = {
    "dec-cell": ["gru"],
    "transformer-guided-alignment-layer": ["3", 0, "first"],
    "transformer-postprocess": ["da", "n"],
    "transformer-postprocess-top": ["n"],
    "transformer-flux": [88],
}


def test_every_setting_is_known_and_has_a_value_that_we_compute(vocabularies, tmp_path):
    """Others are refused, and named with their value; nothing is written."""
    path, files, _, settings, arrays = write_model(tmp_path, vocabularies, "SSRU")
    for name, allowed in {**SETTINGS, "transformer-flux": ()}.items():
        strange = ["strange", -1, 10**9, [1, 1]] + (["4", True] if isinstance(allowed, range) else [])
        for value in TOGETHER.get(name, []) + (strange if allowed else []):
            write_npz(path, {**settings, name: value}, arrays)
            refused(path, files, tmp_path, f"{name}={value!r}, which is not supported", name)
    for name in REQUIRED:
        write_npz(path, {other: value for other, value in settings.items() if other != name}, arrays)
        refused(path, files, tmp_path, "which is not supported", name)
    path, files, _, settings, arrays = write_model(tmp_path, vocabularies, "average")
    norms_first = {field.replace("_", "-"): value for field, value in PRE_NORM.items()}  # acts on the average only
    for changes in ({"transformer-aan-depth": 3}, norms_first):
        write_npz(path, {**settings, **changes}, arrays)
        refused(path, files, tmp_path, "which is not supported", next(iter(changes)))


def test_arrays_and_vocabularies_of_other_models(vocabularies, tmp_path):
    path, files, _, settings, arrays = write_model(tmp_path, vocabularies, "SSRU")
    for name, shape in (("Wpos", (8, 16)), ("decoder_l1_rnn_Wf", (16, 8)), ("decoder_l1_rnn_bf", (16,))):
        write_npz(path, settings, {**arrays, name: np.zeros(shape, np.float32)})
        refused(path, files, tmp_path, name, field=str(path))
    write_npz(path, settings, {name: values for name, values in arrays.items() if name != "decoder_l2_rnn_bf"})
    refused(path, files, tmp_path, "decoder_l2_rnn_bf", field=str(path))
    write_npz(path, {**settings, "dim-emb": 2**16, "transformer-dim-ffn": 2**20}, arrays)  # not allocated
    refused(path, files, tmp_path, "Wemb", field=str(path))
    write_npz(path, settings, {**arrays, "Wemb": np.full_like(arrays["Wemb"], np.nan)})
    refused(path, files, tmp_path, "These weights are NaN or infinite")
    write_npz(path, settings, arrays)
    target = str(vocabularies / "target.spm")
    refused(path, [files[0], target], tmp_path, "do not belong to one model", target)
    garbage = tmp_path / "garbage.spm"
    for content in (b"", b"no protocol buffer", (vocabularies / "joint.spm").read_bytes()[:700]):
        garbage.write_bytes(content)
        refused(path, [str(garbage), files[1]], tmp_path, "is not a SentencePiece model", str(garbage))


def test_damaged_and_foreign_npz_files(vocabularies, tmp_path):
    """No code of a file is run."""
    path, files, _, settings, arrays = write_model(tmp_path, vocabularies, "SSRU")
    content = path.read_bytes()
    place = content.index(arrays["decoder_l1_rnn_W"].tobytes()[:64])
    damaged = [content[:40], content[: len(content) // 2], content[:place] + bytes(64) + content[place + 64 :]]
    for wrong in (np.array([["a pickled object"]], dtype=object), *(np.zeros((90, 16), kind) for kind in "lb")):
        write_npz(path, settings, {**arrays, "Wemb": wrong})
        damaged.append(path.read_bytes())
    np.savez(path, **arrays)  # without settings
    damaged.append(path.read_bytes())
    torch.save({name: torch.from_numpy(values) for name, values in arrays.items()}, path)
    damaged.append(path.read_bytes())
    for wrong in (*damaged, b"<html>Not found</html>"):
        path.write_bytes(wrong)
        refused(path, files, tmp_path, str(path), str(path))
    for text in (b"- 1\n- 2\0", b"\xff\0", b"a: !!python/object:os.system x\0", b"[" * 5000, b"a: &a [*a]\0"):
        np.savez(path, **{"special:model.yml": np.frombuffer(text, np.int8)}, **arrays)
        refused(path, files, tmp_path, str(path), str(path))


def test_damaged_and_foreign_binary_files(vocabularies, tmp_path):
    path, files, _, settings, arrays = write_model(tmp_path, vocabularies, "SSRU", write_bin, "model.bin", **EIGHT_BITS)
    content = path.read_bytes()
    damaged = [content[:size] for size in (0, 12, 200, 3000, len(content) - 1)]
    damaged.append(np.array([1, 2**60], "<u8").tobytes() + bytes(64))
    write_bin(path, settings, arrays, version=2)
    damaged.append(path.read_bytes())
    value, text = np.float32(1).tobytes(), settings_bytes(settings).tobytes()
    settings_item, quantized = ("special:model.yml", INT8, (len(text),), text), INTGEMM8["fork"]
    for name, kind, shape, data in (
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
        write_items(path, [(name, kind, shape, data), settings_item])
        damaged.append(path.read_bytes())
    for items in ([("a", FLOAT32, (1,), value)] * 2 + [settings_item], [("a", FLOAT32, (1,), value)]):
        write_items(path, items)
        damaged.append(path.read_bytes())
    for wrong in damaged:
        path.write_bytes(wrong)
        refused(path, files, tmp_path, str(path), str(path))


def test_files_that_expand_to_much_more_than_they_have(vocabularies, tmp_path):
    """Compressed within the file or as a whole, or without an end, they are refused before they fill the memory."""
    path, files, _, settings, arrays = write_model(tmp_path, vocabularies, "SSRU")
    import_marian_file(path, files, tmp_path / "plain")
    np.savez_compressed(path, **{"special:model.yml": settings_bytes(settings)}, **arrays)
    path.write_bytes(gzip.compress(path.read_bytes()))
    import_marian_file(path, files, tmp_path / "compressed")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "compressed")]
    assert weights[0] == weights[1]
    bomb = tmp_path / "bomb.npz"
    np.savez_compressed(bomb, **{"special:model.yml": settings_bytes(settings)}, Wemb=np.zeros(2**25, np.float32))
    squeezed, endless = tmp_path / "bomb.gz", tmp_path / "endless.npz"
    squeezed.write_bytes(gzip.compress(bytes(2**20), 1) * 100)
    endless.symlink_to("/dev/zero")
    joint = files[1]
    cases = [(bomb, bomb, joint, None), (squeezed, squeezed, joint, None), (endless, endless, joint, None)]
    cases += [(endless, path, endless, None), (endless, path, joint, endless)]
    for faulty, model, vocabulary, config in cases:
        tracemalloc.start()
        with rejects(field=str(faulty)):
            import_marian_file(model, [files[0], vocabulary], tmp_path / "out", config)
        assert tracemalloc.get_traced_memory()[1] < 2**26 + 2**24
        tracemalloc.stop()
    names = ", ".join(f"*a{i}" for i in range(8))
    levels = "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(8))
    config = tmp_path / "decoder.yml"
    for text in (f"a0: &a0 [1]\n{levels}", f"beam-size: 1 # {'x' * 2**17}", f"a0: &a0 {{x: 1}}\n<<: [{names}]"):
        config.write_text(text)
        with rejects(field=str(config)):
            import_marian_file(path, files, tmp_path / "out", config)


# -- export of other models --------------------------------------------------------------------------------------------


def changed_folder(folder, target, **fields):
    """A copy of a model's folder with other values in config.json."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **fields}))
    return target


def test_models_that_marian_cannot_run(vocabularies, tiny_folder, tokenizer, tmp_path):
    path, files, *_ = write_model(tmp_path, vocabularies, "self-attention")
    own = import_marian_file(path, files, tmp_path / "own")
    config = recnmt_hf.NMTTransformerConfig.from_preset("student_tiny", d_model=16, vocab_size=len(tokenizer))
    config.decoder_start_token_id = config.pad_token_id
    recnmt_hf.NMTTransformerForConditionalGeneration(config).save_pretrained(tmp_path / "source tokenizer")
    tokenizer.save_pretrained(tmp_path / "source tokenizer")
    for field, value in (("position_embedding_type", "marian"), ("activation_function", "tanh"),
                         ("decoder_start_token_id", 5)):  # fmt: skip
        folder = changed_folder(own, tmp_path / field, **{field: value}, marian_settings=None)
        generation = json.loads((folder / "generation_config.json").read_text())
        del generation["decoder_start_token_id"]
        (folder / "generation_config.json").write_text(json.dumps(generation))
    for field in ("source tokenizer", "position_embedding_type", "activation_function", "decoder_start_token_id"):
        with rejects(field=field):
            export_marian_file(tmp_path / field, tmp_path / "out/model.npz")
    model = AutoModelForSeq2SeqLM.from_pretrained(own)
    with torch.no_grad():
        model.get_input_embeddings().weight[model.config.pad_token_id] = 1
    model.save_pretrained(own)
    with rejects(field="decoder_start_token_id"):
        export_marian_file(own, tmp_path / "out/model.npz")
    assert not (tmp_path / "out").exists()


def test_a_fine_tuned_and_a_foreign_model(vocabularies, tmp_path):
    """Changed weights are exported; without the settings of a file, those of the configuration are written."""
    path, files, _, settings, arrays = write_model(tmp_path, vocabularies, "average")
    own = import_marian_file(path, files, tmp_path / "own")
    model = AutoModelForSeq2SeqLM.from_pretrained(own)
    with torch.no_grad():
        model.model.decoder.layers[1].self_attn.fc1.weight += 0.125
    del model.config.marian_settings
    model.save_pretrained(own)
    export_marian_file(own, tmp_path / "out/model.npz")
    content = read_marian_file(tmp_path / "out/model.npz")
    np.testing.assert_allclose(content.arrays["decoder_l2_aan_W1"], arrays["decoder_l2_aan_W1"] + 0.125, atol=1e-6)
    for name, value in settings.items():
        if name not in ("version", "special-vocab", "dec-cell", "transformer-guided-alignment-layer"):
            assert content.settings[name] == value, name
    assert content.settings["transformer-guided-alignment-layer"] == settings["dec-depth"]


def check_export(folder, models, pair, path):
    """Assert that the exported arrays compute a model's logits, except those of padding, which Marian does not have."""
    export_marian_file(folder, path / "model.npz")
    content = read_marian_file(path / "model.npz")
    source, target = tokens(models, pair)
    expected, _ = MarianModel(content.settings, content.arrays)(source, target)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    previous = torch.tensor([[model.config.decoder_start_token_id, *target[:-1]]])
    logits = model(torch.tensor([source]), decoder_input_ids=previous).logits[0].detach().numpy()
    np.testing.assert_allclose(logits[:, : len(models[1])], expected, atol=2e-5)
    return content


def test_a_marianmt_checkpoint(vocabularies, corpus, tmp_path):
    """
    transformers gives MarianMT other frequencies of positions and another epsilon than Marian has. With Marian's, an
    imported checkpoint whose ids are those of its SentencePiece model can be exported, with the release of its gelu.
    """
    files, models = files_of(vocabularies, False)
    opus = tmp_path / "opus"
    opus.mkdir()
    for name in ("source.spm", "target.spm"):
        shutil.copy(files[0], opus / name)
    symbols = [*(models[0].id_to_piece(i) for i in range(len(models[0]))), "<pad>"]
    (opus / "vocab.json").write_text(json.dumps({symbol: i for i, symbol in enumerate(symbols)}))
    (opus / "tokenizer_config.json").write_text("{}")
    sizes = {f"{side}_{name}": number for side in ("encoder", "decoder")
             for name, number in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 24))}  # fmt: skip
    ids = {"pad_token_id": 90, "decoder_start_token_id": 90, "eos_token_id": 0, "forced_eos_token_id": None}
    marian = MarianMTModel(MarianConfig(d_model=16, vocab_size=91, scale_embedding=True, **sizes, **ids))
    marian.final_logits_bias.normal_()
    marian.save_pretrained(opus)
    assert main(["convert", str(opus), "-o", str(tmp_path / "own")]) == 0
    with rejects(field="position_embedding_type"):
        export_marian_file(tmp_path / "own", tmp_path / "out/model.npz")
    fields = {"position_embedding_type": "tensor2tensor", "layer_norm_eps": 1e-6}
    for name, version in (("gelu", "v1.12.3"), ("quick_gelu", "v1.12.0"), ("swish", "v1.12.3")):
        changed = changed_folder(tmp_path / "own", tmp_path / name, **fields, activation_function=name)
        content = check_export(changed, models, corpus["test"][0][:2], tmp_path / f"{name} out")
        assert content.settings["version"] == version
