"""Several processes: accelerate's launcher with the shipped settings, and fully sharded models equal to whole ones."""

import json
import re
import textwrap

import pytest
import torch
from other_processes import launched, output_of
from packaging import version
from safetensors.torch import load_file

from recnmt_hf.commands.main import main


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


def launch(tmp_path, repository, mode, settings, runs, options=()):
    """`accelerate launch` with a file of scripts/accelerate; the last run is `scripts/train.py`. Returns all output."""
    program, plan = tmp_path / "program.py", tmp_path / f"{mode}.json"
    program.write_text(textwrap.dedent(RUNS))
    plan.write_text(json.dumps([[*run[:-1], str(tmp_path / mode / run[-1])] for run in runs]))
    options = (*options, "--config_file", repository / "scripts/accelerate" / settings)
    words = program, mode, plan, repository / "scripts/train.py"
    return output_of(launched(*words, module="accelerate.commands.launch", options=options))


def losses(output):
    return re.findall(r"'(?:eval_)?loss': '([\d.]+)'", output)


def tiny_run(repository, folder, kind, tied, steps, baseline_steps, fields=()):
    """Recipe, changes and folder of a short run, with a checkpoint after each two steps."""
    changes = [
        "data.train=[{generated: train, size: 100}]",
        "data.validation=[{generated: validation, size: 20}]",
        "model.type=" + kind,
        *("model.fields." + field for field in fields),
        "tokenizer.joint=" + tied,
        "model.fields.tie_word_embeddings=" + tied,
        "model.fields.dropout=0.0",
        "model.fields.d_model=32",
        "training.use_cpu=true",
        "training.bleu_samples=0",
        "training.adam_epsilon=0.01",
        "training.learning_rate=0.01",
        "training.warmup_steps=1",
        f"training.max_steps={steps}",
        f"training.baseline_steps={baseline_steps}",
        "training.save_steps=2",
        "training.eval_steps=2",
        "training.logging_steps=1",
        "average.count=2",
    ]
    return str(repository / "scripts/recipes/quickstart_biarn.yaml"), changes, folder


@needs_sharding_on_cpu
@pytest.mark.slow
def test_accelerate_trains_sharded_as_whole(tmp_path, repository):
    """cpu_2.yaml runs two processes; under fsdp_8.yaml (two of them) losses, weights and a resumed run are the same."""
    rnmt = tiny_run(repository, "rnmt", "rnmt", "true", 2, "null", fields=("readout_dropout=0", "init_uniform=null"))
    biarn = tiny_run(repository, "biarn", "biarn_transformer", "false", 6, "2")
    whole = launch(tmp_path, repository, "whole", "cpu_2.yaml", [rnmt, biarn])
    assert whole.count("; 2 processes on cpu") == 2 and whole.count("Sharded steps equal whole ones.") == 2
    # The sharded variant reads its data from shards too; the resumed run continues in its second stage.
    recipe, changes, folder = biarn
    assert main(["prepare", recipe, *changes, "--output", str(tmp_path / "data"), "--workers", "1"]) == 0
    biarn = recipe, [*changes, f"data.prepared={tmp_path / 'data'}"], folder
    options = ("--num_processes", "2", "--mixed_precision", "no")
    sharded = launch(tmp_path, repository, "sharded", "fsdp_8.yaml", [rnmt, biarn, biarn], options=options)
    sharded, resumed = sharded.split("Resuming from")
    assert losses(sharded) == losses(whole) and len(losses(whole)) == 1.5 * (2 + 6)
    assert "checkpoint-4" in resumed.splitlines()[0] and losses(resumed) == losses(whole)[-3:]
    for run in ("rnmt", "biarn"):
        expected, weights = (
            load_file(tmp_path / mode / run / "model/model.safetensors") for mode in ("whole", "sharded")
        )
        assert weights.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (weights[name] - tensor).abs().max() < 1e-4, name
