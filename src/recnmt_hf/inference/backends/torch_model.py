"""Backends for encoder-decoder models in PyTorch: one model, or several that translate together."""

import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from ...data.batching import pad_rows
from ...data.languages import list_names
from ...data.records import TokenRows
from ...data.tokenizer_pair import TokenizerPair, stamp, vocabulary_sizes
from ...data.tree_inputs import pad_tree_columns, tree_columns, tree_options
from ...errors import UserError
from ...models.kernels_cpu_matmuls import project
from ..decoding import EndPerSentence, MaxLengthPerSentence, PrefixPerSentence
from ..devices import Int8Linear
from ..model_settings import LengthLimits, end_ids, setting, start_id
from ..options import PYTHON_ARGUMENTS, DecodingOptions
from ..search import ModelRows, search_all, start_search
from .protocol import Backend, SearchRequest, SearchResult


LOGITS_AT_A_TIME = 2**23  # of scoring, 32 MiB in float32; those of a whole batch can take gigabytes
# Arguments of `generate` that treat each row separately, so that finished sentences can leave the batch.
ROWWISE_ARGUMENTS = {
    *("do_sample", "length_penalty", "num_return_sequences", "early_stopping", "no_repeat_ngram_size"),
    *("repetition_penalty", "min_new_tokens", "min_length", "bad_words_ids", "suppress_tokens", "forced_bos_token_id"),
}
# Settings in a model's generation_config.json for whole batches, with the values that disable them.
BATCHWISE_SETTINGS = {
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale"), (None, 1.0)),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "low_memory"), (None, False)),
    **dict.fromkeys(("watermarking_config", "prompt_lookup_num_tokens"), (None,)),
    "cache_implementation": (None, "dynamic"),
    "use_cache": (None, True),
}
_lock = threading.Lock()
# Modules to restore to training mode, with the number of blocks that still need them in evaluation mode.
_users: Counter[nn.Module] = Counter()


@contextmanager
def eval_mode(*models: nn.Module) -> Iterator[None]:
    """Run models in evaluation mode without gradients. Blocks may be nested and in threads, not in generators."""
    with _lock:
        switched = [module for model in models for module in model.modules() if module.training or module in _users]
        _users.update(switched)
        for module in switched:
            module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        with _lock:
            _users.subtract(switched)
            for module in switched:
                if not _users[module]:
                    del _users[module]
                    module.training = True


class TorchBackend(Backend):
    """Runs an encoder-decoder of this package or transformers; `check` rejects NaN weights and other tokenizers."""

    needs_own_search = False  # whether the search of transformers cannot replace ours
    returns_no_attention = False  # whether the model's attention was found to return no weights

    def __init__(self, model: PreTrainedModel, tokenizers: TokenizerPair, check: bool = True):
        if check:
            check_weights(model)
        tokenizers.check(model, strict=check)
        self.model: Any = model  # PreTrainedModel alone has no `generate`
        self.tokenizers = tokenizers

    def encode(self, sources: TokenRows) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """Return the output of the encoder, and padded token ids and their mask, `(batch_size, source_length)`."""
        inputs = self.source_inputs(sources)
        with eval_mode(self.model):
            output = self.model.get_encoder()(**inputs, return_dict=True)
        return output, inputs["input_ids"], inputs["attention_mask"]

    def search(self, requests: Sequence[SearchRequest]) -> list[SearchResult]:
        options = requests[0].options
        settings: dict[str, Any] = {"do_sample": False, **options.generate}
        settings |= {"length_penalty": options.penalty()} if options.beams > 1 else {}
        settings["num_return_sequences"] = options.num_hypotheses
        if settings.get("stop_strings") or getattr(self.model.generation_config, "stop_strings", None):
            settings["tokenizer"] = self.tokenizers.target
        has_prefixes = any(prefix for request in requests for prefix in request.prefixes)
        generate = partial(self.generate, settings=settings, has_prefixes=has_prefixes)
        with eval_mode(self.model):
            if not can_drop_finished(settings, options, self.model.generation_config):
                if self.needs_own_search:
                    known = ", ".join(sorted(ROWWISE_ARGUMENTS - {"do_sample"}))
                    raise UserError(f"Ensembles do not sample; they allow {known}.", field="generate")
                return [SearchResult(generate(request)[:, 1:].tolist()) for request in requests]
            starts = (partial(start_search, rows_class=self.rows_class(request)) for request in requests)
            found = iter(search_all(map(generate, requests, starts), options.max_tokens))
        return [
            SearchResult([row for rows in islice(found, len(request.sources)) for row in rows[:, 1:].tolist()])
            for request in requests
        ]

    def generate(
        self, request: SearchRequest, custom_generate: Any = None, *, settings: dict[str, Any], has_prefixes: bool
    ) -> Any:
        """Call `generate` for a batch with settings of all batches; `has_prefixes`: whether any sentence has one."""
        settings = dict(settings)
        processors = LogitsProcessorList(settings.pop("logits_processor", None) or [])
        if has_prefixes:
            own = request.prefixes
            processors.append(PrefixPerSentence([row.ids for row in own], given=[row.given for row in own]))
        if (end := settings.pop("forced_eos_token_id", setting(self.model, "forced_eos_token_id"))) is not None:
            processors.append(EndPerSentence(end, request.max_lengths))
        if any(prefix.start is not None for prefix in request.prefixes):
            settings["decoder_start_token_id"] = start_ids(self.model, request.prefixes)
        if custom_generate is not None:
            settings["custom_generate"] = custom_generate
        if (allowed := settings.get("prefix_allowed_tokens_fn")) is not None:
            numbers = request.numbers
            settings["prefix_allowed_tokens_fn"] = lambda row, ids: allowed(numbers[row], ids)
        max_lengths = torch.tensor(request.max_lengths, device=self.model.device)
        return self.model.generate(
            **self.source_inputs(request.sources),
            num_beams=request.options.beams,
            max_length=1 + max(request.max_lengths),
            max_new_tokens=None,
            logits_processor=processors,
            stopping_criteria=StoppingCriteriaList([MaxLengthPerSentence(max_lengths)]),
            **settings,
        )

    def rows_class(self, request: SearchRequest) -> Callable[..., ModelRows]:
        return ModelRows

    def score(self, sources: TokenRows, targets: TokenRows) -> list[list[float]]:
        inputs, labels = self.source_inputs(sources), self.pad_targets(targets)
        inputs["decoder_input_ids"] = shift_right(self.model, labels, targets)
        head: Any = getattr(self.model, "lm_head", None)
        with eval_mode(self.model):
            if not hasattr(self.model, "model") or type(head) not in (nn.Linear, Int8Linear):
                log_probs = chosen_log_probs(self.model(**inputs, use_cache=False).logits, labels)
            else:
                states = self.model.model(**inputs, use_cache=False).last_hidden_state
                bias = getattr(self.model, "final_logits_bias", None)
                size, found = max(LOGITS_AT_A_TIME // head.out_features, 1), []
                for own, ids in zip(states.flatten(0, 1).split(size), labels.flatten().split(size), strict=True):
                    logits = project(head, own)
                    found.append(chosen_log_probs(logits if bias is None else logits + bias, ids))
                log_probs = torch.cat(found).view(labels.shape)
        return [row[: len(target)] for row, target in zip(log_probs.tolist(), targets, strict=True)]

    def attention(self, sources: TokenRows, targets: TokenRows) -> tuple[torch.Tensor, ...]:
        model = self.inspected_model()
        # The encoder runs separately, without attentions and other optional outputs, which may be large.
        output, _, mask = self.encode(sources)

        def run(model: Any) -> Any:  # attentions of fast kernels are `None`
            with eval_mode(model):
                return model.base_model(  # without logits of the whole vocabulary
                    encoder_outputs=output,
                    attention_mask=mask,
                    decoder_input_ids=shift_right(model, self.pad_targets(targets), targets),
                    use_cache=False,
                    output_attentions=True,
                ).cross_attentions

        attentions: Any = None if self.returns_no_attention else run(model)
        if (not attentions or attentions[0] is None) and hasattr(model, "set_attn_implementation"):
            self.returns_no_attention = True
            # The same weights in a model of its own, because other threads may be using this one.
            tensors: Any = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
            eager = copy.deepcopy(model, tensors)
            eager.set_attn_implementation("eager")
            attentions = run(eager)
        return attentions

    def source_inputs(self, sources: TokenRows) -> dict[str, torch.Tensor]:
        """Return padded token ids and their mask, and trees if the model reads them."""
        ids, mask = pad_rows([row.ids for row in sources], self.tokenizers.source.pad_token_id, self.model.device)
        inputs = {"input_ids": ids, "attention_mask": mask}
        if tree_options(self.model.config) is not None and any(row.tree for row in sources):
            columns = pad_tree_columns(tree_columns(sources), ids.shape[1])
            inputs |= {name: values.to(ids.device) for name, values in columns.items()}
        return inputs

    def pad_targets(self, targets: TokenRows) -> torch.Tensor:
        return pad_rows([row.ids for row in targets], self.tokenizers.target.pad_token_id, self.model.device)[0]


@torch.no_grad()
def check_weights(model: PreTrainedModel) -> None:
    """Raise `UserError` if a parameter is NaN or infinite, or a buffer has NaN (an infinite bias forbids a token)."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    checks: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        # Quantized and sharded weights are classes of their own that need not know these operations.
        is_plain = type(tensor) is torch.Tensor and tensor.device.type != "meta"
        if is_plain and tensor.numel() and tensor.is_floating_point() and tensor.element_size() > 1:
            low, high = torch.aminmax(tensor)  # both are NaN if any is
            checks[name] = low.isfinite() & high.isfinite() if name in parameters else ~low.isnan()
    results = torch.stack([check.to(model.device) for check in checks.values()]).tolist() if checks else []
    if bad := [name for name, is_finite in zip(checks, results, strict=True) if not is_finite]:
        raise UserError(f"These weights are NaN or infinite: {list_names(sorted(bad))}.")


def chosen_log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each label, `(..)`, in at least float32; `logits` are `(.., vocab_size)`."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits.gather(-1, labels[..., None])[..., 0] - logits.logsumexp(dim=-1)


def shift_right(model: PreTrainedModel, labels: torch.Tensor, targets: TokenRows) -> torch.Tensor:
    """Return the decoder's input for padded labels, both `(batch_size, target_length)`."""
    return torch.cat([labels.new_tensor(start_ids(model, targets))[:, None], labels[:, :-1]], dim=1)


def start_ids(model: Any, targets: TokenRows) -> list[int]:
    """Return the first input of the decoder for each translation."""
    return [start_id(model) if row.start is None else row.start for row in targets]


def can_drop_finished(settings: dict[str, Any], options: DecodingOptions, model_settings: GenerationConfig) -> bool:
    """Return whether [`search`] can replace the search of `generate`: no sampling, row by row, with a growing cache."""
    if settings["do_sample"] or not set(settings) <= ROWWISE_ARGUMENTS or set(options.generate) & set(PYTHON_ARGUMENTS):
        return False
    return all(getattr(model_settings, name, None) in off for name, off in BATCHWISE_SETTINGS.items())


class EnsembleRows(ModelRows):
    """Rows of several models: the mean of their log-probabilities, `log p = mean_k log p_k`."""

    returns_log_probs = True

    def __init__(self, members: Sequence[ModelRows]):
        self.members, self.sentences = members, members[0].sentences

    def next_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.mean(member.next_logits(tokens) for member in self.members)

    def first_logits(self, tokens: torch.Tensor, beams: int) -> torch.Tensor:
        return self.mean(member.first_logits(tokens, beams) for member in self.members)

    def mean(self, logits: Iterable[torch.Tensor]) -> torch.Tensor:
        log_probs = [own.log_softmax(-1) for own in logits]
        return sum(log_probs[1:], start=log_probs[0]) / len(log_probs)

    def reorder(self, rows: torch.Tensor) -> None:
        for member in self.members:
            member.reorder(rows)

    def select(self, rows: torch.Tensor, sentences: torch.Tensor) -> None:
        for member in self.members:
            member.select(rows, sentences)


class EnsembleBackend(TorchBackend):
    """Runs models of one vocabulary, in PyTorch or ONNX: `generate` of the first prepares the search of all of them."""

    kind = "part of an ensemble"
    needs_own_search = True

    def __init__(self, members: Sequence[Backend]):
        self.members: list[Any] = list(members)
        expected: dict[str, tuple[Any, str]] = {}
        for member in members:
            name = member.model.name_or_path
            if not isinstance(member, TorchBackend) or isinstance(member, EnsembleBackend):
                raise UserError(f"{name} cannot be part of an ensemble, only PyTorch and ONNX.")
            source, target = member.tokenizers
            settings: dict[str, Any] = {
                "the source tokenizer": stamp(source),
                "the target tokenizer": stamp(target, is_target=True),
                "the rows of the output matrix": vocabulary_sizes(member.model.config)[1],
                "the padding token": target.pad_token_id,
                "the end tokens": end_ids(member.model),
                "the start token": setting(member.model, "decoder_start_token_id"),
            }
            if (trees := tree_options(member.model.config)) is not None:
                settings["the relations of dependency trees"] = (member.tokenizers.relations, trees)
            for what, value in settings.items():
                known, first = expected.setdefault(what, (value, name))
                if value != known:
                    raise UserError(f"{name} and {first} differ in {what}, so they cannot be an ensemble.")
        # The first one is that whose inputs are encoded.
        self.members.sort(key=lambda member: tree_options(member.model.config) is None)
        self.model, self.tokenizers = self.members[0].model, self.members[0].tokenizers

    @property
    def limits(self) -> LengthLimits:
        sides = zip(*(member.limits for member in self.members), strict=True)
        return LengthLimits(*(min((limit for limit in side if limit is not None), default=None) for side in sides))

    def search(self, requests: Sequence[SearchRequest]) -> list[SearchResult]:
        for member in self.members:
            if hasattr(member.model, "check_beams"):
                member.model.check_beams(requests[0].options.beams, "beams")
        with eval_mode(*(member.model for member in self.members)):
            return TorchBackend.search(self, requests)

    def rows_class(self, request: SearchRequest) -> Callable[..., ModelRows]:
        def start(model: Any, inputs: dict[str, Any], rows: int, sentences: int) -> EnsembleRows:
            members = [ModelRows(model, inputs, rows, sentences)]
            for member in self.members[1:]:
                output, _, mask = member.encode(request.sources)
                # The model repeats tensors that the beams of a source do not share, as in `generate`.
                _, own = member.model._expand_inputs_for_generation(
                    expand_size=rows // sentences, is_encoder_decoder=True, encoder_outputs=output, attention_mask=mask
                )
                members.append(ModelRows(member.model, own, rows, sentences))
            return EnsembleRows(members)

        return start

    def score(self, sources: TokenRows, targets: TokenRows) -> list[list[float]]:
        scores = [member.score(sources, targets) for member in self.members]
        return [[sum(values) / len(values) for values in zip(*rows, strict=True)] for rows in zip(*scores, strict=True)]
