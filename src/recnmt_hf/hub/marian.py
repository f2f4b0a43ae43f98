"""MarianMT checkpoints taken over as models of the zoo, and given back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, MarianConfig, MarianMTModel, PreTrainedTokenizerBase

from .._extras import packages_of_extra
from .._loading_errors import explained_loading, looks_local
from ..data.files import open_output_folder
from ..data.tokenization import without_origin
from ..data.tokenizer_pair import TARGET_TOKENIZER, TokenizerPair
from ..inference.loading import load_model, no_model, quiet_loading, without_reports
from ..inference.model_checks import check_loading
from ..models.configuration_nmt_transformer import NMTTransformerConfig
from ..models.modeling_nmt_transformer import NMTTransformerForConditionalGeneration
from ..models.user_errors import UserError
from ..training.evidence import Evidence, about_model


# Fields that both configurations have under the same name.
SHARED_FIELDS = (
    "vocab_size",
    "decoder_vocab_size",
    "d_model",
    "encoder_layers",
    "decoder_layers",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "activation_function",
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "scale_embedding",
    "max_position_embeddings",
    "share_encoder_decoder_embeddings",
    "tie_word_embeddings",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "decoder_start_token_id",
)
# MarianMT's sinusoids are computed, not learned: the zoo makes the same ones itself.
COMPUTED = {"model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"}


def config_from_marian(config: MarianConfig) -> NMTTransformerConfig:
    """The configuration of the same network."""
    fields = {name: getattr(config, name) for name in SHARED_FIELDS}
    return NMTTransformerConfig(
        **fields,
        normalize_before=False,
        position_embedding_type="marian",
        final_logits_bias=True,
        init_std=config.init_std,
    )


def from_marian(model_or_path: MarianMTModel | str | Path, **kwargs: Any) -> NMTTransformerForConditionalGeneration:
    """
    An `NMTTransformerForConditionalGeneration` that computes what a MarianMT model computes.

    Args:
        model_or_path (`MarianMTModel`, `str` or `Path`): The model, its folder, or its id on the Hub.
        **kwargs: Passed on to `MarianMTModel.from_pretrained`.

    Returns:
        The model in evaluation mode, with the data type, weights and generation settings of the original. Its tokenizer
        is the original's; [`import_marian`] writes both into one folder.

    Raises:
        ValueError: The files lack a parameter or hold a foreign one, a parameter has no place in the model, or stays
            without a value.
    """
    if isinstance(model_or_path, MarianMTModel):
        marian = model_or_path
    else:
        path = str(model_or_path)
        if looks_local(path):
            check_folder(Path(path))
        settings: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        settings |= {"use_safetensors": True}
        with explained_loading(model_or_path), without_reports():
            loaded: Any = MarianMTModel.from_pretrained(str(model_or_path), **settings, **kwargs)
            marian, info = loaded
        check_loading(marian, info)
    config = config_from_marian(marian.config)
    model = NMTTransformerForConditionalGeneration(config)
    model.to(marian.dtype)  # type: ignore[arg-type]  # transformers' wrapper hides the signature
    source = {name: tensor for name, tensor in marian.state_dict().items() if name not in COMPUTED}
    own = model.state_dict()
    foreign = sorted(set(source) - set(own))
    empty = sorted(set(own) - set(source))
    if foreign or empty:
        raise UserError(
            f"This MarianMT model does not fit: {', '.join(foreign) or 'nothing'} has no place, "
            f"{', '.join(empty) or 'nothing'} stays empty. Remedy: use a model of the plain MarianMT architecture."
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(source[name])
    model.generation_config = marian.generation_config
    model.to(marian.device)  # type: ignore[arg-type]  # as above
    return model.eval()


def check_folder(folder: Path) -> None:
    """
    Raises `UserError` for a folder without a model, of another architecture, or whose weights are pickled: reading
    those may run code.
    """
    if not (folder / "config.json").is_file():
        raise no_model(str(folder))
    if not any(folder.glob("*.safetensors")) and (pickled := sorted([*folder.glob("*.bin"), *folder.glob("*.pt")])):
        raise UserError(
            f"{folder} has its weights in {pickled[0].name} alone, which is pickled: reading it may run code. Remedy: "
            "where you trust it, load it with MarianMTModel.from_pretrained and save it again, which writes "
            "safetensors; Helsinki-NLP's models on the Hub have them, give the model id."
        )


def import_marian(source: str | Path, output: str | Path, **kwargs: Any) -> Path:
    """
    Writes a MarianMT checkpoint as a model of the zoo: the base Transformer, its tokenizers, its generation settings.
    Any variant of the zoo starts from it (`model.init_from`).

    Args:
        source (`str` or `Path`): A folder as MarianMTModel and MarianTokenizer write it or OPUS-MT publishes it, or a
            model id of the Hub.
        output (`str` or `Path`): A new folder.
        **kwargs: Those of `from_pretrained`, e.g. `revision=...`.

    Returns:
        The folder.

    Raises:
        ValueError: It is no MarianMT model, its files are damaged, or packages of the extra `marian` are missing.
        FileExistsError: The output is there and not empty.
    """
    quiet_loading()
    model = from_marian(source, **kwargs)
    tokenizer = marian_tokenizer(source, **kwargs)
    with open_output_folder(output, must_be_new=True) as working:
        tokenizers = save_tokenizers(tokenizer, working)
        tokenizers.stamp(model.config)
        tokenizers.check(model)
        model.save_pretrained(working)
        languages = [getattr(tokenizer, name, None) for name in ("source_lang", "target_lang")]
        Evidence(
            model=about_model(model.config, model.num_parameters()),
            languages=[str(each) for each in languages if each] if all(languages) else [],
            base_model=None if looks_local(str(source)) else str(source),
        ).save(working)
    return Path(output)


def marian_tokenizer(source: str | Path, **kwargs: Any) -> PreTrainedTokenizerBase:
    """
    Load the tokenizer of a MarianMT checkpoint.

    Raises:
        UserError: sentencepiece, sacremoses or a file of the tokenizer is missing.
    """
    with packages_of_extra("marian", "MarianMT's tokenizer"):
        import sacremoses  # noqa: F401  (without it transformers skips the normalization of punctuation)
        import sentencepiece  # noqa: F401
    with explained_loading(source, "tokenizer of"):
        settings = {"trust_remote_code": False, **kwargs}
        return without_origin(AutoTokenizer.from_pretrained(str(source), **settings))


def save_tokenizers(tokenizer: PreTrainedTokenizerBase, folder: Path) -> TokenizerPair:
    """
    Writes a MarianMT tokenizer so that it loads for any model: as it is where both sides share a vocabulary, else as
    one for each side.
    """
    tokenizer.save_pretrained(str(folder))
    if not getattr(tokenizer, "separate_vocabs", False):
        return TokenizerPair(tokenizer)
    kind: Any = type(tokenizer)
    controls = {name: str(getattr(tokenizer, name)) for name in ("unk_token", "eos_token", "pad_token")}
    files = {"source": ("source.spm", "vocab.json"), "target": ("target.spm", "target_vocab.json")}
    made = {
        side: kind(
            *[str(folder / pieces)] * 2, str(folder / symbols), model_max_length=tokenizer.model_max_length, **controls
        )
        for side, (pieces, symbols) in files.items()
    }
    for side, place in (("target", folder / TARGET_TOKENIZER), ("source", folder)):
        made[side].save_pretrained(str(place))
    (folder / "target_vocab.json").unlink()
    return TokenizerPair.load(folder)


# -- back ------------------------------------------------------------------------------------------------------------


def to_marian(model: NMTTransformerForConditionalGeneration) -> MarianMTModel:
    """
    A MarianMT model that computes what a model of the zoo computes.

    Sinusoids in the paper's order (sine, cosine, sine, ...) become MarianMT's (all sines, then all cosines) by one
    order of channels for all that is added to or read from them: embeddings, norms, inputs and outputs of each layer.

    Args:
        model (`NMTTransformerForConditionalGeneration`): With post-norm, plain self-attention and sinusoids.

    Returns:
        The model in evaluation mode, with data type and generation settings.

    Raises:
        UserError: MarianMT has no such model; the message names the field.
    """
    config = model.config
    check_expressible(config)
    fields = {name: getattr(config, name) for name in SHARED_FIELDS}
    marian = MarianMTModel(MarianConfig(**fields, forced_eos_token_id=None))
    order = torch.arange(config.d_model)
    if config.position_embedding_type == "sinusoidal":
        order = torch.cat([order[0::2], order[1::2]])
    source = {name: reordered(name, tensor, order) for name, tensor in model.state_dict().items()}
    own = marian.state_dict()
    source.setdefault("final_logits_bias", torch.zeros_like(own["final_logits_bias"]))
    missing = set(own) - set(source) - COMPUTED
    if missing or set(source) - set(own):
        raise AssertionError(f"parameters differ: {sorted(missing)}, {sorted(set(source) - set(own))}")
    marian.load_state_dict(source, strict=False)
    marian.generation_config = model.generation_config
    marian.to(model.dtype)  # type: ignore[arg-type]  # transformers' wrapper hides the signature
    return marian.to(model.device).eval()  # type: ignore[arg-type]  # as above


def check_expressible(config: Any) -> None:
    """Raises `UserError` for a model that MarianMT's architecture does not have."""
    if config.model_type != NMTTransformerConfig.model_type:
        raise UserError(
            f"MarianMT has no {config.model_type}. Remedy: export a base Transformer "
            f"({NMTTransformerConfig.model_type})."
        )
    needed: dict[str, tuple[Any, ...]] = {
        "normalize_before": (False,),
        "self_attention_type": ("absolute",),
        "position_embedding_type": ("sinusoidal", "marian"),
        "encoder_position_embeddings": (True,),
        "decoder_position_embeddings": (True,),
        "layer_norm_eps": (1e-5,),
    }
    for name, allowed in needed.items():
        if getattr(config, name) not in allowed:
            raise UserError(
                f"MarianMT has no model with {name}={getattr(config, name)!r}, only {' or '.join(map(repr, allowed))}. "
                "Remedy: train one with that."
            )


def reordered(name: str, tensor: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """A parameter with the channels of what layers read and write in another order."""
    module, _, kind = name.rpartition(".")
    last = module.rpartition(".")[2]
    if last in ("out_proj", "fc2") or last.endswith("layer_norm"):  # writes the channels
        return tensor[order]
    if kind == "weight" and last in ("shared", "embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "fc1"):
        return tensor[:, order]
    return tensor


def export_marian(source: str | Path, output: str | Path) -> Path:
    """
    Writes a base Transformer of the zoo, with its tokenizer, as a MarianMT checkpoint of transformers.

    Args:
        source (`str` or `Path`): Folder or model id.
        output (`str` or `Path`): A new folder.

    Returns:
        The folder.

    Raises:
        ValueError: MarianMT has no such model; the files are damaged.
        FileExistsError: The output is there and not empty.
    """
    model: Any = load_model(source, "cpu")
    check_expressible(model.config)
    tokenizers = TokenizerPair.load(source)
    with open_output_folder(output, must_be_new=True) as working:
        to_marian(model).save_pretrained(working)
        tokenizers.save(working)
    return Path(output)
