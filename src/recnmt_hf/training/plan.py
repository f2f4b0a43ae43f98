"""A plan: everything that a recipe decides about a run; and its dry run, which finds wrong settings before data."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, Trainer, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks
from transformers.training_args import ParallelMode

from ..data.corpora import Corpus
from ..data.prepared import ShardSettings
from ..data.sharded import Mixture, load_manifest
from ..errors import UserError, explained
from ..inference.options import DecodingOptions
from ..metrics.bleu import bleu_tokenizer
from ..models.user_errors import masked
from .arguments import TranslationTrainingArguments
from .building import Architecture, build_config, with_fields_of
from .checkpoints import BASELINE, RECIPE, mapping_in
from .guided_alignment import GuidedAlignment
from .metrics import BY_METRIC, TextScorer
from .processes import logger
from .recipe import Recipe
from .recipe_yaml import dump_yaml
from .sections import NO_EFFECT


# Fields that do not determine an update, so that a resumed run may change them. Data and batches are compared by what
# was made of them (`run.record_of`).
_FREE_IN_TRAINING = """
    dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor ddp_backend
    ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_timeout disable_tqdm early_stopping_patience
    eval_delay eval_on_start eval_steps eval_strategy gradient_accumulation_steps include_num_input_tokens_seen
    include_tokens_per_second keep_best keep_last learning_rate max_grad_norm max_steps num_train_epochs project
    report_to restore_callback_states_from_checkpoint run_name save_on_each_node save_steps save_strategy
    skip_memory_metrics tf32 torch_compile torch_compile_backend torch_empty_cache_steps use_cpu warmup_ratio
    warmup_steps
"""
OF_DATA = {f"data.{name}" for name in ("train", "validation", *ShardSettings.__dataclass_fields__)}
FREE = {"data.cache_dir", "data.num_proc", "data.prepared"} | OF_DATA
FREE |= {f"training.{name}" for name in (*NO_EFFECT, *_FREE_IN_TRAINING.split())}
FREE_PREFIXES = ("average.", "decoding.", "test.", "training.hub_", "training.log", "training.push_to_hub")
# Fields that decide which evaluation is the best one.
OF_EVALUATIONS = {f"training.bleu_{name}" for name in ("beams", "lowercase", "samples", "tokenize")}
OF_EVALUATIONS |= {"training.greater_is_better", "training.metric_for_best_model"}
OF_EVALUATIONS |= {"training.rouge_units", "training.text_metric"}


@dataclass(frozen=True)
class Preparation:
    """How tokenizers and data are made."""

    model: Architecture
    places: tuple[tuple[str, Corpus], ...]  # all corpora with their places in the recipe, e.g. `"data.train[0]"`
    train: list[Corpus]  # with their links only if training uses them
    validation: list[Corpus]
    source_lang: str
    target_lang: str
    reading: dict[str, Any]  # arguments of `prepare_dataset` for all sets
    limits: dict[str, Any]  # largest numbers of tokens of a training pair, and largest ratio
    mixture: Mixture
    shards: ShardSettings
    prepared: str | None  # folder of shards
    cache_dir: str | None
    tokenizers: list[str]  # existing ones, one for both sides or one for each
    vocabularies: list[dict[str, Any]]  # else the arguments of `train_tokenizer`, in the same way
    tokenizer_settings: dict[str, Any]  # all, as data in shards records them

    @classmethod
    def of(cls, recipe: Recipe) -> Preparation:
        """Resolve what a recipe states about data and tokenizers."""
        data, tokenizer = recipe.data, recipe.tokenizer

        def of_data(*names: str) -> dict[str, Any]:
            return {name: getattr(data, name) for name in names}

        return cls(
            model=Architecture(**asdict(recipe.model)),
            places=tuple(recipe.corpora),
            train=[corpus if recipe.guides_alignment else replace(corpus, alignments=None) for corpus in data.train],
            **of_data("validation", "source_lang", "target_lang", "prepared", "cache_dir"),
            reading=of_data("source_lang", "target_lang", "on_empty", "num_proc", "on_long"),
            limits=of_data("max_source_length", "max_target_length", "max_length_ratio"),
            mixture=Mixture(data.weights, data.temperature),
            shards=ShardSettings(**of_data(*(entry.name for entry in fields(ShardSettings)))),
            tokenizers=tokenizer.existing,
            vocabularies=tokenizer.vocabularies,
            tokenizer_settings=tokenizer.settings,
        )


@dataclass(frozen=True)
class Stage:
    """A part of a run that trains one model. Steps count from the beginning of the run."""

    arguments: TranslationTrainingArguments
    patience: int | None = None  # of early stopping
    last_step: int | None = None  # `None`: the arguments end it
    init_from: Path | str | None = None  # trained baseline that initializes the model
    baseline: Path | None = None  # that baseline, if it is the last checkpoint of the stage before


@dataclass(frozen=True)
class Plan:
    """Everything that a recipe decides about a run. `settings` is the recipe as a mapping, which the run records."""

    output_dir: Path
    stages: tuple[Stage, ...]
    data: Preparation
    tests: dict[str, list[Corpus]]
    decoding: DecodingOptions
    guided_alignment: GuidedAlignment | None
    bpe_dropout: float
    average: int  # number of checkpoints
    average_best: bool  # the best ones instead of the last
    settings: dict[str, Any]

    @classmethod
    def of(cls, recipe: Recipe, output_dir: str | Path = "outputs", resumed_from: Path | None = None) -> Plan:
        """Resolve a recipe. `resumed_from` is a complete checkpoint of the run in the output folder, if it resumes."""
        output_dir, training, average, data = Path(output_dir), recipe.training, recipe.average, Preparation.of(recipe)
        if (start := data.model.init_from) is not None:
            data = replace(data, model=with_fields_of(resumed_from or start, data.model))
        steps, max_steps = training.baseline_steps, training.max_steps
        if steps is not None and steps < 1:  # a resumed run keeps its steps, even if it has more steps in all now
            earlier = (mapping_in(output_dir / RECIPE).get("training") or {}).get("baseline_steps")
            is_valid = resumed_from is not None and isinstance(earlier, int) and 0 < earlier < max_steps
            steps = earlier if is_valid else max(int(steps * max_steps), 1)
            logger.info(f"The first {steps} of {max_steps} steps train the baseline.")
        settings = recipe.to_dict()
        if steps is not None:
            settings["training"]["baseline_steps"] = steps
        # If the newest checkpoint is damaged, the run resumes from the one before.
        keep, least = ("keep_best", 1) if average.which == "best" else ("keep_last", 2)
        given = training.trainer_settings()
        kept = {keep: max(least, average.count), **given}
        arguments = TranslationTrainingArguments(output_dir=str(output_dir), **kept)
        last = Stage(arguments, training.early_stopping_patience, init_from=start)
        stages = [last]
        if steps is not None:  # no checkpoints of the baseline are averaged
            checkpoint = output_dir / BASELINE / f"checkpoint-{int(steps)}"
            first = TranslationTrainingArguments(output_dir=str(output_dir / BASELINE), **given)
            stages = [Stage(first, last_step=int(steps)), replace(last, init_from=checkpoint, baseline=checkpoint)]
        return cls(
            output_dir=output_dir,
            stages=tuple(stages),
            data=data,
            tests=dict(recipe.test),
            decoding=recipe.decoding,
            guided_alignment=recipe.guided_alignment if recipe.guides_alignment else None,
            bpe_dropout=recipe.tokenizer.dropout,
            average=average.count,
            average_best=average.which == "best",
            settings=settings,
        )

    @property
    def arguments(self) -> TranslationTrainingArguments:
        """Arguments of the last stage."""
        return self.stages[-1].arguments

    def scorer_of(self, test: str) -> TextScorer:
        """Return the scorer of a test set, which may be in another language than the training data."""
        scorer, data = self.arguments.scorer, self.data
        language = self.tests[test][0].languages(data.source_lang, data.target_lang)[1]
        is_default = scorer.tokenize in (None, bleu_tokenizer(data.target_lang))
        return replace(scorer, tokenize=bleu_tokenizer(language)) if is_default else scorer

    @property
    def compares_evaluations(self) -> bool:
        """Whether the run compares scores of evaluations at different steps."""
        by_metric = self.arguments.lr_scheduler_type in BY_METRIC
        return self.average_best or by_metric or self.stages[-1].patience is not None

    def describe(self) -> str:
        """Return the plan as YAML: stages, the recipe with all defaults, and what a resumed run must not change."""
        stages = [
            {
                "model": f"{self.data.model}{', its baseline' if stage.last_step else ''}",
                "start": str(stage.init_from or "random weights"),
                "until": stage.last_step or stage.arguments.max_steps,
                "folder": str(stage.arguments.folder),
                "device": str(stage.arguments.device),
            }
            for stage in self.stages
        ]
        identity = identity_of(self.settings, self.compares_evaluations)
        return dump_yaml({"stages": stages, **self.settings, "decoding": asdict(self.decoding), "identity": identity})


def values_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a recipe, without secrets, by `section.field` and `model.fields.field`."""
    values: dict[str, Any] = {}
    for section, entries in masked(settings).items():
        values |= {f"{section}.{name}": value for name, value in entries.items()}
    values |= {f"model.fields.{name}": value for name, value in values.pop("model.fields", {}).items()}
    return values


def identity_of(settings: Mapping[str, Any], compares_evaluations: bool) -> dict[str, Any]:
    """Return those of a recipe's values that a resumed run must not change."""
    free = FREE if compares_evaluations else FREE | OF_EVALUATIONS
    values = values_of(settings).items()
    return {name: value for name, value in values if name not in free and not name.startswith(FREE_PREFIXES)}


def dry_run(plan: Plan) -> None:
    """Build model, optimizer and schedule of a plan without memory, and look for its files. Writes nothing."""
    data, arguments = plan.data, plan.arguments
    if data.mixture.weights and data.prepared is None:
        raise UserError("data.weights requires data.prepared, or use data.temperature.", field="data.weights")
    if data.prepared is not None:
        load_manifest(Path(data.prepared))  # raises if there is none
    for place, corpus in data.places:  # a test set must not be missed after training
        if data.prepared is None or not place.startswith("data.train"):
            corpus.check_languages(data.source_lang, data.target_lang)
            corpus.check_files(data.source_lang, data.target_lang)
    arguments.scorer.scores(["a"], ["a"])  # raises if a package or file is missing
    model = model_on_meta(plan)
    if plan.guided_alignment is not None:
        plan.guided_alignment.place(model.config)
    if len(plan.stages) > 1 and (model.config.baseline() is None or arguments.deepspeed):
        field = "training.baseline_steps"
        raise UserError(f"{field} needs a model with a baseline, not {plan.data.model}, and no DeepSpeed.", field=field)
    if arguments.fsdp and arguments.parallel_mode != ParallelMode.DISTRIBUTED:
        raise UserError("training.fsdp needs several processes: use accelerate launch.", field="training.fsdp")
    steps = max(arguments.max_steps, 1)
    with explained("training cannot have these settings", "training"):
        if arguments.optimizer is None:  # else Adadelta, which is not one of transformers
            Trainer.get_optimizer_cls_and_kwargs(arguments, model)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=max(arguments.learning_rate, 1e-9))
        settings = cast("dict[str, Any]", arguments.lr_scheduler_kwargs or {})
        get_scheduler(arguments.lr_scheduler_type, optimizer, arguments.get_warmup_steps(steps), steps, settings)
        if arguments.gradient_checkpointing:
            # Older versions of transformers have the other name.
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable(arguments.gradient_checkpointing_kwargs)
        for callback in get_reporting_integration_callbacks(arguments.report_to or []):
            callback()


def model_on_meta(plan: Plan) -> PreTrainedModel:
    """Build the last stage's model on the meta device, and check its positions, memory and beams."""
    vocabulary: dict[str, Any] = {}
    if not (plan.data.model.init_from or plan.data.tokenizers):
        sizes = [settings["vocab_size"] for settings in plan.data.vocabularies]
        vocabulary = {"vocab_size": sizes[0], "decoder_vocab_size": sizes[-1]}
        vocabulary["share_encoder_decoder_embeddings"] = len(sizes) == 1
    config = build_config(plan.data.model, **vocabulary)
    # The table of positions is made in float64 before the weights' dtype is applied.
    needed = 4 * 8 * config.max_position_embeddings * config.d_model if config.sides_with_positions else 0
    for side in config.sides_with_positions:
        field, longest = f"data.max_{side}_length", plan.data.limits[f"max_{side}_length"]
        if longest > (positions := config.max_position_embeddings):
            raise UserError(f"{field}={longest} exceeds the model's {positions} positions.", field=field)
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed <= available:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):  # shapes without memory
            model = AutoModelForSeq2SeqLM.from_config(copy.deepcopy(config))
        # On the CPU weight, gradient and Adam's two averages of each parameter, else its weight alone.
        needed = max(needed, model.num_parameters() * (16 if plan.arguments.use_cpu else 4))
    if needed > available:
        memory = f"{needed / 2**30:,.1f} GiB; {available / 2**30:,.1f} GiB are available"
        raise UserError(f"The model {plan.data.model} needs {memory}.", field="model")
    if check_beams := getattr(model, "check_beams", None):
        check_beams(plan.decoding.beams, "decoding.beams")
        check_beams(plan.arguments.bleu_beams, "training.bleu_beams")
    return model
