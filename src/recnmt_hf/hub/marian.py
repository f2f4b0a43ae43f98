"""Conversion of MarianMT checkpoints to base Transformers and back."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import MarianConfig, MarianMTModel, PreTrainedTokenizerBase

from .._loading_errors import explained_loading, looks_local
from ..data.files import open_output_folder
from ..data.tokenization import load_unchecked
from ..data.tokenizer_pair import TokenizerPair, stamp_tokenizers
from ..errors import packages_of_extra
from ..inference.loading import load_complete
from ..models.configuration_nmt_transformer import NMTTransformerConfig
from ..models.modeling_nmt_transformer import NMTTransformerForConditionalGeneration
from ..training.evidence import Evidence
from .checked_copy import check_fields, load_checked


# Fields that both configurations have under the same name.
SHARED_FIELDS = (
    *("vocab_size", "decoder_vocab_size", "d_model", "encoder_layers", "decoder_layers"),
    *("encoder_attention_heads", "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim"),
    *("activation_function", "dropout", "attention_dropout", "activation_dropout", "scale_embedding"),
    *("max_position_embeddings", "share_encoder_decoder_embeddings", "tie_word_embeddings", "use_cache"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"),
)
# Values of fields that MarianMT supports.
EXPRESSIBLE: dict[str, tuple[Any, ...]] = {
    **{"normalize_before": (False,), "self_attention_type": ("absolute",), "layer_norm_eps": (1e-5,)},
    **dict.fromkeys(("encoder_position_embeddings", "decoder_position_embeddings"), (True,)),
    **dict.fromkeys(("decoder_autoregression", "encoder_mixer"), ("self_attention",)),
    "position_embedding_type": ("sinusoidal", "marian"),
}
# MarianMT saves its sinusoids; our models compute them.
COMPUTED = {"model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"}


def from_marian(model_or_path: MarianMTModel | str | Path, **kwargs: Any) -> NMTTransformerForConditionalGeneration:
    """
    Convert a MarianMT model into an equivalent `NMTTransformerForConditionalGeneration`.

    Args:
        model_or_path (`MarianMTModel`, `str` or `Path`): The model, its folder, or its id on the Hub.
        **kwargs: Passed on to `MarianMTModel.from_pretrained`.

    Returns:
        The model in evaluation mode, with the data type, weights and generation settings of the original. It uses the
        tokenizer of the original; [`import_marian`] saves both in one folder.

    Raises:
        UserError: Parameters of the files are missing or unknown.
    """
    marian: Any = model_or_path
    if not isinstance(marian, MarianMTModel):
        path = str(model_or_path)
        with explained_loading(path):
            marian = load_complete(MarianMTModel, path, use_safetensors=True, **kwargs)
    source = {name: tensor for name, tensor in marian.state_dict().items() if name not in COMPUTED}
    fields = {name: getattr(marian.config, name) for name in (*SHARED_FIELDS, "init_std")}
    # The weights decide which of them are shared: MarianMT does not share the tables of one vocabulary if its output
    # layer is untied, and transformers unties weights for which the files have different values.
    names = ("model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")
    encoder, decoder, output = (source[f"{name}.weight"] for name in names)
    fields["share_encoder_decoder_embeddings"] &= torch.equal(encoder, decoder)
    fields["tie_word_embeddings"] &= torch.equal(decoder, output)
    if not fields["share_encoder_decoder_embeddings"]:
        source.pop("model.shared.weight", None)
    fields |= {"normalize_before": False, "position_embedding_type": "marian", "final_logits_bias": True}
    model: Any = NMTTransformerForConditionalGeneration(NMTTransformerConfig(**fields))
    model.to(marian.dtype).load_state_dict(source)
    model.generation_config = marian.generation_config
    return model.to(marian.device).eval()


def import_marian(source: str | Path, output: str | Path, **kwargs: Any) -> Path:
    """
    Convert a MarianMT checkpoint into a base Transformer with tokenizers and generation settings. All variants can be
    initialized from it (`model.init_from`).

    Args:
        source (`str` or `Path`): Folder of a MarianMTModel and a MarianTokenizer, or a model id of the Hub.
        output (`str` or `Path`): A new folder, which is returned.
        **kwargs: Those of `from_pretrained`, e.g. `revision=...`.

    Raises:
        UserError: It is not a MarianMT model, its files are damaged, or packages of the extra `marian` are missing.
        FileExistsError: The output exists and is not empty.
    """
    with packages_of_extra("marian", "MarianMT's tokenizer"):
        import sacremoses  # noqa: F401  (without it transformers skips the normalization of punctuation)
        import sentencepiece  # noqa: F401
    model = from_marian(source, **kwargs)
    tokenizer = load_unchecked(source, "tokenizer of", **kwargs)
    with open_output_folder(output, must_be_new=True) as working, TemporaryDirectory() as folder:
        tokenizers = split_tokenizer(tokenizer, folder, model.config.share_encoder_decoder_embeddings)
        languages = [str(getattr(tokenizer, name, None) or "") for name in ("source_lang", "target_lang")]
        base_model = None if looks_local(str(source)) else str(source)
        save_imported(model, tokenizers, working, languages if all(languages) else [], base_model)
    return Path(output)


def save_imported(
    model: Any, tokenizers: TokenizerPair, folder: Path, languages: Sequence[str] = (), base_model: str | None = None
) -> None:
    """Save an imported model with its tokenizers and what is known of it."""
    stamp_tokenizers(model.config, *tokenizers)
    tokenizers.check(model)
    tokenizers.save(folder)
    model.save_pretrained(folder)
    about = {"type": model.config.model_type, "parameters": model.num_parameters()}
    Evidence(model=about, languages=list(languages), base_model=base_model).save(folder)


def split_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str, is_joint: bool) -> TokenizerPair:
    """Return a MarianMT tokenizer, saved in a folder, as two if the sides have separate vocabularies or embeddings."""
    has_two = getattr(tokenizer, "separate_vocabs", False)
    if is_joint and not has_two:
        return TokenizerPair(tokenizer)
    tokenizer.save_pretrained(folder)
    kind: Any = type(tokenizer)
    names = ("unk_token", "eos_token", "pad_token", "model_max_length")
    settings = {name: getattr(tokenizer, name) for name in names}
    symbols = {"source": "vocab.json", "target": f"{'target_' * has_two}vocab.json"}
    return TokenizerPair(
        *(kind(*[f"{folder}/{side}.spm"] * 2, f"{folder}/{file}", **settings) for side, file in symbols.items())
    )


def to_marian(model: NMTTransformerForConditionalGeneration) -> MarianMTModel:
    """
    Convert a base Transformer into an equivalent MarianMT model.

    The paper's sinusoids alternate sine and cosine, MarianMT's have all sines first. Therefore the channels of
    embeddings, norms, and the inputs and outputs of all layers are reordered.

    Args:
        model (`NMTTransformerForConditionalGeneration`): With post-norm, plain self-attention and sinusoids.

    Returns:
        The model in evaluation mode, with data type and generation settings.

    Raises:
        UserError: MarianMT does not support the model.
    """
    config = model.config
    check_fields(config, "MarianMT", EXPRESSIBLE)
    fields = {name: getattr(config, name) for name in SHARED_FIELDS}
    marian = MarianMTModel(MarianConfig(**fields, forced_eos_token_id=None))
    order = torch.arange(config.d_model)
    if config.position_embedding_type == "sinusoidal":
        order = torch.cat([order[0::2], order[1::2]])
    source = {name: reordered(name, tensor, order) for name, tensor in model.state_dict().items()}
    source.setdefault("final_logits_bias", torch.zeros(1, config.decoder_vocab_size))
    marian.load_state_dict({name: tensor for name, tensor in marian.state_dict().items() if name in COMPUTED} | source)
    marian.generation_config = model.generation_config
    marian.to(model.dtype)  # type: ignore[arg-type]  # transformers' wrapper hides the signature
    return marian.to(model.device).eval()  # type: ignore[arg-type]  # as above


def reordered(name: str, tensor: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Reorder the channels of a parameter that layers read or write."""
    module, _, kind = name.rpartition(".")
    last = module.rpartition(".")[2]
    if last in ("out_proj", "fc2") or last.endswith("layer_norm"):  # writes the channels
        return tensor[order]
    if kind == "weight" and last in ("shared", "embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "fc1"):
        return tensor[:, order]
    return tensor


def export_marian(source: str | Path, output: str | Path, **kwargs: Any) -> Path:
    """
    Save the base Transformer in the folder or repository `source` and its tokenizers as a MarianMT checkpoint in the
    new folder `output`. Return value and errors are those of [`~recnmt_hf.export_ctranslate2`].
    """
    model, tokenizers = load_checked(source, **kwargs)
    marian = to_marian(model)
    with open_output_folder(output, must_be_new=True) as working:
        marian.save_pretrained(working)
        tokenizers.save(working)
    return Path(output)
