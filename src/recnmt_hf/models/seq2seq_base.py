"""Base classes shared by all models: encoder and decoder, output layer, loss, generation."""

import copy
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqModelOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple

from .configuration_seq2seq import Seq2SeqConfig
from .decoder_cache import complete_cache
from .kernels_cpu_matmuls import pack_weights, project, unpack_weights
from .kernels_shared import Mask, is_plain
from .seq2seq_loading import Initialization, Seq2SeqPreTrainedModel
from .seq2seq_loss import IGNORE_INDEX, chunked_cross_entropy, chunked_cross_entropy_of_layer, smoothed_cross_entropy
from .seq2seq_outputs import (
    CACHE,
    Memories,
    Seq2SeqEncoderOutput,
    Seq2SeqTranslationOutput,
    declares,
    extra_fields,
    extra_values,
    takes_cache,
    with_extra_outputs,
)
from .seq2seq_stacks import Seq2SeqDecoder, Seq2SeqEncoder
from .user_errors import UserError


class Seq2SeqModelBase(Seq2SeqPreTrainedModel):
    """Encoder and decoder with their embeddings. Subclasses set `encoder_class` and `decoder_class`."""

    encoder_class: type[Seq2SeqEncoder]
    decoder_class: type[Seq2SeqDecoder]
    output_class: type[Seq2SeqModelOutput] = Seq2SeqModelOutput
    extra_outputs: tuple[str, ...] = ()  # their names
    further_inputs = ("decoder_input_ids",)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not {"encoder_class", "decoder_class"} & set(vars(cls)):
            return
        parts = cls.encoder_class.output_class, cls.decoder_class.output_class
        cls.extra_outputs = tuple(field.name for part in parts for field in extra_fields(part))
        cls.output_class = with_extra_outputs(Seq2SeqModelOutput, parts, f"{cls.__name__}Output", cls.__module__)
        cls.register_code("AutoModel")

    def __init__(self, config: Seq2SeqConfig):
        super().__init__(config)
        self._tied_weights_keys = {}
        if config.share_encoder_decoder_embeddings:
            self.shared = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
            names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
            self._tied_weights_keys = dict.fromkeys(names, "shared.weight")
        self.encoder = self.encoder_class(config)
        self.decoder = self.decoder_class(config)
        self.post_init()

    def memories(self, encoder_outputs: Seq2SeqEncoderOutput, attention_mask: Mask) -> Memories:
        """Return the memories in the encoder's output, which the decoder reads."""
        memories = encoder_outputs.memories()
        memories["encoder"] = memories["encoder"]._replace(token_mask=attention_mask)
        return memories

    def get_input_embeddings(self) -> nn.Embedding:
        embeddings = self.encoder.embed_tokens
        if self.config.share_encoder_decoder_embeddings and any(hasattr(part, "unshard") for part in self.modules()):
            # FSDP is being applied. accelerate shards the module returned here apart from the rest of the model, and
            # torch requires all owners of a parameter in one group: make them one module.
            self.shared = self.decoder.embed_tokens = embeddings
        return embeddings

    def set_input_embeddings(self, value: Any) -> None:
        self.encoder.embed_tokens = value
        if self.config.share_encoder_decoder_embeddings:
            # Separate modules with one parameter: `torch.func.functional_call` cannot restore a module with two names.
            parameters = {id(parameter): parameter for parameter in value.parameters()}
            self.shared = copy.deepcopy(value, dict(parameters))
            self.decoder.embed_tokens = copy.deepcopy(value, dict(parameters))

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Mask = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Mask = None,
        encoder_outputs: BaseModelOutput | tuple[Any, ...] | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """
        Args:
            input_ids, attention_mask (`torch.Tensor` of shape `(batch_size, source_length)`, *optional*): Source
                tokens; the mask is 0 at padding.
            decoder_input_ids (`torch.LongTensor` of shape `(batch_size, target_length)`): Target tokens, shifted right.
            decoder_attention_mask (`torch.Tensor` of shape `(batch_size, seen + target_length)`, *optional*): 1 keeps.
            encoder_outputs ([`Seq2SeqEncoderOutput`] or `tuple`, *optional*): Replaces running the encoder.
            cache (`Cache`, *optional*): Keys, values and states of earlier steps; `use_cache` returns them.
            inputs_embeds, decoder_inputs_embeds (`torch.Tensor` of shape `(batch_size, length, d_model)`, *optional*):
                Unscaled embeddings in place of token ids.
        """
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            field = "decoder_input_ids"
            raise UserError(f"{field} is missing. Pass it or labels. To translate, call generate().", field=field)
        kwargs["return_dict"] = True  # type: ignore[typeddict-unknown-key]
        source: dict[str, Any] = {
            name: kwargs.pop(name, None)  # type: ignore[misc]  # of the family
            for name in self.encoder_class.source_inputs
        }
        if encoder_outputs is None:
            source |= {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
            encoder_outputs = self.encoder(**source, **kwargs)
        encoder_outputs = self.encoder.output_class.rebuild(encoder_outputs)
        decoder_outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            cache=cache,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            memories=self.memories(encoder_outputs, attention_mask),
            **kwargs,
        )
        if kwargs.get("output_attentions", self.config.output_attentions):
            if self.decoder.attended != "cross_attentions":
                decoder_outputs[self.decoder.attended] = decoder_outputs.cross_attentions
                decoder_outputs.cross_attentions = ()
            # Assisted decoding iterates over them without a check for `None`.
            decoder_outputs.attentions = decoder_outputs.attentions or ()
            decoder_outputs.cross_attentions = decoder_outputs.cross_attentions or ()
        return self.output_class(
            last_hidden_state=decoder_outputs.last_hidden_state,
            **{CACHE: getattr(decoder_outputs, CACHE)},
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
            **extra_values(self.extra_outputs, encoder_outputs, decoder_outputs),
        )


class Seq2SeqConditionalGeneration(Seq2SeqPreTrainedModel):
    """Output layer, loss and generation. A generating class adds `GenerationMixin`, and sets `model_class`."""

    model_class: type[Seq2SeqModelBase]
    further_inputs = ("decoder_input_ids",)
    output_class: type[Seq2SeqTranslationOutput] = Seq2SeqTranslationOutput
    final_logits_bias: Tensor | None
    # The loss takes `smoothing`, and divides by `num_items_in_batch`.
    computes_smoothed_loss = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "model_class" not in vars(cls):
            return
        parts = cls.model_class.encoder_class.output_class, cls.model_class.decoder_class.output_class
        name = f"{cls.__name__.removesuffix('ForConditionalGeneration')}LMOutput"
        cls.output_class = with_extra_outputs(Seq2SeqTranslationOutput, parts, name, cls.__module__)
        cls.register_code("AutoModelForSeq2SeqLM")
        if inputs := cls.model_class.encoder_class.source_inputs:
            cls.forward = declares(inputs, cls.forward)  # type: ignore[method-assign]

    def __init__(self, config: Seq2SeqConfig):
        super().__init__(config)
        self.model = self.model_class(config)
        self.lm_head = nn.Linear(config.d_model, config.decoder_vocab_size, bias=False)
        bias = torch.zeros(1, config.decoder_vocab_size) if config.final_logits_bias else None
        self.register_buffer("final_logits_bias", bias)
        ties = {f"model.{name}": f"model.{source}" for name, source in self.model._tied_weights_keys.items()}
        target = "model.decoder.embed_tokens.weight"
        self._tied_weights_keys = {"lm_head.weight": ties.get(target, target)} if config.tie_word_embeddings else {}
        self._tied_weights_keys |= ties
        # Tied names are not saved. The Trainer would otherwise report them as missing when it resumes.
        self._keys_to_ignore_on_save = list(self._tied_weights_keys) or None
        # The Trainer's predictions are the logits alone.
        names = *Seq2SeqConfig.keys_to_ignore_at_inference, "auxiliary_loss", *self.model_class.extra_outputs
        type(config).keys_to_ignore_at_inference = list(names)
        self.post_init()

    def initialize(self, start: Initialization) -> None:
        if self.final_logits_bias is not None:
            init.zeros_(self.final_logits_bias)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as transformers does; on the CPU, layers keep a second copy of weights until trained or moved."""
        if not self.training and self.device.type == "cpu":
            pack_weights(self)
        return super().generate(*args, **kwargs)  # type: ignore[misc]  # of GenerationMixin

    def train(self, mode: bool = True) -> Self:
        if mode:
            unpack_weights(self)
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        unpack_weights(self)  # moved or converted
        return super()._apply(*args, **kwargs)

    def resize_decoder_token_embeddings(self, new_num_tokens: int, mean_resizing: bool = True) -> nn.Embedding:
        """Resize target embedding and output matrix; raises `UserError` for a shared vocabulary."""
        if self.config.share_encoder_decoder_embeddings:
            field = "share_encoder_decoder_embeddings"
            raise UserError(f"{field}=True forbids resizing one side. Call resize_token_embeddings.", field=field)
        decoder, settings = self.model.decoder, {"mean_resizing": mean_resizing}
        decoder.embed_tokens = self._get_resized_embeddings(decoder.embed_tokens, new_num_tokens, **settings)
        self.lm_head = self._get_resized_lm_head(self.lm_head, new_num_tokens, **settings)
        self.set_target_size(new_num_tokens)
        self.tie_weights()
        return decoder.embed_tokens

    def set_target_size(self, size: int) -> None:
        super().set_target_size(size)
        if self.final_logits_bias is not None:
            new_columns = size - self.final_logits_bias.shape[1]
            self.final_logits_bias = nn.functional.pad(self.final_logits_bias, (0, new_columns))

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Mask = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Mask = None,
        encoder_outputs: BaseModelOutput | tuple[Any, ...] | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        smoothing: float = 0.0,
        num_items_in_batch: Tensor | int | None = None,
        return_logits: bool = True,
        **kwargs: Any,
    ) -> Seq2SeqTranslationOutput:
        """
        Args as for [`Seq2SeqModelBase`], and:
            labels (`torch.LongTensor` of shape `(batch_size, target_length)`, *optional*): -100 is ignored.
                `decoder_input_ids` defaults to the labels shifted right.
            smoothing (`float`, *optional*, defaults to 0): Label smoothing, also accepted as `label_smoothing`.
            num_items_in_batch (`int` or `torch.Tensor`, *optional*): Labels in all micro-batches, divisor of the loss.
            return_logits (`bool`, *optional*, defaults to `True`): With `False` the loss is computed one chunk of
                tokens at a time and `logits` is `None`, which saves memory and time.

        Returns:
            [`Seq2SeqTranslationOutput`] with `logits` of shape `(batch_size, target_length, decoder_vocab_size)`.
        """
        smoothing = kwargs.pop("label_smoothing", smoothing)
        if labels is not None:
            use_cache = False
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
            kwargs |= self.inputs_from_labels(labels)
        kwargs["return_dict"] = True
        sides = input_ids, attention_mask, decoder_input_ids, decoder_attention_mask, encoder_outputs, cache
        outputs = self.model(*sides, inputs_embeds, decoder_inputs_embeds, use_cache, **kwargs)
        features = outputs.last_hidden_state
        loss = logits = None
        if labels is not None and not return_logits:
            loss = self.loss_without_logits(features, labels, smoothing, num_items_in_batch)
        else:
            logits = project(self.lm_head, features)
            if self.final_logits_bias is not None:
                logits = logits + self.final_logits_bias
            if labels is not None:
                loss = smoothed_cross_entropy(logits, labels, smoothing, num_items_in_batch, self.final_logits_bias)
        values = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        result = self.output_class(loss=loss, logits=logits, **values)
        if labels is not None:
            result.auxiliary_loss = self.auxiliary_loss(result, labels, num_items_in_batch)
            if result.auxiliary_loss is not None:
                result.loss = loss + result.auxiliary_loss  # type: ignore[operator]  # with labels
        return result

    def inputs_from_labels(self, labels: Tensor) -> dict[str, Any]:
        """Return further inputs of encoder and decoder, by name, that a model derives from the labels."""
        return {}

    def auxiliary_loss(
        self, outputs: Seq2SeqTranslationOutput, labels: Tensor, num_items_in_batch: Tensor | int | None
    ) -> Tensor | None:
        """Return a term that a model adds to its loss, a sum divided by [`~.seq2seq_loss.divisor`], or `None`."""
        return None

    def loss_without_logits(self, features: Tensor, labels: Tensor, *settings: Any) -> Tensor:
        """Compute the loss of `features` `(batch_size, target_length, d_model)`, one chunk of tokens at a time."""
        head, bias = self.lm_head, self.final_logits_bias[0] if self.final_logits_bias is not None else None
        if hasattr(head, "unshard") and nn.Linear in type(head).__bases__:
            head.unshard()  # FSDP gathers a layer's weight when it is called; here it is read
        elif not is_plain(head, nn.Linear):
            return chunked_cross_entropy_of_layer(head, features, labels, bias, *settings)
        return chunked_cross_entropy(features, head.weight, labels, bias, *settings)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Shift labels `(batch_size, target_length)` right behind the start token; -100 becomes padding."""
        start: Any = self.config.decoder_start_token_id
        padding: Any = self.config.pad_token_id
        shifted = labels.new_empty(labels.shape)
        shifted[:, 0] = start
        shifted[:, 1:] = labels[:, :-1]
        return shifted.masked_fill(shifted == IGNORE_INDEX, padding)

    def create_masks_for_generate(
        self, attention_mask: Mask = None, **kwargs: Any
    ) -> Tensor | dict[str, Tensor] | None:
        """Return the decoder's mask for a static cache; positions need a prompt's token mask unchanged."""
        if attention_mask is not None:
            return attention_mask
        return create_masks_for_generate(attention_mask=None, **kwargs)

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: Any, *args: Any) -> Any:
        # Assisted decoding records the past of a given cache before the decoder has added its recurrent layers to it.
        cache = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
        complete_cache(cache, self.config.cache_layer_types(), self.config.decoder_layers)
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)  # type: ignore[misc]

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Any = None, **model_kwargs: Any
    ) -> Any:
        # Beams share their source: its memories stay one row per source, and the decoder folds its beams into them.
        shared = {name: model_kwargs.pop(name, None) for name in ("encoder_outputs", "attention_mask")}
        for name in self.model_class.encoder_class.source_inputs:
            model_kwargs.pop(name, None)  # the encoder has read them
        input_ids, model_kwargs = super()._expand_inputs_for_generation(  # type: ignore[misc]
            expand_size=expand_size, is_encoder_decoder=False, input_ids=input_ids, **model_kwargs
        )
        return input_ids, model_kwargs | {name: value for name, value in shared.items() if value is not None}
