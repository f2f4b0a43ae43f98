"""Recipes of the papers' own settings run on a slice of data in the format of theirs; one or two of each kind."""

import itertools
import json

import pytest
import torch
from datasets import Dataset, Features, Translation
from safetensors.torch import load_file

from recnmt_hf import Recipe
from recnmt_hf.commands.main import main
from recnmt_hf.metrics import rouge_scores
from recnmt_hf.training.evidence import Evidence


pytestmark = pytest.mark.usefixtures("cards_of_one_process")

CHINESE = [
    [("我们", "we"), ("他们", "they"), ("孩子们", "the children")],
    [("看见", "see"), ("喜欢", "like"), ("寻找", "look for")],
    [("三只狗", "three dogs"), ("一本旧书", "an old book"), ("那座桥", "that bridge"), ("新房子", "the new house")],
]
TRAINING = "bf16=false use_cpu=true max_steps=2 max_tokens=256 eval_steps=2 save_steps=2 bleu_samples=2"
SMALL = [
    *("data.num_proc=1", "tokenizer.vocab_size=300", *(f"training.{setting}" for setting in TRAINING.split())),
    *(f"model.fields.{name}=32" for name in ("d_model", "encoder_ffn_dim", "decoder_ffn_dim")),
    *(f"model.fields.{name}=1" for name in ("encoder_layers", "decoder_layers")),
    *(f"model.fields.{name}=2" for name in ("encoder_attention_heads", "decoder_attention_heads")),
]


def write_hub_set(folder, config, languages, pairs):
    """Parquet files with a `translation` feature and a card that names configuration and splits, as on the Hub."""
    for split, rows in {"train": pairs, "validation": pairs[:4], "test": pairs[4:8]}.items():
        table = {"translation": [dict(zip(languages, pair, strict=True)) for pair in rows]}
        data = Dataset.from_dict(table, features=Features({"translation": Translation(languages=list(languages))}))
        (folder / config).mkdir(parents=True, exist_ok=True)
        data.to_parquet(str(folder / config / f"{split}-00000-of-00001.parquet"))
    files = [f"  - split: {split}\n    path: {config}/{split}-*\n" for split in ("train", "validation", "test")]
    card = f"- config_name: {config}\n  data_files:\n{''.join(files)}"
    (folder / "README.md").write_text(f"---\nconfigs:\n{card}---\n")


@pytest.fixture(scope="module")
def hub_sets(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("work")
    german = [(pair.de, pair.en) for pair in corpus["train"][:60]]
    chinese = [
        ("".join(word for word, _ in words) + "。", " ".join(word for _, word in words).capitalize() + ".")
        for words in itertools.product(*CHINESE)
    ]
    write_hub_set(folder / "wmt/wmt14", "de-en", ("de", "en"), german)
    write_hub_set(folder / "wmt/wmt17", "zh-en", ("zh", "en"), chinese)
    nist = folder / "data/nist_zh_en"
    nist.mkdir(parents=True)
    for split, pairs in {"train": chinese, **{f"nist0{year}": chinese[:4] for year in range(2, 7)}}.items():
        sides = {"zh": [source for source, _ in pairs]}
        for ending in ("en",) if split == "train" else ("en0", "en1", "en2", "en3"):
            sides[ending] = [target.replace("the", ending) if ending[-1] > "0" else target for _, target in pairs]
        for ending, lines in sides.items():
            (nist / f"{split}.{ending}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tests", "references"),
    [
        ("wmt17_zh_en_big_biarn", ["newstest2017"], 1),
        ("wmt14_en_de_big_rpe", ["newstest2014"], 1),
        ("nist_zh_en_big_rpe", ["nist02", "nist03", "nist04"], 4),
        ("nist_zh_en_rnmt", ["mt03", "mt04", "mt05", "mt06"], 4),
    ],
)
def test_recipes_of_the_papers(hub_sets, repository, monkeypatch, name, tests, references):
    """With the paper's parts of the model, all test sets, all references and their average."""
    monkeypatch.chdir(hub_sets)
    fields = ["model.fields.recurrence_hidden_size=32", "training.baseline_steps=1"] if "biarn" in name else []
    small = [setting for setting in SMALL if "rnmt" not in name or not ("layers" in setting or "vocab_size" in setting)]
    fields += ["tokenizer.vocab_size=200"] if "rnmt" in name else []  # the steps of `SMALL` replace its epochs
    assert main(["train", str(repository / f"scripts/recipes/{name}.yaml"), *small, *fields]) == 0
    output = hub_sets / "outputs" / name
    assert sorted(path.stem for path in output.glob("model-*")) == [f"model-{test}" for test in tests]
    parts = {"biarn": "recurrence", "rpe": "recurrent_positions", "rnmt": "relation_layers"}
    weights = load_file(output / "model/model.safetensors")
    assert any(parts[name.rpartition("_")[2]] in weight for weight in weights)
    scores, card = Evidence.load(output / "model").tests, (output / "model/README.md").read_text()
    assert all(score.references == references and f"nrefs:{references}|" in score.signature for score in scores)
    assert ("| average |" in card) == (len(tests) > 1)
    results = json.loads((output / "results.json").read_text())
    if len(tests) > 1:
        assert results["average"]["bleu"] == pytest.approx(sum(results[test]["bleu"] for test in tests) / len(tests))
    if "rnmt" in name:
        group = torch.load(output / "checkpoint-2/optimizer.pt", weights_only=True)["param_groups"][0]
        assert (group["lr"], group["rho"], group["eps"]) == (1.0, 0.95, 1e-6)


SUMMARIES_OF_TWO_STAGES = [
    *("training.max_tokens=2048", "training.bleu_samples=3", "average.count=1", "model.fields.num_capsules=4"),
    *(f"training.{name}=1" for name in ("baseline_steps", "eval_steps", "save_steps")),
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
def test_lcsts(repository, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/lcsts").mkdir(parents=True)
    pairs = list(zip(TEXTS, SUMMARIES, strict=True))
    (tmp_path / "data/lcsts/part_1.tsv").write_text(tsv(pairs * 5), encoding="utf-8")
    for part in (2, 3):
        (tmp_path / f"data/lcsts/part_{part}.tsv").write_text(tsv([pairs[0], *pairs[2:]]), encoding="utf-8")
    recipe = str(repository / "scripts/recipes/lcsts_base_gret.yaml")
    assert main(["train", recipe, *(one for one in SMALL if "vocab_size" not in one), *SUMMARIES_OF_TWO_STAGES]) == 0
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
