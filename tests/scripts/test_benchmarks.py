"""Benchmark scripts: ratios of models, counted operations, times of fast paths, mistakes as sentences."""

import csv
import importlib
import json
import platform
import re
import sys
from pathlib import Path

import compare
import fast_paths
import measuring
import pytest
import table_speed as speed
import torch
import translation
from transformers import AutoTokenizer
from user_errors import rejects

import recnmt_hf
from recnmt_hf import NMTTransformerConfig, NMTTransformerForConditionalGeneration
from recnmt_hf.training.evidence import Evidence, hardware


TINY = ["--size", "tiny", "--vocab-size", "100", "--rounds", "1", "--mean-length", "4"]
KINDS = ("float32", "bfloat16", "int8")
TWO_MODELS = ["nmt_transformer:d_model=32", "marian:d_model=32", "--train-batch-size", "2", "--device", "cpu"]


def test_compare_prints_ratios(capsys):
    compare.main([*TWO_MODELS, *TINY, "--rounds", "2", "--generate-batch-size", "2", "--count"])
    out = capsys.readouterr().out
    assert "one matmul of 1024 x 1024 matrices:" in out
    assert out.count("; as fast in every matmul: ") == 2 and out.count("\nmatmuls: ") == 2 and " GFLOP at " in out
    assert "training step, batch 2: nmt_transformer:d_model=32 / marian:d_model=32 = " in out
    for mode in ("training step, batch 2", "generation, beam 4, batch 2"):
        for model in TWO_MODELS[:2]:
            (rate,) = re.findall(rf"{mode}: {model} ([\d.e+]+) steps/s, ([\d,]+) tokens/s", out)
            # The workload is the same one: two sentences, each of some three to 16 tokens on either side.
            assert 12 <= float(rate[1].replace(",", "")) / float(rate[0]) <= 64
    assert "generation, beam 4, batch 2:" in out and "quartiles" in out
    assert f"({platform.machine()}, {torch.backends.cpu.get_cpu_capability()}), 1 thread(s), torch " in out


def test_compare_generates_with_weights_in_bfloat16_and_a_static_cache(capsys):
    words = ["--modes", "generate", "--dtype", "bfloat16", "--static-cache", "--generate-batch-size", "2"]
    compare.main(["nmt_transformer", "rnmt", *words, "--device", "cpu", *TINY])
    assert "generation, beam 4, batch 2, static cache: nmt_transformer / rnmt = " in capsys.readouterr().out


def test_compare_against_another_version(repository, capsys):
    folder = str(repository / "src/recnmt_hf/models")
    words = ["--modes", "train", "--train-batch-size", "1", "--device", "cpu", *TINY]
    compare.main(["rnmt", "--against", folder, *words])
    assert f"training step, batch 1: rnmt / rnmt of {folder} = " in capsys.readouterr().out
    with pytest.raises(recnmt_hf.UserError, match="marian"):
        compare.main([*words, "marian", "--against", folder])


def test_fast_paths_are_timed(capsys, monkeypatch):
    monkeypatch.setenv("RECNMT_FAST_PATHS", "auto")
    fast_paths.main([*TINY, "--train-batch-size", "2", "--generate-batch-size", "1"])
    out = capsys.readouterr().out
    names = (
        "packed weight, linear layer by oneDNN in float32, dropout, plain matmuls for sdpa, loss in chunks, "
        "steps of a BiARN, BiARN reads words, attention absorbed by its memory, pairs in tiles (RNMT), "
        "steps of the RNMT decoder, steps of the VRNMT decoder, steps of an ON-LSTM"
    )
    assert not [name for name in names.split(", ") if f"\n{name}, " not in out]
    assert out.count("x; taken: ") == out.count("fast ") > 10


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_counted_operations_are_those_of_the_equations(attention):
    """Two operations for each weight and token, three times with the backward pass, and attention."""
    config = NMTTransformerConfig.from_preset("tiny", vocab_size=50, d_model=32, scale_embedding=False)
    config._attn_implementation = attention
    model = NMTTransformerForConditionalGeneration(config)
    rows, source, target, width, layers = 2, 5, 4, config.d_model, config.encoder_layers
    batch = {"input_ids": torch.full((rows, source), 7), "labels": torch.full((rows, target), 8)}

    encoder = layers * (4 * width**2 + 2 * width * config.encoder_ffn_dim)
    memory = layers * 2 * width**2
    decoder = layers * (6 * width**2 + 2 * width * config.decoder_ffn_dim) + width * config.vocab_size
    matmuls = rows * (source * (encoder + memory) + target * decoder)
    pairs = layers * rows * width * (source**2 + target**2 + source * target)
    # Forward two matmuls; backward four, and the fused kernel recomputes the scores.
    expected = 6 * matmuls + 2 * pairs * {"eager": 2 + 4, "sdpa": 2 + 5}[attention]
    step = compare.training_step(model, torch.float32, 0.0)
    work = measuring.count_operations(step, [batch, batch])
    assert work.operations == 2 * expected and work.calls > 2 * 30 * layers and work[2:] == (0, 0)
    assert measuring.count_operations(torch.tanh, [torch.zeros(3, 4), torch.zeros(2)]) == (0, 2, 14, 0)
    assert measuring.count_operations(torch.sigmoid, [torch.zeros(3)]) == (0, 1, 0, 3)


def test_the_other_scripts_run(tiny_folder, tmp_path, monkeypatch, capsys):
    for name, words, message in (
        ("recurrent_layers", "--shapes 2x3 --width 8 --rounds 2", "onlstm, chunks of 8"),
        ("guided_alignment", f"nmt_transformer rnmt {' '.join(TINY)} --train-batch-size 2", "rnmt, guided alignment: "),
    ):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words.split()])
        importlib.import_module(name).main()
        assert message in capsys.readouterr().out


@pytest.mark.slow
def test_table_of_translation_speed(tiny_folder, tmp_path, capsys):
    for name, text in (("source", "The dog sleeps.\nWe see a cat.\n"), ("references", "Der Hund.\nWir sehen.\n")):
        (tmp_path / name).write_text(text)
    files = ["--source", str(tmp_path / "source"), "--references", str(tmp_path / "references"), "--rounds", "1"]
    systems = ["--system", "teacher", str(tiny_folder), "2", "--system", "student", str(tiny_folder), "1"]
    outputs = ["--output", str(tmp_path / "rows.json"), "--csv", str(tmp_path / "rows.csv")]
    translation.main([*files, *systems, *outputs, "--transformers", "--types", *KINDS])
    header, *rows = json.loads((tmp_path / "rows.json").read_text())
    engines = ("transformers' search", "recnmt_hf", "recnmt_hf", "recnmt_hf")
    kinds = ("float32", "float32", "bfloat16", "int8")
    first = [[name, *cells] for name in ("teacher", "student") for cells in zip(engines, kinds, strict=True)]
    assert [[row[0], *row[header.index("engine") :][:2]] for row in rows] == first
    assert all(row[header.index("equal")] == "2" for row in rows[:2])
    assert header.index("BLEU") and len({len(row) for row in rows}) == 1
    sizes = [float(row[header.index("MB")]) for row in rows[:4]]
    assert sizes[0] == sizes[1] > sizes[2] > 0 and sizes[0] > sizes[3]
    assert rows[0][header.index("MB")] == f"{(tiny_folder / 'model.safetensors').stat().st_size / 1e6:.1f}"
    assert len(capsys.readouterr().out.splitlines()) == 2 + 2 + len(rows)
    with open(tmp_path / "rows.csv") as file:
        read = list(csv.DictReader(file))
    assert [row["weights"] for row in read] == list(kinds) * 2
    assert all(row["processor"] and float(row["speed"]) > 0 for row in read)


def test_sentences_of_one_length(tiny_folder, tmp_path, capsys):
    (tmp_path / "source").write_text("The dog sleeps.\nA dog.\nWe see a dog sleep.\nThe cat sleeps.\n")
    (tmp_path / "references").write_text("Der Hund schläft.\nEin Hund.\nWir sehen ihn.\nDie Katze schläft.\n")
    files = ["--source", str(tmp_path / "source"), "--references", str(tmp_path / "references"), "--rounds", "1"]
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    lengths = [len(tokenizer(line).input_ids) for line in (tmp_path / "source").read_text().splitlines()]
    words = [*files, "--system", "model", str(tiny_folder), "1", "--types", "float32", "--source-tokens"]
    translation.main([*words, str(lengths[2])])
    assert f" {lengths.count(lengths[2])} sentences\n" in capsys.readouterr().out
    assert lengths.count(lengths[2]) < len(lengths)


@pytest.mark.slow
def test_speeds_are_predicted_from_counts(tiny_folder, tmp_path, capsys):
    """What is measured twice is predicted as it was measured, and a copy does the work of its original."""
    (tmp_path / "source").write_text("The dog sleeps.\nWe see a cat.\n")
    words = ["--source", str(tmp_path / "source"), "--rounds", "1", "--types", "float32", "--count"]
    first, second, copy = (["--system", name, str(tiny_folder), beams] for name, beams in ("a3", "a1", "b3"))
    translation.main([*words, *first, *second, *copy, "--output", str(tmp_path / "rows.json")])
    header, *rows = json.loads((tmp_path / "rows.json").read_text())
    work, predicted = header.index("GFLOP"), header.index("predicted")
    assert rows[0][work : work + 2] == rows[2][work : work + 2] != rows[1][work : work + 2]
    assert rows[0][predicted].split()[0] == rows[2][predicted].split()[0]
    assert all(row[predicted].endswith("(1.00x)") for row in rows[:2])
    with pytest.raises(recnmt_hf.UserError, match="a model of 'a' in float32 with two beam sizes"):
        translation.main([*words, *first, *copy])


@pytest.mark.slow
def test_speeds_of_a_comparison(tiny_folder, tmp_path, monkeypatch, capsys):
    """Every row is measured once, by the recipe of its evidence, and replaces earlier figures of the same hardware."""
    files = ["--source", str(tmp_path / "source"), "--target", str(tmp_path / "target")]
    for path in files[1::2]:
        Path(path).write_text("The dog sleeps.\nWe see a cat.\nThey sleep.\n")
    symbols = len(AutoTokenizer.from_pretrained(tiny_folder))
    tokenizer = {"kind": "bpe", "source_symbols": symbols, "target_symbols": symbols, "joint": True}
    comparison = tmp_path / "evidence"
    for name, kind in (("plain-1", "nmt_transformer"), ("plain-2", "nmt_transformer"), ("global-2", "gret")):
        stages = {"baseline_steps": 2, "bf16": True} if kind == "gret" else {}
        recipe = {"model": {"type": kind, "preset": "tiny"}, "training": stages}
        (comparison / name).mkdir(parents=True)
        Evidence(recipe=recipe, tokenizer=tokenizer).save(comparison / name)
    build_models, rank, widths = speed.build_models, speed.Translator.rank, set()

    def ends_at_once(*args):  # models whose best token is always the end of the sentence
        models = build_models(*args)
        with torch.no_grad():
            for model in models:
                for module in model.modules():
                    if isinstance(module, torch.nn.LayerNorm):
                        module.weight.zero_(), module.bias.fill_(1)
                model.get_output_embeddings().weight.zero_()[model.config.eos_token_id] = 1
        return models

    def measured(translator, request, result, scores):
        widths.add((max(map(len, request.sources)), max(map(len, result.tokens))))
        return rank(translator, request, result, scores)

    monkeypatch.setattr(speed, "build_models", ends_at_once)
    monkeypatch.setattr(speed.Translator, "rank", measured)
    words = [str(comparison), "--tokenizers", str(tiny_folder), *files, "--sentences", "2"]
    own, path = hardware(torch.device("cpu")), comparison / "speed.json"
    path.write_text(json.dumps([{"hardware": own}, {"hardware": "another"}]))
    speed.main([*words, "--rounds", "2", "--beams", "2"])
    assert widths and all(source == translation > 2 for source, translation in widths)
    (other, entry) = json.loads(path.read_text())
    assert other == {"hardware": "another"}
    rows = entry.pop("rows")
    assert rows.keys() == {"plain", "global"} and capsys.readouterr().out.count("global: ") == 1
    rates = {"sentences_per_second", "training_tokens_per_second", "first_stage_tokens_per_second"}
    for name, row in rows.items():
        (memory,) = row.pop("training_mebibytes")
        assert 100 < memory < 10_000
        assert row.keys() == (rates if name == "global" else rates - {"first_stage_tokens_per_second"})
        assert all(len(turns) == 2 and min(turns) > 0 for turns in row.values())
    expected = {"beams": 2, "batch": 16, "max_tokens": 1024, "sentences": 2, "hardware": own}
    assert expected.items() <= entry.items()

    path = comparison / "global-2/evidence.json"
    path.write_text(path.read_text().replace(f'"source_symbols": {symbols}', '"source_symbols": 9'))
    with rejects("9", field=str(tiny_folder)):
        speed.main(words)
