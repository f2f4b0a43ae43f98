"""Backend for models that were exported to ONNX: they run in ONNX Runtime under the names of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, AutoConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from ...errors import UserError, packages_of_extra
from ...models.decoder_cache import spread_over_beams
from ...models.seq2seq_outputs import CACHE, takes_cache
from ..devices import resolve_device
from ..model_settings import read_export_settings
from .torch_model import TorchBackend


ENCODER, DECODER, STEP = "encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx"
GRAPHS = (ENCODER, DECODER, STEP)
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
# Prefixes of the cache's tensors: those that each step changes, and those that are computed once from the source.
OF_WORDS, OF_SOURCE = "words.", "source."


class OnnxCache:
    """Cache of the decoder's graphs, with one row for each row of the decoder."""

    def __init__(self) -> None:
        self.tensors: dict[str, np.ndarray] = {}  # by their names in the graphs, without `past.` and `present.`
        self.words = 0  # tokens that the decoder has read
        self.beams = 1  # consecutive rows for each source

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.words

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replace row `i` by row `beam_idx[i]`."""
        rows = beam_idx.cpu().numpy()
        count = next(iter(self.tensors.values())).shape[0]
        stays = np.array_equal(rows // self.beams, np.arange(count) // self.beams)
        for name, tensor in self.tensors.items():
            if not (stays and name.startswith(OF_SOURCE)):
                self.tensors[name] = tensor[rows]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.tensors = {name: tensor.repeat(repeats, 0) for name, tensor in self.tensors.items()}
        self.beams *= repeats


class OnnxEncoder:
    """Graph of the encoder, called like an encoder of transformers."""

    main_input_name = "input_ids"

    def __init__(self, model: OnnxModel):
        self.model = model
        of_family: Any = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING[type(model.config)]
        of_encoder = of_family.model_class.encoder_class
        self.output_class, self.source_inputs = of_encoder.output_class, of_encoder.source_inputs

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutput:
        """Run the graph; `kwargs` are columns that it reads, such as trees, and -1 is in missing ones."""
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        values: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
        for name in self.source_inputs:
            column = kwargs.get(name)
            values[name] = torch.full_like(input_ids, -1) if column is None else column
        outputs = self.model.run_graph(ENCODER, values)
        return self.output_class(**{name: self.model.tensor(value) for name, value in outputs.items()})

    __call__ = forward


class OnnxModel(PreTrainedModel, GenerationMixin):
    """Model whose graphs (encoder, decoder over given tokens, one step with a cache) run in ONNX Runtime."""

    main_input_name = "input_ids"
    _supports_sdpa = True  # the configuration's choice has no effect on the graphs

    def __init__(self, path: str | Path, device: str | torch.device | None = None):
        with packages_of_extra("onnx", "ONNX"):
            import onnxruntime  # type: ignore[import-untyped]
        path = Path(path)
        _, config, generation_config = read_export_settings(path)
        super().__init__(AutoConfig.for_model(**config))
        self.generation_config, self.name_or_path = generation_config, str(path)
        self.place, available = resolve_device(device), onnxruntime.get_available_providers()
        if PROVIDERS.get(self.place.type) not in available:
            if device is not None:
                raise UserError(f"ONNX Runtime has no {device}, only {available}.", field="device")
            self.place = torch.device("cpu")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        providers: list[Any] = [PROVIDERS["cpu"]]
        if self.place.type == "cuda":
            providers.insert(0, (PROVIDERS["cuda"], {"device_id": self.place.index or 0}))
        self.sessions, self.output_names = {}, {}
        for name in GRAPHS:
            session = self.sessions[name] = onnxruntime.InferenceSession(str(path / name), options, providers=providers)
            self.output_names[name] = [output.name for output in session.get_outputs()]
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

    def run_graph(self, name: str, values: dict[str, Any]) -> dict[str, np.ndarray]:
        """Run a graph on those values that it reads, ids and masks of any type. Return its outputs by name."""
        session, inputs = self.sessions[name], {}
        for entry in session.get_inputs():
            value = values[entry.name]
            if isinstance(value, torch.Tensor):
                value = (value.long() if entry.type == "tensor(int64)" else value).cpu().numpy()
            if value is not None:
                inputs[entry.name] = value
        return dict(zip(self.output_names[name], session.run(None, inputs), strict=True))

    def tensor(self, value: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(value).to(self.place)

    @takes_cache
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        encoder_outputs: Any = None,
        cache: OnnxCache | None = None,
        use_cache: bool | None = None,
        return_dict: bool = True,
        dependency_heads: torch.Tensor | None = None,
        dependency_relations: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Run the graphs; a source may have several consecutive rows in `decoder_input_ids`, those after a cache."""
        if unsupported := sorted(name for name, value in kwargs.items() if value is not None and value is not False):
            raise UserError(f"{unsupported[0]} is not supported by a model in ONNX.", field=unsupported[0])
        assert decoder_input_ids is not None
        if cache is not None and cache.words:
            return self.continued(decoder_input_ids, cache)
        if encoder_outputs is None:
            assert input_ids is not None
            trees = {"dependency_heads": dependency_heads, "dependency_relations": dependency_relations}
            encoder_outputs = self.encoder(input_ids, attention_mask, **trees)
        states = encoder_outputs["last_hidden_state"]
        if attention_mask is None:
            attention_mask = states.new_ones(states.shape[:2], dtype=torch.long)
        sources, rows = states.shape[0], decoder_input_ids.shape[0]
        attention_mask = attention_mask[:: max(attention_mask.shape[0] // sources, 1)]  # it may be repeated for beams
        inputs = {name: spread_over_beams(value, rows) for name, value in encoder_outputs.items()}
        inputs |= {"attention_mask": spread_over_beams(attention_mask, rows), "decoder_input_ids": decoder_input_ids}
        outputs = self.run_graph(DECODER, inputs)
        logits = self.tensor(outputs.pop("logits"))
        if use_cache is False:
            cache = None
        else:
            cache = OnnxCache() if cache is None else cache
            cache.tensors = {name.removeprefix("present."): value for name, value in outputs.items()}
            cache.words, cache.beams = decoder_input_ids.shape[1], rows // sources
        return Seq2SeqLMOutput(logits=logits, **{CACHE: cache})  # type: ignore[arg-type]

    def continued(self, decoder_input_ids: torch.Tensor, cache: OnnxCache) -> Seq2SeqLMOutput:
        """Run further tokens one after the other."""
        logits = []
        for word in decoder_input_ids.split(1, dim=1):
            past = {f"past.{name}": value for name, value in cache.tensors.items()}
            outputs = self.run_graph(STEP, {**past, "decoder_input_ids": word})
            logits.append(self.tensor(outputs.pop("logits")))
            cache.tensors |= {name.removeprefix("present."): value for name, value in outputs.items()}
            cache.words += 1
        return Seq2SeqLMOutput(logits=torch.cat(logits, 1), **{CACHE: cache})  # type: ignore[arg-type]


class OnnxBackend(TorchBackend):
    """Runs an [`OnnxModel`]."""

    kind = "exported to ONNX"
