"""Data in shards, and models in shards: training is equal to that from memory and with whole models, also resumed."""

import json
import re
import shutil
import textwrap

import pytest
import torch
import yaml
from other_processes import launched, output_of
from packaging import version
from safetensors.torch import load_file
from user_errors import rejects

from recnmt_hf.commands.main import main
from recnmt_hf.data.sharded import PooledBatchSampler
from recnmt_hf.data.tokenizer_pair import TokenizerPair
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
    for name in ("model/tokenizer.json", "model/tokenizer_config.json"):
        assert (tmp_path / "plain" / name).read_text() == (tmp_path / "whole" / name).read_text()
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
    data = Evidence.load(tmp_path / "run/model").data
    assert data["training_pairs"] == 600 and data["pairs_of_corpora"] == [100, 400]


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


def test_tokenizers_of_a_killed_preparation_are_replaced(tmp_path):
    """That of the target was written, the source's was not: a joint one must not be read beside it."""
    recipe, data = plan(), tmp_path / "data"
    for joint in (False, True):
        recipe["tokenizer"]["joint"] = joint
        (tmp_path / "recipe.json").write_text(json.dumps(recipe))
        assert main(["prepare", str(tmp_path / "recipe.json"), "-o", str(data), "--workers", "1"]) == 0
        assert TokenizerPair.load(data, source_subfolder="tokenizer").is_joint == joint
        for path in data.iterdir():
            if path.name not in ("target_tokenizer", "tokenizer_section.json"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_the_command_prints_what_was_removed(tmp_path, capsys):
    recipe = plan()
    recipe["data"] |= {"max_source_length": 12, "max_length_ratio": 1.3}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    command = ["prepare", str(tmp_path / "recipe.yaml"), "-o", str(tmp_path / "data"), "--workers", "1"]
    assert main([*command, "--part", "2/2"]) == 0
    assert main([*command, "--part", "1/2"]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    _, *rows = rows[rows.index(["corpus", "read", "length ratio", "too long", "kept"]) :]
    for row in rows:
        read, *removed, kept = map(int, row[1:])
        assert read - sum(removed) == kept and removed[1] > 0
    assert main([*command, "tokenizer.kind=bpe"]) == 2
    assert "has data prepared with other" in capsys.readouterr().err


# Its streams of the CPU record no events.
needs_sharding_on_cpu = pytest.mark.skipif(
    version.parse(torch.__version__) < version.parse("2.7"), reason="torch 2.6 shards on accelerators alone"
)


# Several runs in one launch: starting processes takes longer than these runs. accelerate shards on accelerators only;
# two CPU processes that it takes for two GPUs run the same code.
RUNS = """
    import json
    import os
    import runpy
    import sys
    import torch
    import torch.distributed as dist
    from accelerate import PartialState
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import fully_shard
    import recnmt_hf
    from recnmt_hf import Recipe, train
    from recnmt_hf.training.trainer import TranslationTrainer

    begin, step = PartialState.__init__, TranslationTrainer.training_step

    def relabelled(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        if PartialState._shared_state["distributed_type"] == DistributedType.MULTI_CPU:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    def watched(self, *args, **kwargs):
        whole = sum(p.numel() for p in self.model_wrapped.parameters())
        own = sum(p.to_local().numel() for p in self.model_wrapped.parameters())
        assert self.accelerator.is_fsdp2 and own < 0.6 * whole, (own, whole)
        return step(self, *args, **kwargs)

    def check_sharded_steps():
        config = recnmt_hf.NMTTransformerConfig.from_preset("tiny", vocab_size=50, d_model=32, dropout=0.0)

        def build():
            torch.manual_seed(1)
            return recnmt_hf.NMTTransformerForConditionalGeneration(config)

        whole, sharded = build(), build()
        for layer in [*sharded.model.encoder.layers, *sharded.model.decoder.layers]:
            fully_shard(layer)
        fully_shard(sharded)
        torch.manual_seed(5 + dist.get_rank())
        batch = {"input_ids": torch.randint(4, 50, (4, 7)), "labels": torch.randint(4, 50, (4, 5))}
        for return_logits in (False, True):
            settings = {"label_smoothing": 0.1, "return_logits": return_logits}
            losses = [model(**batch, **settings).loss for model in (sharded, whole)]
            torch.testing.assert_close(*losses)
            for loss in losses:
                loss.backward()
            for (name, shard), full in zip(sharded.named_parameters(), whole.parameters(), strict=True):
                mean = full.grad.clone()
                dist.all_reduce(mean)
                torch.testing.assert_close(shard.grad.full_tensor(), mean / 2, atol=1e-6, rtol=1e-5)
            sharded.zero_grad()
            whole.zero_grad()
        print("Sharded steps equal whole ones.", flush=True)

    mode, runs, script = sys.argv[1:]
    if mode == "sharded":
        PartialState.__init__, TranslationTrainer.training_step = relabelled, watched
    *first, last = json.load(open(runs))
    for recipe, changes, folder in first:
        train(Recipe.from_file(recipe, changes), folder)
    if mode == "whole":
        check_sharded_steps()  # in the process group of the run
    recipe, changes, folder = last
    resume = ["--resume"] * (mode == "sharded")
    if resume and os.environ["RANK"] == "0":
        newest = max(os.listdir(folder), key=lambda name: (name.startswith("checkpoint-"), name))
        os.remove(os.path.join(folder, newest, "complete.json"))
    sys.argv = [script, recipe, *changes, "--output", folder, *resume]
    runpy.run_path(script, run_name="__main__")
"""


def accelerated(tmp_path, repository, mode, settings, runs, options=()):
    """`accelerate launch` with a file of scripts/accelerate; the last run is `scripts/train.py`. Returns all output."""
    program, plan = tmp_path / "program.py", tmp_path / f"{mode}.json"
    program.write_text(textwrap.dedent(RUNS))
    plan.write_text(json.dumps([[*run[:-1], str(tmp_path / mode / run[-1])] for run in runs]))
    options = (*options, "--config_file", repository / "scripts/accelerate" / settings)
    words = program, mode, plan, repository / "scripts/train.py"
    return output_of(launched(*words, module="accelerate.commands.launch", options=options))


def printed_losses(output):
    return re.findall(r"'(?:eval_)?loss': '([\d.]+)'", output)


def tiny_run(repository, folder, kind, tied, steps, baseline_steps, fields=()):
    """Recipe, changes and folder of a short run, with a checkpoint after each two steps."""
    training = f"max_steps={steps} baseline_steps={baseline_steps} adam_epsilon=0.01 learning_rate=0.01 warmup_steps=1"
    training += " use_cpu=true bleu_samples=0 save_steps=2 eval_steps=2 logging_steps=1"
    changes = ["data.train=[{generated: train, size: 100}]", "data.validation=[{generated: validation, size: 20}]"]
    changes += [f"model.type={kind}", f"tokenizer.joint={tied}", "average.count=2"]
    fields = (*fields, f"tie_word_embeddings={tied}", "dropout=0.0", "d_model=32")
    changes += [f"model.fields.{field}" for field in fields]
    changes += [f"training.{setting}" for setting in training.split()]
    return str(repository / "scripts/recipes/quickstart_biarn.yaml"), changes, folder


@needs_sharding_on_cpu
@pytest.mark.slow
def test_accelerate_trains_sharded_as_whole(tmp_path, repository):
    """cpu_2.yaml runs two processes; under fsdp_8.yaml (two of them) losses, weights and a resumed run are the same."""
    rnmt = tiny_run(repository, "rnmt", "rnmt", "true", 2, "null", fields=("readout_dropout=0", "init_uniform=null"))
    biarn = tiny_run(repository, "biarn", "biarn_transformer", "false", 6, "2")
    whole = accelerated(tmp_path, repository, "whole", "cpu_2.yaml", [rnmt, biarn])
    assert whole.count("; 2 processes on cpu") == 2 and whole.count("Sharded steps equal whole ones.") == 2
    # The sharded variant reads its data from shards too; the resumed run continues in its second stage.
    recipe, changes, folder = biarn
    assert main(["prepare", recipe, *changes, "--output", str(tmp_path / "data"), "--workers", "1"]) == 0
    biarn = recipe, [*changes, f"data.prepared={tmp_path / 'data'}"], folder
    options = ("--num_processes", "2", "--mixed_precision", "no")
    sharded = accelerated(tmp_path, repository, "sharded", "fsdp_8.yaml", [rnmt, biarn, biarn], options=options)
    sharded, resumed = sharded.split("Resuming from")
    assert printed_losses(sharded) == printed_losses(whole) and len(printed_losses(whole)) == 1.5 * (2 + 6)
    assert "checkpoint-4" in resumed.splitlines()[0] and printed_losses(resumed) == printed_losses(whole)[-3:]
    for run in ("rnmt", "biarn"):
        folders = (tmp_path / mode / run / "model" for mode in ("whole", "sharded"))
        expected, weights = (load_file(folder / "model.safetensors") for folder in folders)
        assert weights.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (weights[name] - tensor).abs().max() < 1e-4, name
