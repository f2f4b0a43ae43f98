"""Translation as a transformers pipeline, under the task name `recnmt-translation`."""

from pathlib import Path
from typing import Any

import transformers
from transformers import AutoModelForSeq2SeqLM, Pipeline, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pipelines import PIPELINE_REGISTRY

from .._loading_errors import folder_of_model
from ..data.records import ParsedSentence
from ..data.tokenizer_pair import load_target_tokenizer
from ..data.tree_inputs import Relations, tree_options
from ..errors import UserError
from ..options import options_of
from .languages import TASK_NAME
from .loading import load_complete
from .model_settings import read_model_task
from .options import DecodingOptions, convert_option_names, decoding_options
from .results import TranslationWarnings
from .translator import Translator


# transformers 5 does not have the task "translation", and its newest releases do not allow registering it again, nor
# "translation_en_to_de".
TASK = "recnmt-translation"
# Options of preparing a sentence.
PREPARING = (
    *("max_source_length", "on_long", "split_sentences", "source_lang", "target_lang", "source_prefix", "alignments"),
    "forced_bos_token_id",
)
# Keys of a sentence with a dependency tree, and with its languages.
TREE_KEYS = ("tokens", "heads", "relations")
LANGUAGE_KEYS = ("src_lang", "tgt_lang", "source_lang", "target_lang")


class CheckedModelForSeq2SeqLM(AutoModelForSeq2SeqLM):
    """`AutoModelForSeq2SeqLM` whose weights are checked by [`load_complete`]."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> PreTrainedModel:
        return load_complete(AutoModelForSeq2SeqLM, *args, **kwargs)


class TranslationPipeline(Pipeline):
    """
    `pipeline("recnmt-translation", model=folder)`; a call returns `[{"translation_text": .., "score": ..}]`.

    Its options, at construction and in calls, are those of [`DecodingOptions`] or transformers' names for them:
    `num_beams`, `num_return_sequences`, `max_new_tokens`, `do_sample`, `no_repeat_ngram_size` and other settings of
    `generate` (`length_penalty` is the alpha of `length_penalty_type`). Sentences are texts, or mappings with `"text"`
    and `"prefix"`, the beginning of the translation. For a model that reads dependency trees, `"tokens"`, `"heads"` and
    `"relations"` ([`~recnmt_hf.data.ParsedSentence`]) may replace `"text"`. Lists, datasets and generators of them are
    read `batch_size` at a time, by default 2000, and grouped into batches for the model by length and `max_tokens`.

    `src_lang` and `tgt_lang` choose the languages of a model of several; a mapping may have them too, so that a list
    may have sentences of different languages.

    Args:
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*): Tokenizer of a target with a vocabulary of its own;
            defaults to the one in the model's folder.
    """

    # transformers types these as None, and documents them as truth values.
    _load_tokenizer: Any = True
    _load_processor: Any = False
    _load_image_processor: Any = False
    _load_feature_extractor: Any = False
    tokenizer: Any  # in transformers' types a slow one, or None
    # The translator passes settings on to `generate`; transformers' own code has no limits for each sentence.
    _pipeline_calls_generate = False

    def __init__(self, *args: Any, target_tokenizer: PreTrainedTokenizerBase | None = None, **kwargs: Any):
        kwargs.setdefault("batch_size", options_of(DecodingOptions)["buffer"].default)
        super().__init__(*args, **kwargs)
        path, config, relations = self.model.name_or_path, self.model.config, None
        commit = getattr(config, "_commit_hash", None)  # of the Hub's files
        revision = {"revision": commit} if commit else {}
        if target_tokenizer is None and path and not getattr(config, "share_encoder_decoder_embeddings", True):
            target_tokenizer = load_target_tokenizer(path, **revision)
        if path and tree_options(config) is not None:
            relations = Relations.load(path, **revision)
        self.translator = Translator(self.model, self.tokenizer, target_tokenizer, relations=relations)
        if path:
            self.translator.task = read_model_task(path, **revision)
        self.translated = 0  # sentences of this call
        languages = {name: kwargs[name] for name in LANGUAGE_KEYS if kwargs.get(name) is not None}
        self.translator.codec.direction(decoding_options(None, languages))  # reject unknown ones

    def _sanitize_parameters(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        # Options of a call replace those of the pipeline one by one, under either name.
        options = convert_option_names(kwargs)
        options |= options.pop("generate", {})
        return {name: options[name] for name in PREPARING if name in options}, options, {}

    # In transformers the first parameter of these methods has other names; it is passed by position.
    def preprocess(self, sentence: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        prefix = ""
        if isinstance(sentence, dict):
            prefix = sentence.get("prefix") or ""
            keys = sentence.keys() - {"prefix", *LANGUAGE_KEYS}
            kwargs |= convert_option_names({key: sentence[key] for key in LANGUAGE_KEYS if sentence.get(key)})
            if keys not in ({"text"}, {*TREE_KEYS}):
                raise UserError(f"A sentence has the keys {list(sentence)}; it needs text or {TREE_KEYS}.")
            is_text = "text" in keys
            sentence = sentence["text"] if is_text else ParsedSentence(*(sentence[key] for key in TREE_KEYS))
        return {"requests": self.translator.codec.encode(sentence, decoding_options(None, kwargs), prefix)}

    def _forward(self, input_tensors: dict[str, Any], **kwargs: Any) -> Any:
        inputs = input_tensors["requests"]  # one, or those of a batch
        requests = inputs if isinstance(inputs, list) else [inputs]
        options, warnings = decoding_options(None, kwargs), TranslationWarnings(self.tokenizer)
        translations = self.translator.translate_requests(requests, options, warnings, self.translated + 1)
        warnings.log()
        self.translated += len(translations)
        return {"translations": translations if isinstance(inputs, list) else translations[0]}

    def postprocess(self, outputs: dict[str, Any], **kwargs: Any) -> list[dict[str, Any]]:  # type: ignore[override]
        return [{"translation_text": one.text, "score": one.score} for one in outputs["translations"].hypotheses]

    # transformers ignores further positional arguments with a warning; this method rejects them.
    def __call__(self, sentences: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """
        Translate a sentence (a list of hypotheses), or several (a list of such lists; of a dataset or a generator, an
        iterator over them). A text of several sentences is translated sentence by sentence (`split_sentences`).
        """
        self.translated = 0
        sentences = list(sentences) if isinstance(sentences, tuple) else sentences
        return super().__call__(sentences, **kwargs) if sentences != [] else []


def pipeline(task: str | None = None, model: Any = None, *args: Any, **kwargs: Any) -> Any:
    """
    Create a pipeline as `transformers.pipeline` does, with its arguments. `task` may have the names of transformers 4
    for translation: `"translation"`, or `"translation_xx_to_yy"` with the codes of source and target language, gives a
    [`TranslationPipeline`]. `model` may be the folder of a run.
    """
    create: Any = transformers.pipeline
    if pair := TASK_NAME.fullmatch(task or ""):
        return pipeline(TASK, model, *args, source_lang=pair[1], target_lang=pair[2], **kwargs)
    if task in ("translation", TASK):
        task, model = TASK, folder_of_model(model) if isinstance(model, (str, Path)) else model
    return create(task, model, *args, **kwargs)


def register_pipeline() -> None:
    """Register the task with `transformers.pipeline`."""
    if TASK not in PIPELINE_REGISTRY.get_supported_tasks():
        PIPELINE_REGISTRY.register_pipeline(
            TASK, pipeline_class=TranslationPipeline, pt_model=CheckedModelForSeq2SeqLM, type="text"
        )
