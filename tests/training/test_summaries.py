"""Summarization: the recipes run on a few texts in the format of their data, with ROUGE and truncation."""

import json

import pytest

from recnmt_hf import Recipe
from recnmt_hf.commands.main import main
from recnmt_hf.metrics import rouge_scores


SMALL = [
    *("data.num_proc=1", "training.bf16=false", "training.use_cpu=true", "training.max_tokens=2048"),
    *("training.max_steps=2", "training.bleu_samples=3", "average.count=1", "model.fields.num_capsules=4"),
    *(f"training.{name}=1" for name in ("baseline_steps", "eval_steps", "save_steps")),
    *(f"model.fields.{name}=32" for name in ("d_model", "encoder_ffn_dim", "decoder_ffn_dim")),
    *(f"model.fields.{name}=1" for name in ("encoder_layers", "decoder_layers")),
    *(f"model.fields.{name}=2" for name in ("encoder_attention_heads", "decoder_attention_heads")),
]
TEXTS = [
    "昨天下午三只狗在公园里跑来跑去" * 12,
    "这座城市的新桥明天将要开放",
    "今年的苹果比去年贵得多",
    "图书馆买了一本旧书",
]
SUMMARIES = ["狗在公园", "新桥明天开放", "苹果涨价", "图书馆买书"]


def tsv(pairs):
    return "".join(f"{text}\t{summary}\n" for text, summary in pairs)


@pytest.mark.slow
@pytest.mark.usefixtures("cards_of_one_process")
def test_lcsts(repository, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/lcsts").mkdir(parents=True)
    pairs = list(zip(TEXTS, SUMMARIES, strict=True))
    (tmp_path / "data/lcsts/part_1.tsv").write_text(tsv(pairs * 5), encoding="utf-8")
    for part in (2, 3):
        (tmp_path / f"data/lcsts/part_{part}.tsv").write_text(tsv([pairs[0], *pairs[2:]]), encoding="utf-8")
    recipe = str(repository / "scripts/recipes/lcsts_base_gret.yaml")
    assert main(["train", recipe, *SMALL]) == 0
    messages = capsys.readouterr().err
    assert "20 training pairs, 3 validation pairs" in messages  # the longest text is cut off, not left out
    output = tmp_path / "outputs/lcsts_base_gret"
    results = json.loads((output / "results.json").read_text())
    made = (output / "model-part_3.zh").read_text(encoding="utf-8").splitlines()
    scores = rouge_scores(made, [SUMMARIES[0], *SUMMARIES[2:]], "characters")
    assert [results["part_3"][kind] for kind in ("rouge1", "rouge2", "rougeL")] == [each.score for each in scores]
    assert "units:characters" in results["part_3"]["signature"] and results["part_3"]["sentences"] == 3
    assert results["decoding"]["on_long"] == "truncate" and results["decoding"]["max_source_length"] == 160
    state = json.loads((output / "checkpoint-2/trainer_state.json").read_text())
    assert {"eval_rouge1", "eval_rouge2", "eval_rougeL"} <= set(state["log_history"][-1])
    (tmp_path / "in.zh").write_text("".join(f"{text}\n" for text in TEXTS), encoding="utf-8")
    translate = ["translate", str(output / "model"), "--input", "in.zh", "--output", "out.zh"]
    lengths = ["--max-source-length", "160", "--max-length-factor", "0", "--max-length-extra", "50"]
    assert main([*translate, "--on-long", "truncate", *lengths]) == 0
    assert (tmp_path / "out.zh").read_text(encoding="utf-8").splitlines()[0] == made[0]


def test_defaults_of_summarization():
    assert Recipe(training={"text_metric": "rouge"}).training.metric_for_best_model == "rougeL"
    recipe = Recipe(data={"on_long": "truncate", "max_source_length": 77})
    assert recipe.decoding.on_long == "truncate" and recipe.decoding.max_source_length == 77
    assert Recipe(data={"on_long": "truncate"}, decoding={"on_long": "split"}).decoding.on_long == "split"
