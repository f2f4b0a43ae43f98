"""Backend for models that were exported to ONNX: they run in ONNX Runtime under the names of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from transformers import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from ..._loading_errors import explained_loading, shorten
from ...models.source_memory import spread_over_beams
from ...models.user_errors import UserError
from ..devices import resolve_device
from .export_settings import cannot_be_inspected, read_export_settings
from .torch_model import TorchBackend


ENCODER, DECODER, STEP = "encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx"
GRAPHS = (ENCODER, DECODER, STEP)
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
# Prefixes of the cache's tensors: those that each step changes, and those that are computed once from the source.
OF_WORDS, OF_SOURCE = "words.", "source."


def load_onnx_runtime() -> Any:
    """
    Import the package onnxruntime.

    Raises:
        UserError: It is not installed.
    """
    try:
        import onnxruntime  # type: ignore[import-untyped]
    except ImportError:
        raise UserError('Models in ONNX need the package onnxruntime. Remedy: pip install "recnmt-hf[onnx]".') from None
    return onnxruntime


def resolve_provider_device(runtime: Any, device: str | torch.device | None) -> torch.device:
    """
    Return a device that ONNX Runtime has.

    Raises:
        UserError: It does not have the device.
    """
    has_cuda = PROVIDERS["cuda"] in runtime.get_available_providers()
    if device is None:
        return torch.device("cuda" if has_cuda and torch.cuda.is_available() else "cpu")
    resolved = resolve_device(device)
    if resolved.type not in PROVIDERS or (resolved.type == "cuda" and not has_cuda):
        raise UserError(
            f"ONNX Runtime has no {resolved.type} here (it has {', '.join(runtime.get_available_providers())}). "
            "Remedy: --device cpu, or install onnxruntime-gpu."
        )
    return resolved


class OnnxCache:
    """
    Cache of the decoder's graphs, with one row for each row of the decoder.

    Attributes:
        tensors (`dict[str, np.ndarray]`): By their names in the graphs, without `past.` and `present.`.
        words (`int`): Number of tokens that the decoder has read.
        beams (`int`): Number of consecutive rows for each source.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, np.ndarray] = {}
        self.words = 0
        self.beams = 1

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.words

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replace row `i` by row `beam_idx[i]`."""
        rows = beam_idx.cpu().numpy()
        stays = np.array_equal(rows // self.beams, np.arange(rows.shape[0]) // self.beams)
        for name, tensor in self.tensors.items():
            if not (stays and name.startswith(OF_SOURCE)):
                self.tensors[name] = tensor[rows]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        rows = indices.cpu().numpy()
        self.tensors = {name: tensor[rows] for name, tensor in self.tensors.items()}

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.tensors = {name: tensor.repeat(repeats, 0) for name, tensor in self.tensors.items()}
        self.beams *= repeats


class OnnxEncoder:
    """Graph of the encoder, called like an encoder of transformers."""

    main_input_name = "input_ids"

    def __init__(self, model: OnnxModel):
        self.model = model
        of_family: Any = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING[type(model.config)]
        self.output_class = of_family.model_class.encoder_class.output_class

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutput:
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        outputs = self.model.run_graph(ENCODER, {"input_ids": input_ids, "attention_mask": attention_mask})
        return self.output_class(**{name: self.model.tensor(value) for name, value in outputs.items()})

    __call__ = forward


class OnnxModel(PreTrainedModel, GenerationMixin):
    """
    Model of this package whose three graphs run in ONNX Runtime: the encoder, the decoder over given tokens, and one
    step of the decoder with a cache. `generate` and teacher forcing work as with the model itself. It has no
    attentions, gradients or weights.

    Args:
        path (`str` or `Path`): Folder that [`~recnmt_hf.hub.onnx_graphs.export_onnx`] wrote.
        device (`str` or `torch.device`, *optional*): `"cpu"` or `"cuda"`; defaults to CUDA if both torch and ONNX
            Runtime have it.

    Raises:
        ValueError: The package is not installed, or the files are damaged.
    """

    main_input_name = "input_ids"
    _supports_sdpa = True  # whatever the configuration says, the graphs are made

    def __init__(self, path: str | Path, device: str | torch.device | None = None):
        runtime = load_onnx_runtime()
        path = Path(path)
        settings = read_export_settings(path)
        with explained_loading(path):
            config = AutoConfig.for_model(**settings.config)
        super().__init__(config)
        self.generation_config = settings.generation_config
        self.name_or_path = str(path)
        self.place = resolve_provider_device(runtime, device)
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.sessions, self.output_names = {}, {}
        for name in GRAPHS:
            try:
                session = runtime.InferenceSession(
                    str(path / name),
                    options,
                    providers=list(dict.fromkeys([PROVIDERS[self.place.type], PROVIDERS["cpu"]])),
                )
            except Exception as error:  # classes of its own, without a common one
                raise UserError(
                    f"ONNX Runtime cannot load {path / name} ({shorten(str(error))}). Remedy: export the model again."
                ) from error
            self.sessions[name] = session
            self.output_names[name] = [each.name for each in session.get_outputs()]
        self.encoder = OnnxEncoder(self)

    @property
    def device(self) -> torch.device:
        return self.place

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def get_encoder(self, modality: str | None = None) -> Any:
        return self.encoder

    def _supports_default_dynamic_cache(self) -> bool:  # type: ignore[override]
        return False  # the first step creates an OnnxCache

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        raise UserError("Graphs of ONNX are not saved again. Remedy: copy their folder, or save the model itself.")

    # -- graphs ------------------------------------------------------------------------------------------------------

    def run_graph(self, name: str, given: dict[str, Any]) -> dict[str, np.ndarray]:
        """Run a graph with those of the given inputs that it reads. Return its outputs by name."""
        session = self.sessions[name]
        inputs = {
            each.name: value.cpu().numpy() if isinstance(value, torch.Tensor) else value
            for each in session.get_inputs()
            if (value := given[each.name]) is not None
        }
        return dict(zip(self.output_names[name], session.run(None, inputs), strict=True))

    def tensor(self, value: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(value).to(self.place)

    # -- calling -----------------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: OnnxCache | None = None,
        use_cache: bool | None = None,
        return_dict: bool = True,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        r"""
        Args:
            input_ids (`torch.LongTensor` of shape `(batch_size, source_length)`, *optional*): Source tokens.
            attention_mask (`torch.Tensor` of shape `(batch_size, source_length)`, *optional*): 1 keeps.
            decoder_input_ids (`torch.LongTensor` of shape `(rows, target_length)`): Target tokens, shifted right; with
                a cache only those that it has not read. A source may have several consecutive rows.
            encoder_outputs ([`~transformers.modeling_outputs.BaseModelOutput`], *optional*): Of `get_encoder()`.
            past_key_values ([`OnnxCache`], *optional*): Cache of the tokens read so far.
            use_cache (`bool`, *optional*): Whether to fill and return a cache.

        Raises:
            ValueError: An argument is not supported by the graphs.
        """
        if asked := sorted(name for name, value in kwargs.items() if value is not None and value is not False):
            raise UserError(
                f"A model in ONNX takes no {asked[0]}. Remedy: leave it out, or use the model it was made of."
            )
        assert decoder_input_ids is not None, "the decoder's words"
        if past_key_values is not None and past_key_values.words:
            return self.continued(decoder_input_ids, past_key_values)
        if encoder_outputs is None:
            assert input_ids is not None, "the source, or the encoder's output"
            encoder_outputs = self.encoder(input_ids, attention_mask)
        states = encoder_outputs["last_hidden_state"]
        if attention_mask is None:
            attention_mask = states.new_ones(states.shape[:2], dtype=torch.long)
        sources, rows = states.shape[0], decoder_input_ids.shape[0]
        attention_mask = attention_mask[:: max(attention_mask.shape[0] // sources, 1)]  # it may be repeated for beams
        given = {name: spread_over_beams(value, rows) for name, value in encoder_outputs.items()}
        given |= {"attention_mask": spread_over_beams(attention_mask, rows), "decoder_input_ids": decoder_input_ids}
        found = self.run_graph(DECODER, given)
        logits = self.tensor(found.pop("logits"))
        cache = None
        if use_cache or use_cache is None:
            cache = past_key_values if past_key_values is not None else OnnxCache()
            cache.tensors = {name.removeprefix("present."): value for name, value in found.items()}
            cache.words, cache.beams = decoder_input_ids.shape[1], rows // sources
        return Seq2SeqLMOutput(logits=logits, past_key_values=cache)  # type: ignore[arg-type]

    def continued(self, decoder_input_ids: torch.Tensor, cache: OnnxCache) -> Seq2SeqLMOutput:
        """Run further tokens one after the other."""
        logits = []
        for word in decoder_input_ids.split(1, dim=1):
            given = {f"past.{name}": value for name, value in cache.tensors.items()}
            found = self.run_graph(STEP, {**given, "decoder_input_ids": word})
            logits.append(self.tensor(found.pop("logits")))
            cache.tensors |= {name.removeprefix("present."): value for name, value in found.items()}
            cache.words += 1
        return Seq2SeqLMOutput(logits=torch.cat(logits, 1), past_key_values=cache)  # type: ignore[arg-type]


class OnnxBackend(TorchBackend):
    """Runs an [`OnnxModel`]; see [`Backend`]. It translates and scores."""

    def inspected_model(self) -> NoReturn:
        raise cannot_be_inspected(self.model.name_or_path, "ONNX")

    def new_cache(self) -> OnnxCache:
        return OnnxCache()
