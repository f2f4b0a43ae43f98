"""What every model of the zoo shares: embeddings and their tying, stacks of layers, loss, generation, loading."""

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple, logging
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention import RelativeMultiHeadAttention, causal_mask, self_mask, source_mask
from .configuration_seq2seq import Seq2SeqConfig
from .fast_paths import dropout, is_plain, project
from .position_embeddings import (
    LearnedPositionEmbedding,
    SinusoidalPositionEmbedding,
    build_position_embedding,
    check_length,
    positions_from_mask,
)
from .recurrent_cache import use_source_memory
from .recurrent_layers import RecurrentLayer
from .seq2seq_loss import (
    IGNORE_INDEX,
    chunked_cross_entropy,
    chunked_cross_entropy_of_layer,
    smoothed_cross_entropy,
)
from .user_errors import UserError


logger = logging.get_logger(__name__)


@dataclass
class Seq2SeqEncoderOutput(BaseModelOutput):
    """
    An encoder's output. Subclasses add memories and evidence as named tensor fields, which the decoder receives again
    from `generate`: once per source, not once per beam.

    Rebuilt by [`rebuild`] from tuples, dictionaries and other outputs, so that no field is lost on the way.
    """

    @classmethod
    def rebuild(cls, value: Any) -> "Seq2SeqEncoderOutput":
        """
        An instance of this class from another output, a mapping, or a tuple in the order of its non-empty fields.

        A tuple (`return_dict=False`) does not say which fields are empty: each value goes to the next field of its
        kind, tensor or tuple of tensors, which finds every memory. Hidden states and attentions, if only the latter
        are there, cannot be told apart.
        """
        if type(value) is cls:
            return value
        if hasattr(value, "keys"):
            return cls(**{field.name: value[field.name] for field in fields(cls) if field.name in value})
        made, values = {}, list(value)
        for field in fields(cls):
            is_tuple = "tuple" in str(field.type)
            if values and (values[0] is None or isinstance(values[0], (tuple, list)) == is_tuple):
                made[field.name] = values.pop(0)
        return cls(**made)


@dataclass
class WarmStartReport:
    """
    What [`Seq2SeqPreTrainedModel.init_from_baseline`] did.

    Attributes:
        copied (`list[str]`): Parameters taken from the baseline.
        fresh (`list[str]`): Parameters of the model that keep their own initialisation.
        unused (`list[str]`): Parameters of the baseline for which the model has no place of that name and shape.
    """

    copied: list[str]
    fresh: list[str]
    unused: list[str]

    def __str__(self) -> str:
        return (
            f"copied {len(self.copied)} parameters, left {len(self.fresh)} fresh"
            + (f" ({', '.join(self.fresh)})" if self.fresh else "")
            + (f", did not use {len(self.unused)} ({', '.join(self.unused)})" if self.unused else "")
        )


class Seq2SeqPreTrainedModel(PreTrainedModel):
    """Initialisation, tying and loading for all models."""

    config: Seq2SeqConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["TransformerEncoderLayer", "TransformerDecoderLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.init_std
        if isinstance(module, SinusoidalPositionEmbedding):
            init.copy_(module.table, module.compute_table())
        elif isinstance(module, LearnedPositionEmbedding):
            init.normal_(module.weight, mean=0.0, std=std if std is not None else self.config.d_model**-0.5)
        elif isinstance(module, nn.Embedding):
            # Scaled by sqrt(d_model) in the model, so that channels have about unit variance.
            init.normal_(module.weight, mean=0.0, std=std if std is not None else self.config.d_model**-0.5)
            if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, nn.Linear):
            if std is None:
                init.xavier_uniform_(module.weight)
            else:
                init.normal_(module.weight, mean=0.0, std=std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, (RecurrentLayer, nn.RNNCellBase)):
            init_recurrent(module)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, RelativeMultiHeadAttention):
            for table in (module.relative_keys, module.relative_values):
                init.normal_(table, mean=0.0, std=std if std is not None else module.head_dim**-0.5)
        elif isinstance(module, Seq2SeqConditionalGeneration):
            if module.final_logits_bias is not None:
                init.zeros_(module.final_logits_bias)
        else:
            super()._init_weights(module)

    def post_init(self) -> None:
        super().post_init()
        # Sharding (FSDP) asks for every class named here, and a variant has not all of them.
        present = {type(module).__name__ for module in self.modules()}
        wanted = {*(type(self)._no_split_modules or ()), *self._no_split_modules}
        self._no_split_modules = sorted(present & wanted)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        # Each class declares just the ties of its config, so source and target can share a matrix while the output has
        # its own; transformers' reading of `tie_word_embeddings=False` would untie both.
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        return dict(self._tied_weights_keys or {})

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers; every saved folder also names all Auto classes that can load it as remote code."""
        # Code and names are those of the nearest class that was registered for the Auto classes: FSDP gives a model a
        # class of its own, and a user's subclass stands in a file that the Hub need not have.
        wrapped = type(self)
        own = next((c for c in wrapped.__mro__ if vars(c).get("_auto_class")), None)
        if own is not None:
            if own.__module__.rpartition(".")[0] == __name__.rpartition(".")[0]:
                self.config.auto_map = {**(getattr(self.config, "auto_map", None) or {}), **own.auto_map()}
            self.__class__ = own
        given = self._keys_to_ignore_on_save
        self._keys_to_ignore_on_save = self.still_tied() or None
        try:
            super().save_pretrained(*args, **kwargs)
        finally:
            self.__class__, self._keys_to_ignore_on_save = wrapped, given

    def still_tied(self) -> list[str]:
        """
        Names of tied parameters that are their source indeed; merged adapters may have given one values of its own.

        Raises:
            UserError: Source and target have different embeddings where the configuration has one for both: loading
                would take one of them.
        """
        own = dict(self.named_parameters(remove_duplicate=False))
        same = []
        for target, source in (self._tied_weights_keys or {}).items():
            if target not in own or source not in own:
                continue
            if own[target] is own[source] or own[target].data_ptr() == own[source].data_ptr() != 0:
                same.append(target)
            elif target.endswith("embed_tokens.weight"):
                raise UserError(
                    f"{target} and {source} differ, but share_encoder_decoder_embeddings=True says that they are one "
                    "matrix. Remedy: adapt a model with share_encoder_decoder_embeddings=False, or leave embeddings "
                    "out of what the adapter copies."
                )
        return same

    @classmethod
    def auto_map(cls) -> dict[str, str]:
        """The Auto classes of this model's family, e.g. `{"AutoModel": "modeling_x.XModel"}`."""
        module = cls.__module__.rsplit(".", 1)[-1]
        prefix = cls.__name__.removesuffix("ForConditionalGeneration").removesuffix("Model")
        return {
            "AutoModel": f"{module}.{prefix}Model",
            "AutoModelForSeq2SeqLM": f"{module}.{prefix}ForConditionalGeneration",
        }

    def mark_tied_weights_as_initialized(self, loading_info: Any, *args: Any, **kwargs: Any) -> None:
        # transformers marks a tied matrix by any of its names, and takes what is marked for loaded where the class is
        # not its own: a checkpoint without the matrix would leave it without values, unreported.
        missing = set(loading_info.missing_keys)
        super().mark_tied_weights_as_initialized(loading_info, *args, **kwargs)
        for source in set(self.all_tied_weights_keys.values()):
            names = {source, *(target for target, tied_to in self.all_tied_weights_keys.items() if tied_to == source)}
            if names <= missing:
                loading_info.missing_keys = {*loading_info.missing_keys, source}

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resizes the source embedding, and with a shared vocabulary the target side too."""
        if self.config.share_encoder_decoder_embeddings:
            embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
            self.config.decoder_vocab_size = embeddings.num_embeddings
            return embeddings
        # Of separate vocabularies transformers would resize the output matrix with the source.
        embeddings = self._get_resized_embeddings(
            self.get_input_embeddings(), new_num_tokens, pad_to_multiple_of, mean_resizing
        )
        self.set_input_embeddings(embeddings)
        self.config.vocab_size = embeddings.num_embeddings
        return embeddings

    def init_from_baseline(self, baseline: str | Path | PreTrainedModel) -> WarmStartReport:
        """
        Copies every parameter of a trained baseline whose name and shape match; the others stay as they are
        (two-stage training of Hao et al., 2019, and Weng et al., 2020).

        Args:
            baseline (`str`, `Path` or `PreTrainedModel`):
                A model, a folder written by `save_pretrained`, or a model id of the Hub (safetensors only).

        Returns:
            [`WarmStartReport`]: which parameters were copied, stayed fresh, and had no place.

        Raises:
            ValueError: Nothing matches, so this is not a baseline of this model.
        """
        source = baseline.state_dict() if isinstance(baseline, PreTrainedModel) else read_safetensors(baseline)
        own = dict(self.named_parameters())
        own.update({name: buffer for name, buffer in self.named_buffers() if name in self.state_dict()})
        copied = [name for name, tensor in own.items() if name in source and source[name].shape == tensor.shape]
        if not copied:
            raise UserError(
                f"No parameter of {type(self).__name__} has the name and shape of one in {baseline}. Remedy: give a "
                "checkpoint trained with the same sizes and vocabulary, e.g. an NMTTransformerForConditionalGeneration."
            )
        with torch.no_grad():
            for name in copied:
                own[name].copy_(source[name])
        aliases = set(self.state_dict()) - set(own)  # tied names that stand for a parameter listed already
        report = WarmStartReport(
            copied=copied,
            fresh=[name for name in own if name not in set(copied)],
            unused=[name for name in source if name not in set(copied) and name not in aliases],
        )
        logger.info(f"Warm start from {baseline}: {report}.")
        return report


def read_safetensors(folder: str | Path) -> dict[str, torch.Tensor]:
    """All tensors of a local folder's or a Hub model's safetensors files."""
    from safetensors.torch import load_file
    from transformers.utils import cached_file

    if Path(folder).is_dir():
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise UserError(
                f"{folder} holds no .safetensors file. Remedy: give a folder written by save_pretrained; pickled "
                "checkpoints (.bin, .pt) are not read: load them where they come from and save them again."
            )
    else:
        files = [Path(cached_file(str(folder), "model.safetensors"))]
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors.update(load_file(file))
    return tensors


def init_recurrent(module: RecurrentLayer | nn.RNNCellBase) -> None:
    """Xavier-uniform input matrices, orthogonal recurrent matrices gate by gate, zero biases (LSTM forget gate: 1)."""
    gates = module.weight_hh_l0 if isinstance(module, RecurrentLayer) else module.weight_hh
    gates = gates.shape[0] // gates.shape[1]
    is_lstm = gates == 4
    for name, parameter in module.named_parameters():
        if "weight_hh" in name:
            if not getattr(parameter, "_is_hf_initialized", False):
                for gate in parameter.chunk(gates, dim=0):
                    init.orthogonal_(gate)
        elif "weight_ih" in name:
            init.xavier_uniform_(parameter)
        else:
            init.zeros_(parameter)
            # torch adds both biases: one of them carries the whole forget bias.
            if is_lstm and "bias_ih" in name and not getattr(parameter, "_is_hf_initialized", False):
                init.ones_(parameter.chunk(4)[1])


class TokenAndPositionInput(nn.Module):
    """
    The input of a stack: scaled embeddings plus positions, with dropout (Vaswani et al., 2017, sections 3.4-3.5).

    It holds no parameters of the embedding itself, which may be shared; the stack owns `embed_tokens`.
    """

    def __init__(self, config: Seq2SeqConfig, position_kind: str):
        super().__init__()
        self.scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.max_positions = config.max_position_embeddings
        self.dropout = config.dropout
        self.embed_positions = build_position_embedding(position_kind, self.max_positions, config.d_model)

    def forward(
        self,
        embeddings: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        offset: int | torch.Tensor = 0,
        add_positions: bool = True,
    ) -> torch.Tensor:
        """
        Args:
            embeddings (`torch.Tensor` of shape `(batch_size, length, d_model)`): Unscaled.
            attention_mask (`torch.Tensor` of shape `(batch_size, seen + length)`, *optional*):
                1 keeps; positions then count real tokens.
            offset (`int` or `torch.Tensor`): Tokens seen before.
        """
        states = embeddings if self.scale == 1.0 else embeddings * self.scale
        if self.embed_positions is not None and add_positions:
            length = embeddings.shape[1]
            position_ids = None
            if attention_mask is not None and attention_mask.dim() == 2:
                check_length(attention_mask.shape[1], self.max_positions)
                position_ids = positions_from_mask(attention_mask)[:, -length:]
            states = states + self.embed_positions(length, offset, position_ids).to(states.dtype)
        return dropout(states, self.dropout, self.training)


def embed(embed_tokens: nn.Embedding, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None):
    """Rows of the embedding, with readable errors for missing inputs and ids outside the vocabulary."""
    if (input_ids is None) == (inputs_embeds is None):
        raise UserError("Give exactly one of token ids and embeddings (input_ids or inputs_embeds).")
    if inputs_embeds is not None:
        return inputs_embeds
    try:
        return embed_tokens(input_ids)
    except IndexError as error:
        raise UserError(
            f"Token ids from {int(input_ids.min())} to {int(input_ids.max())} do not fit an embedding of "
            f"{embed_tokens.num_embeddings} rows (ids 0 to {embed_tokens.num_embeddings - 1}). Remedy: use the "
            "tokenizer the model was trained with, or resize the embeddings."
        ) from error


class TransformerEncoderStack(Seq2SeqPreTrainedModel):
    """
    Embeddings, positions and Transformer encoder layers; the base of every Transformer encoder of the zoo.

    Subclasses build their layers in `build_layer` and may change `build_mask` and `run`.
    """

    main_input_name = "input_ids"
    output_class = Seq2SeqEncoderOutput

    def __init__(self, config: Seq2SeqConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
        kind = config.position_embedding_type if config.encoder_position_embeddings else "none"
        self.embed_input = TokenAndPositionInput(config, kind)
        self.layers = nn.ModuleList([self.build_layer(config, i) for i in range(config.encoder_layers)])
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps) if config.normalize_before else None
        self.gradient_checkpointing = False

    def build_layer(self, config: Seq2SeqConfig, index: int) -> nn.Module:
        raise NotImplementedError(f"{type(self).__name__} must say how it builds a layer")

    def build_mask(self, states: torch.Tensor, attention_mask: torch.Tensor | None):
        """The layers' attention mask for states `(batch_size, source_length, d_model)`."""
        return self_mask(self.config, states, attention_mask)

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqEncoderOutput:
        r"""
        Args:
            input_ids (`torch.LongTensor` of shape `(batch_size, source_length)`, *optional*): Source tokens.
            attention_mask (`torch.Tensor` of shape `(batch_size, source_length)`, *optional*): 1 keeps, 0 is padding.
            inputs_embeds (`torch.Tensor` of shape `(batch_size, source_length, d_model)`, *optional*): Unscaled.

        Returns:
            [`Seq2SeqEncoderOutput`] with `last_hidden_state` of shape `(batch_size, source_length, d_model)`.

        Raises:
            ValueError: Token ids outside the vocabulary, or a sequence longer than the position table.
        """
        return self.encode(input_ids, attention_mask, inputs_embeds, **kwargs)

    def encode(
        self,
        input_ids: torch.LongTensor | None,
        attention_mask: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        **kwargs: Any,
    ) -> Seq2SeqEncoderOutput:
        """The computation of `forward`, for subclasses to extend (recording of outputs must not be nested)."""
        embeddings = embed(self.embed_tokens, input_ids, inputs_embeds)
        hidden_states = self.embed_input(embeddings, attention_mask)
        layer_mask = self.build_mask(hidden_states, attention_mask)
        for layer in self.layers:
            hidden_states = layer(hidden_states, layer_mask, **kwargs)
        if self.layer_norm is not None:
            hidden_states = self.layer_norm(hidden_states)
        return self.output_class(last_hidden_state=hidden_states)


class TransformerDecoderStack(Seq2SeqPreTrainedModel):
    """
    Embeddings, positions and Transformer decoder layers; the base of every Transformer decoder of the zoo.
    """

    main_input_name = "input_ids"

    def __init__(self, config: Seq2SeqConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.decoder_vocab_size, config.d_model, config.pad_token_id)
        kind = config.position_embedding_type if config.decoder_position_embeddings else "none"
        self.embed_input = TokenAndPositionInput(config, kind)
        self.layers = nn.ModuleList([self.build_layer(config, i) for i in range(config.decoder_layers)])
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps) if config.normalize_before else None
        self.gradient_checkpointing = False

    def build_layer(self, config: Seq2SeqConfig, index: int) -> nn.Module:
        raise NotImplementedError(f"{type(self).__name__} must say how it builds a layer")

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        memories: tuple[torch.Tensor | None, ...] = (),
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        r"""
        Args:
            input_ids (`torch.LongTensor` of shape `(batch_size, target_length)`, *optional*): Target tokens so far.
            attention_mask (`torch.Tensor` of shape `(batch_size, seen + target_length)`, *optional*): 1 keeps.
            encoder_hidden_states (`torch.Tensor` of shape `(num_sources, source_length, d_model)`):
                The memory; `batch_size` is a multiple of `num_sources`, consecutive rows share a source.
            encoder_attention_mask (`torch.Tensor` of shape `(num_sources, source_length)`, *optional*): 1 keeps.
            past_key_values (`Cache`, *optional*): Keys, values and states of earlier steps.
            inputs_embeds (`torch.Tensor` of shape `(batch_size, target_length, d_model)`, *optional*): Unscaled.
            use_cache (`bool`, *optional*): Whether to fill and return a cache.
            memories (tuple of `torch.Tensor`, *optional*): Further memories for the layers' `fuse`.
        """
        embeddings = embed(self.embed_tokens, input_ids, inputs_embeds)
        past_key_values = self.prepare_cache(past_key_values, use_cache)
        seen = past_key_values.get_seq_length() if past_key_values is not None else 0
        if isinstance(seen, torch.Tensor):
            seen = seen.clone()  # a static layer counts up in place
        hidden_states = self.embed_input(embeddings, attention_mask, seen)
        layer_mask = causal_mask(self.config, hidden_states, attention_mask, past_key_values)
        memory_mask = self.memory_mask(encoder_hidden_states, encoder_attention_mask, past_key_values)
        memories = self.prepare_memories(memories, past_key_values)
        if past_key_values is not None:
            kwargs["query_offset"] = seen
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                layer_mask,
                encoder_hidden_states,
                memory_mask,
                *memories,
                past_key_values=past_key_values,
                **kwargs,
            )
        if self.layer_norm is not None:
            hidden_states = self.layer_norm(hidden_states)
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden_states, past_key_values=past_key_values
        )

    def prepare_cache(self, past_key_values: Cache | None, use_cache: bool | None) -> Cache | None:
        """A new cache where one is wanted and none given; cross-attention layers keep one row per source."""
        if past_key_values is None and use_cache:
            decoder_config = self.config.get_text_config(decoder=True)
            past_key_values = EncoderDecoderCache(
                DynamicCache(config=decoder_config), DynamicCache(config=decoder_config)
            )
        use_source_memory(past_key_values, len(self.layers))
        return past_key_values

    def memory_mask(
        self,
        encoder_hidden_states: torch.Tensor,
        encoder_attention_mask: torch.Tensor | None,
        past_key_values: Cache | None,
    ):
        """The mask over the encoder's memory; `None` once the cached memories hold it."""
        if holds_masks(past_key_values):
            return None
        return source_mask(self.config, encoder_hidden_states, encoder_attention_mask)

    def prepare_memories(
        self, memories: tuple[torch.Tensor | None, ...], past_key_values: Cache | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Further memories as the layers want them; subclasses prepare their masks here, once for all layers."""
        return memories


def holds_masks(past_key_values: Cache | None) -> bool:
    """Whether the cross-attention layers are filled and keep the memories' masks beside their keys and values."""
    if not getattr(past_key_values, "is_updated", {}).get(0):
        return False
    return hasattr(past_key_values.cross_attention_cache.layers[0], "masks")


class Seq2SeqModelBase(Seq2SeqPreTrainedModel):
    """
    Encoder and decoder with their embeddings. Subclasses set `encoder_class` and `decoder_class`, and hand further
    memories of the encoder's output to the decoder in `memories`.
    """

    encoder_class: type[Seq2SeqPreTrainedModel]
    decoder_class: type[Seq2SeqPreTrainedModel]
    # What the decoder records, beside its attentions, when those are asked for.
    decoder_evidence: tuple[str, ...] = ()

    def __init__(self, config: Seq2SeqConfig):
        super().__init__(config)
        if config.share_encoder_decoder_embeddings:
            self.shared = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
            self._tied_weights_keys = {
                "encoder.embed_tokens.weight": "shared.weight",
                "decoder.embed_tokens.weight": "shared.weight",
            }
        else:
            self._tied_weights_keys = {}
        self.encoder = self.encoder_class(config)
        self.decoder = self.decoder_class(config)
        if config.share_encoder_decoder_embeddings:
            # One module, not only one matrix: sharding (FSDP) wants a parameter in one place.
            self.encoder.embed_tokens = self.decoder.embed_tokens = self.shared
        self.post_init()

    def memories(self, encoder_outputs: Seq2SeqEncoderOutput) -> tuple[torch.Tensor | None, ...]:
        """What the decoder's layers read beside the encoder's last states."""
        return ()

    def main_memory(
        self, encoder_outputs: Seq2SeqEncoderOutput, attention_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The states that the decoder's cross-attention reads, and their mask of real positions (1 keeps)."""
        return encoder_outputs.last_hidden_state, attention_mask

    def get_input_embeddings(self) -> nn.Embedding:
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.encoder.embed_tokens = value
        if self.config.share_encoder_decoder_embeddings:
            self.shared = value
            self.decoder.embed_tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        r"""
        Args:
            input_ids (`torch.LongTensor` of shape `(batch_size, source_length)`, *optional*): Source tokens.
            attention_mask (`torch.Tensor` of shape `(batch_size, source_length)`, *optional*): 1 keeps, 0 is padding.
            decoder_input_ids (`torch.LongTensor` of shape `(batch_size, target_length)`): Target tokens, shifted right.
            decoder_attention_mask (`torch.Tensor` of shape `(batch_size, seen + target_length)`, *optional*): 1 keeps.
            encoder_outputs ([`Seq2SeqEncoderOutput`] or `tuple`, *optional*): Saves running the encoder.
            past_key_values (`Cache`, *optional*): Keys, values and states of earlier steps.
            inputs_embeds, decoder_inputs_embeds (`torch.Tensor` of shape `(batch_size, length, d_model)`, *optional*):
                Unscaled embeddings in place of token ids.
            use_cache (`bool`, *optional*): Whether to return `past_key_values`.
        """
        encoder_outputs = self.run_encoder(encoder_outputs, input_ids, attention_mask, inputs_embeds, **kwargs)
        memory, memory_mask = self.main_memory(encoder_outputs, attention_mask)
        wants_attentions = kwargs.get("output_attentions", self.config.output_attentions)
        if wants_attentions:
            kwargs.update({f"output_{name}": True for name in self.decoder_evidence})
        kwargs["return_dict"] = True
        decoder_outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=memory,
            encoder_attention_mask=memory_mask,
            past_key_values=past_key_values,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            memories=self.memories(encoder_outputs),
            **kwargs,
        )
        if wants_attentions:
            # Assisted decoding goes through them without looking whether a model has any.
            decoder_outputs.attentions = decoder_outputs.attentions or ()
            decoder_outputs.cross_attentions = decoder_outputs.cross_attentions or ()
        return self.join(encoder_outputs, decoder_outputs)

    def run_encoder(
        self,
        encoder_outputs: BaseModelOutput | tuple | None,
        input_ids: torch.LongTensor | None,
        attention_mask: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        **kwargs: Any,
    ) -> Seq2SeqEncoderOutput:
        """The encoder's output, as given or computed, in the encoder's own class."""
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids=input_ids,
                attention_mask=attention_mask,
                inputs_embeds=inputs_embeds,
                **{**kwargs, "return_dict": True},
            )
        return self.encoder.output_class.rebuild(encoder_outputs)

    def join(self, encoder_outputs: Any, decoder_outputs: Any) -> Seq2SeqModelOutput:
        """The common output of both halves; subclasses add evidence of their own."""
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            past_key_values=decoder_outputs.past_key_values,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )


class Seq2SeqConditionalGeneration(Seq2SeqPreTrainedModel):
    """
    The output layer, the loss and what generation needs. A generating class derives from this and from
    `GenerationMixin`, and sets `model_class`.
    """

    model_class: type[Seq2SeqModelBase]
    # Whether `forward` takes `smoothing`, `num_items_in_batch` and `return_logits` for its loss.
    computes_smoothed_loss = True

    def __init__(self, config: Seq2SeqConfig):
        super().__init__(config)
        self.model = self.model_class(config)
        self.lm_head = nn.Linear(config.d_model, config.decoder_vocab_size, bias=False)
        bias = torch.zeros(1, config.decoder_vocab_size) if config.final_logits_bias else None
        self.register_buffer("final_logits_bias", bias)
        shared = config.share_encoder_decoder_embeddings
        self._tied_weights_keys = {}
        if config.tie_word_embeddings:
            source = "model.shared.weight" if shared else "model.decoder.embed_tokens.weight"
            self._tied_weights_keys["lm_head.weight"] = source
        if shared:
            self._tied_weights_keys["model.encoder.embed_tokens.weight"] = "model.shared.weight"
            self._tied_weights_keys["model.decoder.embed_tokens.weight"] = "model.shared.weight"
        # Tied names are not saved; saying so keeps the Trainer from calling them missing when it resumes.
        self._keys_to_ignore_on_save = list(self._tied_weights_keys) or None
        self.post_init()

    # -- embeddings --------------------------------------------------------------------------------------------------

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.lm_head = new_embeddings

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resizes the source embedding, and with a shared vocabulary the target side too."""
        embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        if self.config.share_encoder_decoder_embeddings:
            self._resize_bias(embeddings.num_embeddings)
        return embeddings

    def resize_decoder_token_embeddings(self, new_num_tokens: int, mean_resizing: bool = True) -> nn.Embedding:
        """
        Resizes target embedding and output matrix of a model with separate vocabularies.

        Raises:
            ValueError: The vocabulary is shared; `resize_token_embeddings` resizes both sides.
        """
        if self.config.share_encoder_decoder_embeddings:
            raise UserError(
                "share_encoder_decoder_embeddings=True: source and target are one matrix. Remedy: call "
                "resize_token_embeddings, which resizes both."
            )
        decoder = self.model.decoder
        decoder.embed_tokens = self._get_resized_embeddings(
            decoder.embed_tokens, new_num_tokens, mean_resizing=mean_resizing
        )
        self.lm_head = self._get_resized_lm_head(self.lm_head, new_num_tokens, mean_resizing=mean_resizing)
        self.config.decoder_vocab_size = new_num_tokens
        self._resize_bias(new_num_tokens)
        self.tie_weights()
        return decoder.embed_tokens

    def _resize_bias(self, new_num_tokens: int) -> None:
        if self.final_logits_bias is not None:
            bias = self.final_logits_bias.new_zeros(1, new_num_tokens)
            kept = min(new_num_tokens, self.final_logits_bias.shape[1])
            bias[:, :kept] = self.final_logits_bias[:, :kept]
            self.final_logits_bias = bias

    # -- forward -----------------------------------------------------------------------------------------------------

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        smoothing: float = 0.0,
        num_items_in_batch: torch.Tensor | int | None = None,
        return_logits: bool = True,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        r"""
        Args:
            input_ids (`torch.LongTensor` of shape `(batch_size, source_length)`, *optional*): Source tokens.
            attention_mask (`torch.Tensor` of shape `(batch_size, source_length)`, *optional*): 1 keeps, 0 is padding.
            decoder_input_ids (`torch.LongTensor` of shape `(batch_size, target_length)`, *optional*):
                Target tokens, shifted right. Made from `labels` where those are given alone.
            decoder_attention_mask (`torch.Tensor` of shape `(batch_size, seen + target_length)`, *optional*): 1 keeps.
            encoder_outputs ([`Seq2SeqEncoderOutput`] or `tuple`, *optional*): Saves running the encoder.
            past_key_values (`Cache`, *optional*): Keys, values and states of earlier steps.
            inputs_embeds, decoder_inputs_embeds (`torch.Tensor` of shape `(batch_size, length, d_model)`, *optional*):
                Unscaled embeddings in place of token ids.
            labels (`torch.LongTensor` of shape `(batch_size, target_length)`, *optional*): -100 is ignored.
            use_cache (`bool`, *optional*): Whether to return `past_key_values`; off while `labels` are given.
            smoothing (`float`, *optional*, defaults to 0):
                Share of the target mass spread over the vocabulary (label smoothing). Its older name `label_smoothing`
                is taken too; as a parameter of `forward`, transformers' Trainer would wait for it among the labels.
            num_items_in_batch (`int` or `torch.Tensor`, *optional*):
                Real labels of all micro-batches of a step; the loss is then their sum divided by this number.
            return_logits (`bool`, *optional*, defaults to `True`):
                `False` with `labels`: the loss is computed a chunk of tokens at a time and `logits` is `None`, which
                saves the memory and most of the time of a large vocabulary. The loss is the same.

        Returns:
            [`~transformers.modeling_outputs.Seq2SeqLMOutput`] with `logits` of shape `(batch_size, target_length,
            decoder_vocab_size)`.
        """
        smoothing = kwargs.pop("label_smoothing", smoothing)
        if labels is not None:
            use_cache = False
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        kwargs["return_dict"] = True
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        features = self.features(outputs)
        loss = logits = None
        if labels is not None and not return_logits:
            loss = self.loss_without_logits(features, labels, smoothing, num_items_in_batch)
        else:
            logits = project(self.lm_head, features)
            if self.final_logits_bias is not None:
                logits = logits + self.final_logits_bias
            if labels is not None:
                loss = smoothed_cross_entropy(logits, labels, smoothing, num_items_in_batch)
        return self.lm_output(loss, logits, outputs)

    def loss_without_logits(
        self,
        features: torch.Tensor,
        labels: torch.LongTensor,
        smoothing: float,
        num_items_in_batch: torch.Tensor | int | None,
    ) -> torch.Tensor:
        """The loss of `features` `(batch_size, target_length, d_model)`, a chunk of tokens at a time."""
        head, bias = self.lm_head, self.final_logits_bias[0] if self.final_logits_bias is not None else None
        is_sharded = hasattr(head, "unshard")
        if is_sharded and nn.Linear in type(head).__bases__:
            head.unshard()  # FSDP gathers a layer's weight when it is called; here it is read
        elif not is_plain(head, nn.Linear):
            return chunked_cross_entropy_of_layer(head, features, labels, bias, smoothing, num_items_in_batch)
        return chunked_cross_entropy(features, head.weight, labels, bias, smoothing, num_items_in_batch)

    def features(self, outputs: Seq2SeqModelOutput) -> torch.Tensor:
        """What the output layer reads, `(batch_size, target_length, d_model)`; a read-out or gate goes here."""
        return outputs.last_hidden_state

    def lm_output(self, loss: torch.Tensor | None, logits: torch.Tensor | None, outputs: Any) -> Seq2SeqLMOutput:
        """The language-model output; subclasses add evidence of their own."""
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
        )

    def prepare_decoder_input_ids_from_labels(self, labels: torch.LongTensor) -> torch.LongTensor:
        """Labels `(batch_size, target_length)` shifted right behind the start token, -100 replaced by padding."""
        shifted = labels.new_empty(labels.shape)
        shifted[:, 0] = self.config.decoder_start_token_id
        shifted[:, 1:] = labels[:, :-1]
        return shifted.masked_fill(shifted == IGNORE_INDEX, self.config.pad_token_id)

    # -- generation --------------------------------------------------------------------------------------------------

    def create_masks_for_generate(
        self, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor | dict[str, torch.Tensor] | None:
        """
        The decoder's mask for a static cache. That of a padded prompt goes to the decoder as it is, `(batch_size, seen
        + length)`: positions and recurrent states count by it, which a mask of queries and keys does not tell.
        """
        if attention_mask is not None:
            return attention_mask
        return create_masks_for_generate(attention_mask=None, **kwargs)

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Any = None, **model_kwargs: Any
    ):
        # Beams share their source: its memories stay one row per source, and the decoder folds its beams into them.
        kept = {name: model_kwargs.pop(name, None) for name in ("encoder_outputs", "attention_mask")}
        input_ids, model_kwargs = super()._expand_inputs_for_generation(
            expand_size=expand_size, is_encoder_decoder=False, input_ids=input_ids, **model_kwargs
        )
        model_kwargs.update({name: value for name, value in kept.items() if value is not None})
        return input_ids, model_kwargs
