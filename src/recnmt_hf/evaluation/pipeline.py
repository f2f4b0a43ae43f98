"""Translation as a transformers pipeline, under the task name `recnmt-translation`."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForSeq2SeqLM, Pipeline, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pipelines import PIPELINE_REGISTRY

from .loading import without_reports
from .model_checks import check_loading
from .translator import DecodingOptions, Translation, Translator, decoding_options, load_target_tokenizer


# transformers 5 has no task "translation", and its newest releases refuse to have one registered again.
TASK = "recnmt-translation"


# What transformers tells of a model that the pipeline loaded, until the pipeline has looked at it.
LOADING_INFO = "_recnmt_loading_info"


class WholeModelForSeq2SeqLM(AutoModelForSeq2SeqLM):
    """`AutoModelForSeq2SeqLM` that keeps what transformers would only report: what is missing, misshapen or foreign."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> PreTrainedModel:
        settings = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        with without_reports():
            model, info = AutoModelForSeq2SeqLM.from_pretrained(*args, **{**kwargs, **settings})
        setattr(model, LOADING_INFO, info)
        return model


class TranslationPipeline(Pipeline):
    """
    `pipeline("recnmt-translation", model=folder)`; options are those of [`DecodingOptions`]. A target vocabulary of its
    own is found where the model was loaded from, or given as `target_tokenizer`.

    Example:

    ```python
    translate = transformers.pipeline("recnmt-translation", model="outputs/run/model")
    translate("The dog sleeps.", beams=4)  # [{"translation_text": "Der Hund schläft.", "score": -0.1}]
    ```
    """

    _load_tokenizer = True
    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False
    _pipeline_calls_generate = True

    def __init__(self, *args: Any, target_tokenizer: PreTrainedTokenizerBase | None = None, **kwargs: Any):
        model = kwargs.get("model", args[0] if args else None)
        info = model.__dict__.pop(LOADING_INFO, None)
        if info is not None:  # of a model that was loaded for the pipeline
            check_loading(model, info)
        super().__init__(*args, **kwargs)
        path, is_joint = self.model.name_or_path, getattr(self.model.config, "share_encoder_decoder_embeddings", True)
        if target_tokenizer is None and path and not is_joint:
            commit = getattr(self.model.config, "_commit_hash", None)  # of the Hub's files
            target_tokenizer = load_target_tokenizer(path, **({"revision": commit} if commit else {}))
        self.translator = Translator(self.model, self.tokenizer, target_tokenizer)

    def _sanitize_parameters(self, **kwargs: Any) -> tuple[dict, dict, dict]:
        return {}, {"options": decoding_options(None, kwargs)} if kwargs else {}, {}

    def preprocess(self, sentence: str, **kwargs: Any) -> dict[str, Any]:
        return {"sentence": sentence}

    def _forward(self, inputs: dict[str, Any], options: DecodingOptions | None = None) -> dict[str, Any]:
        return {"translation": next(self.translator.translate([inputs["sentence"]], options or DecodingOptions()))}

    def postprocess(self, outputs: dict[str, Any], **kwargs: Any) -> list[dict[str, Any]]:
        return as_records(outputs["translation"])

    def __call__(self, sentences: str | list[str], **kwargs: Any) -> list:
        """
        Translates a sentence (a list of hypotheses) or several (a list of such lists), batched by tokens.
        """
        if isinstance(sentences, str):
            return self([sentences], **kwargs)[0]
        options = decoding_options(None, kwargs)
        return [as_records(each) for each in self.translator.translate(sentences, options)]


def as_records(translation: Translation) -> list[dict[str, Any]]:
    return [{"translation_text": each.text, "score": each.score} for each in translation.hypotheses]


def register_pipeline() -> None:
    """Makes `transformers.pipeline` know the task."""
    if TASK not in PIPELINE_REGISTRY.get_supported_tasks():
        PIPELINE_REGISTRY.register_pipeline(
            TASK, pipeline_class=TranslationPipeline, pt_model=WholeModelForSeq2SeqLM, type="text"
        )
