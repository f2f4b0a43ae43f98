"""transformers' own Seq2SeqTrainer trains, smooths and generates with the zoo's models as with its own."""

import numpy as np
import pytest
import torch
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

import recnmt_hf
from recnmt_hf.data.corpora import prepare_dataset


def trainer_for(tmp_path, tokenizer, **settings):
    torch.manual_seed(1)
    config = recnmt_hf.NMTTransformerConfig.from_preset(
        "tiny", vocab_size=len(tokenizer), d_model=32, encoder_layers=1, decoder_layers=1, dropout=0.0
    )
    model = recnmt_hf.NMTTransformerForConditionalGeneration(config)
    data = prepare_dataset(
        {"generated": "validation", "size": 16}, "en", "de", tokenizer, tokenizer, tmp_path / "data"
    ).select_columns(["input_ids", "labels"])
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path / "out"),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        max_steps=1,
        optim="sgd",
        learning_rate=0.1,
        max_grad_norm=0.0,
        save_strategy="no",
        logging_steps=1,
        **settings,
    )
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
        trainer = trainer_for(
            tmp_path / str(part),
            tokenizer,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            label_smoothing_factor=smoothing,
        )
        trainer.train()
        weights.append({name: p.detach().clone() for name, p in trainer.model.named_parameters()})
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], atol=1e-6, rtol=1e-4)


def test_evaluation_by_generation(tmp_path, tokenizer):
    trainer = trainer_for(
        tmp_path,
        tokenizer,
        predict_with_generate=True,
        generation_max_length=8,
        generation_num_beams=2,
        per_device_eval_batch_size=5,
    )
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] > 0 and metrics["eval_tokens"] > 0
