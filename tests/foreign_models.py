"""Tiny random checkpoints of transformers' own encoder-decoders, with tokenizers trained here."""

import json

import sentencepiece
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers


SIZES = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "max_position_embeddings": 96,
}
T5_SIZES = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
CONTROLS = ("<unk>", "<s>", "</s>")
T5_TASKS = {
    f"translation_{source}_to_{target}": {"prefix": f"translate {names} to {other}: ", "num_beams": 4}
    for source, target, names, other in (("en", "de", "English", "German"), ("en", "fr", "English", "French"))
}


def train_pieces(path, texts, size=150):
    """Train SentencePiece, write `path`, and return its pieces with their scores, without control tokens."""
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(texts),
        model_prefix=str(path.with_suffix("")),
        vocab_size=size,
        character_coverage=1.0,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    path.with_suffix(".model").rename(path)
    model = sentencepiece.SentencePieceProcessor(str(path))
    pieces = [(model.id_to_piece(i), model.get_score(i)) for i in range(len(model))]
    return [(piece, score) for piece, score in pieces if piece not in CONTROLS]


def save(model, tokenizer, folder):
    """Enlarge the weights, so that translations differ, and save the checkpoint."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def marian(folder, pieces, tags=(">>deu<<", ">>fra<<"), separate=False, **fields):
    """
    OPUS-MT: SentencePiece files and a vocabulary with tags, which ends in the padding token; or without tags, and with
    a vocabulary of the target in reverse order.
    """
    folder.mkdir()
    for side in ("source", "target"):
        (folder / f"{side}.spm").write_bytes(pieces["file"].read_bytes())
    vocabulary = {
        token: id for id, token in enumerate(["</s>", "<unk>", *tags, *(p for p, _ in pieces["pieces"]), "<pad>"])
    }
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    about = {"source_lang": "en", "target_lang": "gmw", "separate_vocabs": separate}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    pad, sizes = vocabulary["<pad>"], {}
    if separate:
        reverse = {token: id if id < 2 or id == pad else pad + 1 - id for token, id in vocabulary.items()}
        (folder / "target_vocab.json").write_text(json.dumps(reverse))
        sizes = {"decoder_vocab_size": len(vocabulary), "share_encoder_decoder_embeddings": False}
    sizes |= {"vocab_size": len(vocabulary), "pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": 0}
    config = transformers.MarianConfig(**SIZES, **sizes, **fields)
    model = transformers.MarianMTModel(config)
    generation = {"bad_words_ids": [[pad]], "forced_eos_token_id": 0, "num_beams": 2}
    model.generation_config.update(**generation)
    return save(model, None, folder)


def m2m100(folder, pieces):
    """M2M-100: languages as `__de__` after the vocabulary, first in the source and in the target."""
    folder.mkdir()
    vocabulary = {
        token: id for id, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", *(p for p, _ in pieces["pieces"])])
    }
    (folder / "vocabulary.json").write_text(json.dumps(vocabulary))
    files = str(folder / "vocabulary.json"), str(pieces["file"])
    codes = transformers.M2M100Tokenizer(*files).lang_code_to_token.values()
    tokenizer = transformers.M2M100Tokenizer(*files, additional_special_tokens=list(codes))
    config = transformers.M2M100Config(vocab_size=len(vocabulary) + 108, **SIZES)
    return save(transformers.M2M100ForConditionalGeneration(config), tokenizer, folder)


def train_bpe(texts, pre_tokenizer, special, **settings):
    """Return vocabulary and merges of a trained BPE model."""
    learned = Tokenizer(models.BPE(unk_token="<unk>"))
    learned.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(special_tokens=["<s>", "<pad>", "</s>", *special], show_progress=False, **settings)
    learned.train_from_iterator(texts, trainer)
    state = json.loads(learned.to_str())["model"]
    return {"vocab": state["vocab"], "merges": [tuple(merge) for merge in state["merges"]]}


def nllb(folder, texts, legacy=False):
    """NLLB-200: the model of M2M-100 and languages as `deu_Latn`; formerly at the end of the source."""
    spaces = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    learned = train_bpe(texts, spaces, ["<unk>"], vocab_size=160)
    tokenizer = transformers.NllbTokenizer(**learned, legacy_behaviour=legacy)
    config = transformers.M2M100Config(vocab_size=len(tokenizer), **SIZES)
    return save(transformers.M2M100ForConditionalGeneration(config), tokenizer, folder)


def mbart(folder, pieces, kind="MBart"):
    """mBART: a language as `de_DE` ends the source and starts the decoder. MBart50: it is first in both texts."""
    vocabulary = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *pieces["pieces"]]
    tokenizer = getattr(transformers, f"{kind}Tokenizer")(vocab=vocabulary)
    model = transformers.MBartForConditionalGeneration(transformers.MBartConfig(vocab_size=len(tokenizer), **SIZES))
    if kind == "MBart50":
        model.generation_config.decoder_start_token_id = 2
    return save(model, tokenizer, folder)


def t5(folder, pieces, kind="T5", tags=(), **settings):
    """T5 and its relatives: no language tokens but text in front of the source, or tags as of MADLAD-400."""
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((tag, 0.0) for tag in tags), *pieces["pieces"]]
    tokenizer = transformers.T5Tokenizer(vocab=vocabulary, extra_ids=0, additional_special_tokens=None)
    if tags:
        tokenizer.add_tokens(list(tags), special_tokens=True)
    config = getattr(transformers, f"{kind}Config")(vocab_size=len(tokenizer), **T5_SIZES, **settings)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    model.generation_config.decoder_start_token_id = 0
    return save(model, tokenizer, folder)


def bart(folder, texts):
    """BART: `<s>` is forced at the beginning of each translation; learned positions."""
    symbols = {"vocab_size": 330, "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    learned = train_bpe(texts, pre_tokenizers.ByteLevel(add_prefix_space=False), ["<unk>", "<mask>"], **symbols)
    tokenizer = transformers.BartTokenizer(**learned)
    config = transformers.BartConfig(vocab_size=len(tokenizer), **SIZES)
    model = transformers.BartForConditionalGeneration(config)
    generation = {"decoder_start_token_id": 2, "forced_bos_token_id": 0, "forced_eos_token_id": 2}
    model.generation_config.update(**generation)
    return save(model, tokenizer, folder)
