"""Training from data in shards: equal to training from memory, resumed in an epoch, on two processes, mixed."""

import json
import shutil

import pytest
import torch
import yaml
from other_processes import launched, output_of
from safetensors.torch import load_file
from user_errors import rejects

from recnmt_hf.commands.main import main
from recnmt_hf.data.sharded import PooledBatchSampler
from recnmt_hf.training.callbacks import TRAINED
from recnmt_hf.training.checkpoints import state_of
from recnmt_hf.training.evidence import Evidence
from recnmt_hf.training.recipe import Recipe
from recnmt_hf.training.run import train


def plan(folder=None, **training):
    """A recipe of 30 steps, about an epoch and a half of its 600 pairs."""
    fields = {"d_model": 32, "dropout": 0.1, "encoder_layers": 1, "decoder_layers": 1}
    steps = {"max_steps": 30, "warmup_steps": 3, "save_steps": 5, "eval_strategy": "no", "keep_last": 10}
    return {
        "model": {"preset": "tiny", "fields": fields},
        "data": {
            "train": [{"generated": "train", "size": 400}, {"generated": "test", "size": 200}],
            "validation": [{"generated": "validation", "size": 20}],
            "shard_size": 50,
            **({} if folder is None else {"prepared": str(folder)}),
        },
        "tokenizer": {"kind": "word", "vocab_size": 200},
        "training": {"use_cpu": True, "max_tokens": 300, "learning_rate": 0.01, "bleu_samples": 0, **steps, **training},
        "average": {"count": 1},
    }


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """The data of the recipe, prepared by the command."""
    place = tmp_path_factory.mktemp("place")
    recipe = plan()
    recipe["data"]["weights"] = [1, 2]  # of training
    (place / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["prepare", str(place / "recipe.yaml"), "--output", str(place / "data"), "--workers", "1"]) == 0
    return place / "data"


@pytest.fixture
def small_pools(monkeypatch):
    """Pools of about 150 pairs: several in an epoch."""
    defaults = {**PooledBatchSampler.__init__.__kwdefaults__, "pool": 150}
    monkeypatch.setattr(PooledBatchSampler.__init__, "__kwdefaults__", defaults)


def weights(run, step=30):
    return load_file(run / f"checkpoint-{step}" / "model.safetensors")


def assert_same(one, other):
    assert one.keys() == other.keys() and all(bool((one[name] == other[name]).all()) for name in one)


def losses(run):
    return [row["loss"] for row in Evidence.load(run / "model").curve if "loss" in row]


def test_equal_to_training_from_memory(prepared, tmp_path):
    train(Recipe(**plan(logging_steps=5)), tmp_path / "memory")
    train(Recipe(**plan(prepared, logging_steps=5)), tmp_path / "shards")
    assert_same(weights(tmp_path / "memory"), weights(tmp_path / "shards"))
    assert losses(tmp_path / "memory") == losses(tmp_path / "shards")
    data = Evidence.load(tmp_path / "shards/model").data
    assert data["training_pairs"] == 600 and data["pairs_of_corpora"] == [400, 200]


@pytest.mark.slow
@pytest.mark.parametrize("mixture", [{}, {"weights": [0.5, 2]}])
def test_resumed_within_an_epoch(prepared, tmp_path, small_pools, mixture):
    """In a pool other than the first: the same weights as without the interruption."""
    recipe = plan(prepared)
    recipe["data"] |= mixture
    train(Recipe(**recipe), tmp_path / "whole")
    for step in (5, 15, 20):
        run = shutil.copytree(tmp_path / "whole", tmp_path / f"killed-{step}")
        shutil.rmtree(run / "model")
        for later in range(step + 5, 31, 5):
            shutil.rmtree(run / f"checkpoint-{later}")
        train(Recipe(**recipe), run, resume=True)
        assert_same(weights(tmp_path / "whole"), weights(run))


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_bpe_dropout(tmp_path, sharded):
    """It changes the training, and a resumed run is that of an uninterrupted one; the final tokenizer has none."""
    recipe = plan(max_steps=30)
    recipe["tokenizer"] = {"kind": "bpe", "vocab_size": 300}
    if sharded:
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        assert main(["prepare", str(tmp_path / "recipe.yaml"), "-o", str(tmp_path / "data"), "--workers", "1"]) == 0
        recipe["data"]["prepared"] = str(tmp_path / "data")
    train(Recipe(**recipe), tmp_path / "plain")
    recipe["tokenizer"]["dropout"] = 0.1
    recipe["training"]["dataloader_num_workers"] = 1
    train(Recipe(**recipe), tmp_path / "whole")
    names = ("model/tokenizer.json", "model/tokenizer_config.json")
    assert [(tmp_path / "plain" / name).read_text() for name in names] == [
        (tmp_path / "whole" / name).read_text() for name in names
    ]
    one, other = weights(tmp_path / "plain"), weights(tmp_path / "whole")
    assert any(bool((one[name] != other[name]).any()) for name in one)
    run = shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    shutil.rmtree(run / "model")
    for later in (20, 25, 30):
        shutil.rmtree(run / f"checkpoint-{later}")
    recipe["training"]["dataloader_num_workers"] = 0
    train(Recipe(**recipe), run, resume=True)
    assert_same(weights(tmp_path / "whole"), weights(run))


def test_epochs_and_weights_of_corpora(prepared, tmp_path, small_pools):
    """Without max_steps the run has whole epochs; weights decide how often a corpus is read in one."""
    recipe = plan(prepared, num_train_epochs=2, save_strategy="epoch")
    recipe["data"]["weights"] = [0.25, 2]
    del recipe["training"]["max_steps"], recipe["training"]["save_steps"]
    train(Recipe(**recipe), tmp_path / "run")
    states = [state_of(folder) for folder in sorted((tmp_path / "run").glob("checkpoint-*"))]
    assert sorted(state["epoch"] for state in states) == [1.0, 2.0]
    assert Evidence.load(tmp_path / "run/model").data["pairs_of_corpora"] == [100, 400]


@pytest.mark.slow
def test_two_processes(prepared, tmp_path):
    """
    Losses and weights of two processes are the same from shards and from memory, with a moving average too. One process
    is killed, and the launch resumed.
    """
    for name, folder in (("memory", None), ("shards", prepared), ("killed", prepared)):
        recipe = plan(folder, logging_steps=5, ema_decay=0.9)
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "from recnmt_hf.commands.main import main\n"
        "if sys.argv[1] == 'kill' and os.environ['RANK'] == '1':\n"
        "    from recnmt_hf.training.trainer import RunCallback\n"
        "    end = RunCallback.on_step_end\n"
        "    def on_step_end(self, args, state, control, **kwargs):\n"
        "        end(self, args, state, control, **kwargs)\n"
        "        state.global_step == 12 and os.kill(os.getpid(), 9)\n"
        "    RunCallback.on_step_end = on_step_end\n"
        "sys.exit(main(['train', *sys.argv[2:]]))\n"
    )

    def launch(kind, name, *more):
        return launched(program, kind, tmp_path / f"{name}.yaml", "--output", tmp_path / name, *more)

    for name in ("memory", "shards"):
        output_of(launch("whole", name))
    assert_same(weights(tmp_path / "memory"), weights(tmp_path / "shards"))
    assert losses(tmp_path / "memory") == losses(tmp_path / "shards")
    killed = launch("kill", "killed")
    killed.communicate()
    assert killed.returncode != 0
    assert (tmp_path / "killed/checkpoint-10").is_dir() and not (tmp_path / "killed/checkpoint-15").exists()
    output_of(launch("whole", "killed", "--resume"))
    assert_same(weights(tmp_path / "shards"), weights(tmp_path / "killed"))
    trained = torch.load(tmp_path / "killed/checkpoint-30" / TRAINED, weights_only=True)
    assert any(not torch.equal(trained[name], value) for name, value in weights(tmp_path / "killed").items())


# -- what is wrong -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"train": [{"generated": "train", "size": 400}]}, "data.prepared"),
        ({"weights": [1]}, "data.weights"),
        ({"weights": [0, 0]}, "data.weights"),
        ({"weights": [1, 2], "temperature": 2.0}, "data.weights"),
        ({"weights": [1, 2], "prepared": None}, "data.weights"),
        ({"prepared": "nowhere"}, "nowhere/manifest.json"),
    ],
)
def test_recipes_that_do_not_fit(prepared, tmp_path, changes, field):
    recipe = plan(prepared)
    recipe["data"] |= changes
    with rejects(field=field):
        train(Recipe(**recipe), tmp_path / "run")


def test_the_command_prints_what_was_removed(tmp_path, capsys):
    recipe = plan()
    recipe["data"] |= {"deduplicate": "pair", "max_source_length": 12}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    command = ["prepare", str(tmp_path / "recipe.yaml"), "-o", str(tmp_path / "data"), "--workers", "1"]
    assert main([*command, "--part", "2/2"]) == 0
    assert main([*command, "--part", "1/2"]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    _, *rows = rows[rows.index(["corpus", "read", "duplicate", "too long", "kept"]) :]
    for row in rows:
        read, *removed, kept = map(int, row[1:])
        assert read - sum(removed) == kept and removed[1] > 0
    assert main([*command, "tokenizer.kind=bpe"]) == 2
    assert "has data that was prepared with other" in capsys.readouterr().err
