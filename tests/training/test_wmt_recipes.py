"""Recipes of the papers' own settings run unchanged on a slice of data in their columns; one or two of each kind."""

import itertools
import json

import pytest
import torch
from datasets import Dataset, Features, Translation
from safetensors.torch import load_file

from recnmt_hf.commands.main import main
from recnmt_hf.training.evidence import Evidence


pytestmark = pytest.mark.usefixtures("cards_of_one_process")

CHINESE = [
    [("我们", "we"), ("他们", "they"), ("孩子们", "the children")],
    [("看见", "see"), ("喜欢", "like"), ("寻找", "look for")],
    [("三只狗", "three dogs"), ("一本旧书", "an old book"), ("那座桥", "that bridge"), ("新房子", "the new house")],
]
SMALL = [
    "data.num_proc=1",
    "tokenizer.vocab_size=300",
    "training.bf16=false",
    "training.use_cpu=true",
    "training.max_steps=2",
    "training.max_tokens=256",
    "training.eval_steps=2",
    "training.save_steps=2",
    "training.bleu_samples=2",
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
    card = ""
    for config in sorted(path.name for path in folder.iterdir() if path.is_dir()):
        files = [f"  - split: {split}\n    path: {config}/{split}-*\n" for split in ("train", "validation", "test")]
        card += f"- config_name: {config}\n  data_files:\n{''.join(files)}"
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
    for year in (15, 16, 17):
        write_hub_set(folder / f"wmt/wmt{year}", "de-en", ("de", "en"), german)
    write_hub_set(folder / "wmt/wmt16", "ro-en", ("ro", "en"), german)
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
@pytest.mark.parametrize(("task", "size"), [("wmt14_en_de", "base"), ("wmt17_zh_en", "big")])
def test_baseline_then_warm_start(hub_sets, repository, monkeypatch, capsys, task, size):
    """Two runs under their default output folders, the second from the first, with its vocabulary; and both in one."""
    monkeypatch.chdir(hub_sets)
    recipes = repository / "scripts/recipes"
    assert main(["train", str(recipes / f"{task}_{size}.yaml"), *SMALL]) == 0
    capsys.readouterr()
    fields = ["model.fields.recurrence_hidden_size=32", "training.learning_rate=0"]
    variant = ["train", str(recipes / f"{task}_{size}_biarn.yaml"), *SMALL, *fields]
    assert main([*variant, f"model.init_from=outputs/{task}_{size}/model", "training.baseline_steps=null"]) == 0
    messages = capsys.readouterr().err
    assert f"Warm start from outputs/{task}_{size}/model: copied" in messages and "did not use" not in messages
    assert ("newstest2014" in messages) == (task == "wmt14_en_de") and ("newstest2017" in messages) == (
        task == "wmt17_zh_en"
    )
    stages = [hub_sets / "outputs" / f"{task}_{size}{suffix}/model/model.safetensors" for suffix in ("", "_biarn")]
    baseline, warm = (load_file(stage) for stage in stages)
    assert set(baseline) < set(warm)
    assert all(torch.equal(tensor, warm[name]) for name, tensor in baseline.items())
    if size == "big":
        return
    assert main([*variant, "training.baseline_steps=1", "--output", "outputs/stages", "--overwrite"]) == 0
    assert "Warm start from outputs/stages/baseline/checkpoint-1: copied" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "tests"), [("wmt14_en_de_big", ["newstest2014"]), ("nist_zh_en_big", ["nist02", "nist03", "nist04"])]
)
def test_recurrent_positions(hub_sets, repository, monkeypatch, task, tests):
    """With the paper's share of the channels: half of them."""
    monkeypatch.chdir(hub_sets)
    assert main(["train", str(repository / f"scripts/recipes/{task}_rpe.yaml"), *SMALL]) == 0
    output = hub_sets / "outputs" / f"{task}_rpe"
    assert sorted(path.stem for path in output.glob("model-*")) == [f"model-{test}" for test in tests]
    weights = load_file(output / "model/model.safetensors")
    positions = {name: tensor.shape for name, tensor in weights.items() if "recurrent_positions.out_proj.w" in name}
    assert list(positions.values()) == [(16, 16), (16, 16)]
    assert ("model.shared.weight" in weights) == (task != "nist_zh_en_big")
    # The scores use all references, and the card says so.
    scores, card = Evidence.load(output / "model").tests, (output / "model/README.md").read_text()
    references = 4 if task == "nist_zh_en_big" else 1
    assert all(score.references == references and f"nrefs:{references}|" in score.signature for score in scores)
    assert ("nist03 (4 references)" in card) == ("| average |" in card) == (references == 4)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["nist_zh_en", "wmt16_en_de"])
def test_recurrent_models(hub_sets, repository, monkeypatch, capsys, task):
    """RNMT in the paper's own settings, and its baseline by one field."""
    monkeypatch.chdir(hub_sets)
    small = [setting for setting in SMALL if "layers" not in setting and "vocab_size" not in setting]
    small += ["tokenizer.vocab_size=200"]  # the number of steps in `SMALL` replaces the recipe's epochs
    if task == "wmt16_en_de":
        small.append("tokenizer.target_vocab_size=200")
    recipe = str(repository / "scripts/recipes" / f"{task}_rnmt.yaml")
    plain = [["model.fields.relation_layers=0"]] if task == "nist_zh_en" else []
    for fields in ([], *plain):
        output = f"outputs/{task}-{len(fields)}"
        assert main(["train", recipe, *small, *fields, "-o", output]) == 0
        messages = capsys.readouterr().err
        assert ("newstest2016" in messages) == (task == "wmt16_en_de")
        results = json.loads((hub_sets / output / "results.json").read_text())
        if task == "nist_zh_en":
            scores = [results[f"mt0{year}"]["bleu"] for year in (3, 4, 5, 6)]
            assert results["average"]["bleu"] == pytest.approx(sum(scores) / 4)
            assert "average of the test sets: bleu" in messages
        else:
            assert "average" not in results
        state = torch.load(next((hub_sets / output).glob("checkpoint-2")) / "optimizer.pt", weights_only=True)
        assert set(state["state"][0]) == {"step", "square_avg", "acc_delta"}
        group = state["param_groups"][0]
        assert (group["lr"], group["rho"], group["eps"]) == (1.0, 0.95, 1e-6)
        weights = load_file(hub_sets / output / "model/model.safetensors")
        assert any("relation_layers" in name for name in weights) == (not fields)
