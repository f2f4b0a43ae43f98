"""transformers' own Seq2SeqTrainer trains, smooths and generates with the zoo's models as with its own."""

import logging
import tempfile
import textwrap
from functools import cache

import numpy as np
import pytest
import torch
from datasets import Dataset
from other_processes import launched, output_of
from safetensors.torch import load_file
from transformers import DataCollatorForSeq2Seq, EarlyStoppingCallback, Seq2SeqTrainer, Seq2SeqTrainingArguments
from transformers.utils import logging as transformers_logging

import recnmt_hf
from recnmt_hf.data.prepared import prepare_dataset
from recnmt_hf.families import FAMILIES
from recnmt_hf.models.seq2seq_outputs import CACHE


EACH_STEP = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}


@cache
def prepared(tokenizer):
    """Sixteen pairs, prepared once for all tests."""
    with tempfile.TemporaryDirectory() as folder:
        data = prepare_dataset({"generated": "validation", "size": 16}, "en", "de", tokenizer, tokenizer, folder)
        return Dataset.from_dict({name: data[name][:] for name in ("input_ids", "labels")})


def trainer_for(tmp_path, tokenizer, prefix="NMTTransformer", fields=None, **settings):
    torch.manual_seed(1)
    sizes = {"vocab_size": len(tokenizer), "d_model": 32, "decoder_layers": 1, "dropout": 0.0}
    sizes |= {"encoder_layers": 2 if prefix == "ONLSTMTransformer" else 1, "share_encoder_decoder_embeddings": True}
    sizes |= {"relation_layers": 0} if prefix == "RNMT" else {}
    config = getattr(recnmt_hf, f"{prefix}Config").from_preset("tiny", **{**sizes, **(fields or {})})
    model = getattr(recnmt_hf, f"{prefix}ForConditionalGeneration")(config)
    data = prepared(tokenizer)
    plain = {"max_steps": 1, "save_strategy": "no", "use_cpu": True, "report_to": "none", "disable_tqdm": True}
    plain |= {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "logging_steps": 1}
    arguments = Seq2SeqTrainingArguments(output_dir=str(tmp_path / "out"), **{**plain, **settings})
    return Seq2SeqTrainer(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        compute_metrics=(lambda output: {"tokens": int(np.sum(output.predictions != 0))})
        if settings.get("predict_with_generate")
        else None,
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_accumulation_and_smoothing(tmp_path, tokenizer, smoothing):
    weights = []
    for part, (size, steps) in enumerate(((16, 1), (4, 4))):
        settings = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
        trainer = trainer_for(tmp_path / str(part), tokenizer, label_smoothing_factor=smoothing, **settings)
        trainer.train()
        weights.append({name: p.detach().clone() for name, p in trainer.model.named_parameters()})
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], atol=1e-6, rtol=1e-4)


def test_label_smoothing_that_hides_labels_from_vrnmt_is_reported(tmp_path, tokenizer, caplog):
    """Its posterior needs them. Without smoothing, and in evaluation and generation, nothing is reported."""
    transformers_logging.get_logger().warning_once.cache_clear()
    library = logging.getLogger("transformers")
    library.addHandler(caplog.handler)
    try:
        for smoothing in (0.0, 0.1):
            trainer = trainer_for(tmp_path, tokenizer, "VRNMT", label_smoothing_factor=smoothing)
            trainer.evaluate()
            trainer.model.train().generate(torch.tensor([[5, 6, 2]]), max_new_tokens=3)
            assert "label_smoothing_factor" not in caplog.text
            trainer.train()
    finally:
        library.removeHandler(caplog.handler)
    assert caplog.text.count("set label_smoothing_factor=0") == 1


@pytest.mark.parametrize("prefix", [family.prefix for family in FAMILIES.values()])
def test_generation_metrics_and_resuming_of_every_family(tmp_path, tokenizer, prefix):
    """Scores of `compute_metrics`, and a resumed run that ends in the weights of an uninterrupted one."""
    settings = {"predict_with_generate": True, "generation_max_length": 5, "metric_for_best_model": "tokens"}
    settings |= {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "max_steps": 2, **EACH_STEP}
    whole, resumed = (trainer_for(tmp_path / name, tokenizer, prefix, **settings) for name in ("whole", "resumed"))
    for trainer in (whole, resumed):
        trainer.eval_dataset = trainer.eval_dataset.select(range(6))  # the last batch is smaller
    whole.train()
    tokens = [entry["eval_tokens"] for entry in whole.state.log_history if "eval_tokens" in entry]
    assert len(tokens) == 2 and all(count > 0 for count in tokens)
    assert whole.predict(whole.eval_dataset).predictions.shape[0] == 6
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole/out/checkpoint-1"))
    for (name, one), other in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other), name


def batch_of(tokenizer):
    batch = tokenizer(["the dog sleeps .", "we see ."], padding=True, return_tensors="pt")
    return {**batch, "decoder_input_ids": torch.tensor([[1, 7, 8], [1, 9, 5]])}


@pytest.mark.parametrize("prefix", [family.prefix for family in FAMILIES.values()])
def test_adapters_are_trained_saved_and_merged(tmp_path, tokenizer, prefix):
    """
    LoRA on every linear layer but the output matrix, which may be the embeddings' too: it alone learns, loads again,
    and merged or not the outputs are the same.
    """
    peft = pytest.importorskip("peft", reason="peft is not installed")
    trainer = trainer_for(tmp_path, tokenizer, prefix, max_steps=2)
    base = trainer.model
    before = {name: parameter.detach().clone() for name, parameter in base.named_parameters()}
    linears = {name.rpartition(".")[2] for name, module in base.named_modules() if type(module) is torch.nn.Linear}
    linears = sorted(linears - {"lm_head"})
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=linears, task_type="SEQ_2_SEQ_LM"))
    trainer = Seq2SeqTrainer(
        model=adapted,
        args=trainer.args,
        train_dataset=trainer.train_dataset,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=adapted),
    )
    trainer.train()
    adapted.eval()
    frozen = {name.removeprefix("base_model.model."): value for name, value in adapted.named_parameters()}
    frozen = {name.replace(".base_layer", ""): value for name, value in frozen.items()}
    assert all(torch.equal(frozen[name], before[name]) for name in before if name in frozen)
    batch = batch_of(tokenizer)
    outputs = [adapted(**batch).logits]
    assert (outputs[0] - base.eval()(**batch).logits).abs().max() == 0
    adapted.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter/model.safetensors").exists()
    for change in (adapted.merge_adapter, adapted.unmerge_adapter):
        change()
        outputs.append(adapted(**batch).logits)
    with adapted.disable_adapter():
        assert (adapted(**batch).logits - outputs[0]).abs().max() > 1e-5
    fresh = trainer_for(tmp_path / "fresh", tokenizer, prefix).model
    fresh.load_state_dict(before, strict=False)
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval()
    outputs += [loaded(**batch).logits, loaded.merge_and_unload().eval()(**batch).logits]
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("prefix", ["BiARNTransformer", "GRET", "RPETransformer", "ONLSTMTransformer", "RNMT"])
def test_adapters_of_recurrent_weights(tmp_path, tokenizer, prefix, cell):
    """
    LoRA on the weights of recurrent cells, which are no linear layers: it learns in losses and in generation alike, and
    merged or not the outputs are the same.
    """
    peft = pytest.importorskip("peft", reason="peft is not installed")
    if cell == "lstm" and prefix in ("GRET", "RNMT"):
        pytest.skip("its cells are GRUs")
    field = {"BiARNTransformer": "recurrence_cell", "RPETransformer": "rpe_cell"}.get(prefix)
    fields = {field: cell} if field else {}
    if prefix == "GRET":
        fields["encoder_layers"] = 2  # one step from zeros has no recurrence
    if prefix == "ONLSTMTransformer":
        fields["encoder_layer_types"] = ["onlstm" if cell == "gru" else "lstm", "attention"]
    base = trainer_for(tmp_path, tokenizer, prefix, fields).model.eval()
    names = [name for name, _ in base.named_parameters() if "weight_hh" in name or "weight_ih" in name]
    assert names
    settings = peft.LoraConfig(r=2, target_modules=[], target_parameters=names, init_lora_weights=False)
    batch = batch_of(tokenizer)
    with torch.no_grad():
        before = base(**batch).logits
    adapted = peft.get_peft_model(base, settings).eval()
    adapted(**batch, labels=batch["decoder_input_ids"]).loss.backward()
    learned = {name: parameter.grad for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert len(learned) == 2 * len(names) and all(grad.abs().sum() > 0 for grad in learned.values()), learned.keys()
    with torch.no_grad():
        outputs = [adapted(**batch).logits]
        assert (outputs[0] - before).abs().max() > 1e-4
        one, cache = [], None  # step by step, with the state in the cache
        for word in batch["decoder_input_ids"].split(1, 1):
            found = adapted(**{**batch, "decoder_input_ids": word}, cache=cache, use_cache=True)
            cache = found[CACHE]
            one.append(found.logits)
        outputs += [torch.cat(one, 1), adapted.merge_and_unload().eval()(**batch).logits]
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("prefix", ["NMTTransformer", "BiARNTransformer", "RNMT"])
def test_evaluation_by_loss(tmp_path, tokenizer, prefix):
    """Without generation the loss is there, the best checkpoint is loaded, and early stopping stops."""
    settings = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "per_device_eval_batch_size": 5}
    trainer = trainer_for(tmp_path, tokenizer, prefix, max_steps=8, **EACH_STEP, **settings)
    trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=1e9))
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert trainer.state.global_step == len(losses) == 2, "the second loss is not better by the threshold"
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses), rel=1e-5)
    assert trainer.label_names == ["labels"]


LAUNCHED = """
    import sys
    from pathlib import Path
    sys.path[:0] = {paths!r}
    from accelerate import PartialState
    from safetensors.torch import save_file
    from training.test_stock_trainer import trainer_for
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained({tokenizer!r})
    trainer = trainer_for(Path({folder!r}), tokenizer, "BiARNTransformer", per_device_train_batch_size=4, max_steps=3)
    trainer.train()
    if trainer.is_world_process_zero():
        assert trainer.args.world_size == 2
        save_file(dict(trainer.model.named_parameters()), "{folder}/two.safetensors")
    PartialState().destroy_process_group()  # together: a process that outlives the group's first may abort
"""


@pytest.mark.slow
def test_two_launched_processes_train_as_one(tmp_path, tokenizer, repository):
    """`accelerate launch` of a plain Seq2SeqTrainer: two processes with half of a batch each make the same steps."""
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    values = {"paths": [str(repository / "tests"), str(repository / "tests/models")], "folder": str(tmp_path)}
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(LAUNCHED).format(tokenizer=str(tmp_path / "tokenizer"), **values))
    options = ("--config_file", repository / "scripts/accelerate/cpu_2.yaml")
    output_of(launched(program, module="accelerate.commands.launch", options=options))
    one = trainer_for(tmp_path / "one", tokenizer, "BiARNTransformer", per_device_train_batch_size=8, max_steps=3)
    one.train()
    two = load_file(tmp_path / "two.safetensors")
    for name, parameter in one.model.named_parameters():
        torch.testing.assert_close(two[name], parameter.detach(), atol=1e-6, rtol=1e-4)
