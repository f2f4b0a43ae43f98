"""Initialization, tied weights, saving and warm start of all models."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel, utils
from transformers import initialization as init
from transformers.dynamic_module_utils import custom_object_save

from .configuration_seq2seq import Seq2SeqConfig, registered_class, reset_registration
from .user_errors import UserError


logger = utils.logging.get_logger(__name__)

# Parameters that may be tied, each with the one that is saved in its place.
TIED = (
    *((f"model.{side}.embed_tokens.weight", "model.shared.weight") for side in ("encoder", "decoder")),
    ("lm_head.weight", "model.decoder.embed_tokens.weight"),
)


def is_loaded(parameter: Tensor) -> bool:
    """Return whether a parameter was loaded from a checkpoint, by the mark of `transformers.initialization`."""
    return getattr(parameter, "_is_hf_initialized", False)


@dataclass(frozen=True)
class Initialization:
    """Initial parameters: Xavier-uniform matrices and embeddings of deviation `d_model ** -0.5`, or all alike."""

    d_model: int
    std: float | None = None  # of normal parameters
    uniform: float | None = None  # bound of uniform ones

    @property
    def is_set(self) -> bool:
        """Whether a configuration sets the distribution of all matrices."""
        return self.uniform is not None or self.std is not None

    def matrix_(self, matrix: Tensor) -> None:
        """Initialize the matrix of a linear map or a convolution."""
        (self.table_ if self.is_set else init.xavier_uniform_)(matrix)

    def table_(self, table: Tensor, std: float | None = None) -> None:
        """Initialize a lookup table; `std`, by default that of embeddings, applies if the model sets none."""
        if self.uniform is not None:
            init.uniform_(table, -self.uniform, self.uniform)
        else:
            std = self.d_model**-0.5 if std is None else std  # the model scales embeddings by `sqrt(d_model)`
            init.normal_(table, mean=0.0, std=std if self.std is None else self.std)

    def recurrent_(self, module: Any) -> None:
        """Initialize a layer of torch's names: orthogonal recurrent gates, zero biases (forget gate of an LSTM: 1)."""
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1 and self.is_set:
                self.matrix_(parameter)
            elif "weight_hh" in name:
                if not is_loaded(parameter):
                    for gate in parameter.split(parameter.shape[1]):
                        init.orthogonal_(gate)
            elif "weight_ih" in name:
                init.xavier_uniform_(parameter)
            else:
                init.zeros_(parameter)
                # torch adds both biases: one of them carries the whole forget bias.
                is_lstm = parameter.shape[0] == 4 * module.hidden_size
                if self.uniform is None and is_lstm and "bias_ih" in name and not is_loaded(parameter):
                    init.ones_(parameter.chunk(4)[1])


@dataclass
class WarmStartReport:
    """Parameters copied from a baseline, fresh parameters of the model, and unused ones of the baseline."""

    copied: list[str]
    fresh: list[str]
    unused: list[str]

    def __str__(self) -> str:
        fresh = f" ({', '.join(self.fresh)})" if self.fresh else ""
        unused = f", did not use {len(self.unused)} ({', '.join(self.unused)})" if self.unused else ""
        return f"copied {len(self.copied)} parameters, left {len(self.fresh)} fresh{fresh}{unused}"


class Seq2SeqPreTrainedModel(PreTrainedModel):
    """Base class of all models: initialization, tied weights, loading and saving."""

    config: Seq2SeqConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: list[str] = []
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    further_inputs: tuple[str, ...] = ()  # inputs with token ids other than `input_ids`

    @classmethod
    def register_code(cls, auto_class: str) -> None:
        """Let the code of a class be saved with it if it is in the file of its family."""
        if cls.__module__.endswith(f".modeling_{cls.config_class.model_type}"):  # type: ignore[union-attr]
            cls.register_for_auto_class(auto_class)

    @property
    def initialization(self) -> Initialization:
        """Return the distributions of initial parameters."""
        return Initialization(self.config.d_model, self.config.init_std)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        start = self.initialization
        if hasattr(module, "initialize"):
            module.initialize(start)  # type: ignore[operator]
        elif isinstance(module, nn.Embedding):
            start.table_(module.weight)
            if module.padding_idx is not None and not is_loaded(module.weight):
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, (nn.Linear, nn.Conv1d)):
            start.matrix_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.RNNCellBase):
            start.recurrent_(module)
        else:
            super()._init_weights(module)

    def post_init(self) -> None:
        super().post_init()
        # Sharding (FSDP) requires a module of every class named here, and variants lack some.
        present = {type(module).__name__ for module in self.modules()}
        self._no_split_modules = sorted(present & {*(type(self)._no_split_modules or ()), *self._no_split_modules})

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        return dict.fromkeys(("input_ids", *self.further_inputs), super().dummy_inputs["input_ids"])

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        # Each class declares the ties of its config, so source and target can share a matrix while the output has its
        # own; transformers' reading of `tie_word_embeddings=False` would untie both.
        own = dict(self._tied_weights_keys or {})
        return super().get_expanded_tied_weights_keys(all_submodels=True) if all_submodels else own

    def tied_names(self) -> list[str]:
        """Return and record the parameters still tied; `UserError` if an adapter changed one of shared embeddings."""
        own = dict(self.named_parameters(remove_duplicate=False))
        names = []
        for target, source in (self._tied_weights_keys or {}).items():
            if target not in own or source not in own:
                continue
            if own[target] is own[source] or own[target].data_ptr() == own[source].data_ptr() != 0:
                names.append(target)
                self.config.tie_word_embeddings |= target == "lm_head.weight"  # merging an adapter may set False
            elif target.endswith("embed_tokens.weight"):
                remedy = "Do not adapt embeddings, or set share_encoder_decoder_embeddings=False."
                raise UserError(f"{target} differs from {source}. {remedy}", field=target)
        return names

    def mark_tied_weights_as_initialized(self, loading_info: Any, *args: Any, **kwargs: Any) -> None:
        # transformers takes a tied matrix as loaded by any of its names: one that the checkpoint lacks, or has only as
        # another module's parameter (the output layer's), would be left without values, unreported.
        missing = set(loading_info.missing_keys)
        super().mark_tied_weights_as_initialized(loading_info, *args, **kwargs)
        for source in missing & set(self.all_tied_weights_keys.values()):
            own = self.get_parameter(source)
            tied = {target for target, tied_to in self.all_tied_weights_keys.items() if tied_to == source}
            if not any(self.get_parameter(name) is own for name in tied - missing):
                loading_info.missing_keys = {*loading_info.missing_keys, source}

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resize the source embedding, and with a shared vocabulary the target side too."""
        if self.config.share_encoder_decoder_embeddings:
            embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
            self.set_target_size(embeddings.num_embeddings)
            return embeddings
        # With separate vocabularies transformers would resize the output matrix with the source.
        own: Any = self.get_input_embeddings()
        embeddings = self._get_resized_embeddings(own, new_num_tokens, pad_to_multiple_of, mean_resizing)
        self.set_input_embeddings(embeddings)
        self.config.vocab_size = embeddings.num_embeddings
        return embeddings

    def set_target_size(self, size: int) -> None:
        """Set the size of the target vocabulary after resizing."""
        self.config.decoder_vocab_size = size

    def save_pretrained(  # type: ignore[override]  # other arguments of transformers are passed on
        self, save_directory: str | Path, is_main_process: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """
        Save as transformers does, with a card, and with the code of the class or of its base with the same `model_type`
        if `register_for_auto_class` was called on it.
        """
        original, ignored = type(self), self._keys_to_ignore_on_save
        own = next(base for base in original.__mro__ if not base.__module__.startswith("torch."))  # not that of FSDP
        coded = registered_class(own)
        if coded is not None and coded.config_class.model_type != self.config.model_type:
            coded = None
        self.name_code(coded)
        folder = Path(save_directory)
        try:
            self.__class__ = own if coded is own else reset_registration(own)
            self._keys_to_ignore_on_save = self.tied_names() or None
            if coded not in (None, own) and is_main_process and not folder.is_file():
                folder.mkdir(parents=True, exist_ok=True)
                custom_object_save(coded, folder)
            super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
            if is_main_process and folder.is_dir() and not (folder / "adapter_config.json").exists():
                self.write_card(self.config, folder)
        finally:
            self.__class__, self._keys_to_ignore_on_save = original, ignored

    def name_code(self, coded: type[Any] | None) -> None:
        """Replace the base classes in the configuration's `auto_map` by `coded` and the class in the same file."""
        modules = {base.__module__.rpartition(".")[2] for base in (*type(self).__mro__, *type(self.config).__mro__)}
        previous = getattr(self.config, "auto_map", None) or {}
        names = {
            auto_class: name
            for auto_class, name in previous.items()
            if not (isinstance(name, str) and name.rpartition("--")[2].partition(".")[0] in modules)
        }
        if coded is not None and coded.__module__ != "__main__":
            defined = vars(sys.modules[coded.__module__])
            names |= {auto: name for auto, name in coded.auto_map().items() if name.partition(".")[2] in defined}
        if names or previous:
            self.config.auto_map = names

    @classmethod
    def auto_map(cls) -> dict[str, str]:
        """Return the Auto classes of this family, e.g. `{"AutoModel": "modeling_x.XModel"}`."""
        name = cls.__name__.removesuffix("ForConditionalGeneration").removesuffix("Model")
        prefix = f"{cls.__module__.rsplit('.', 1)[-1]}.{name}"
        return {"AutoModel": f"{prefix}Model", "AutoModelForSeq2SeqLM": f"{prefix}ForConditionalGeneration"}

    @staticmethod
    def write_card(config: Any, folder: str | Path, name: str = "") -> None:
        """Write the card of a saved folder. `import recnmt_hf` replaces this; code from the Hub writes no card."""

    def _upload_modified_files(  # type: ignore[override]  # as above
        self, working_dir: str | Path, repo_id: str, *args: Any, **kwargs: Any
    ) -> Any:
        # Pushing puts the repository's own card, or transformers' default, over the saved one.
        self.write_card(self.config, working_dir, str(repo_id))
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    def init_from_baseline(self, baseline: str | Path | PreTrainedModel) -> WarmStartReport:
        """
        Copy every parameter of a trained baseline whose name and shape match (two-stage training of Hao et al., 2019,
        and Weng et al., 2020).

        Args:
            baseline (`str`, `Path` or `PreTrainedModel`): A model, a saved folder or a model id (safetensors only).
        """
        source = baseline.state_dict() if isinstance(baseline, PreTrainedModel) else read_safetensors(baseline)
        for name, origin in TIED:  # files contain tied parameters once
            if origin in source:
                source.setdefault(name, source[origin])
        saved = self.state_dict()
        own = {name: item for name, item in (*self.named_parameters(), *self.named_buffers()) if name in saved}
        copied = [name for name, tensor in own.items() if name in source and source[name].shape == tensor.shape]
        if not copied:
            place = type(baseline).__name__ if isinstance(baseline, PreTrainedModel) else str(baseline)
            raise UserError(f"{type(self).__name__} and {place} have no parameter in common.", field=place)
        with torch.no_grad():
            for name in copied:
                own[name].copy_(source[name])
        used = {*copied, *(saved.keys() - own.keys())}  # with further names of tied parameters
        used |= {origin for name, origin in TIED if name in used}
        fresh, unused = ([name for name in names if name not in used] for names in (own, source))
        report = WarmStartReport(copied, fresh, unused)
        logger.info(f"Warm start from {baseline}: {report}.")
        return report


def read_safetensors(folder: str | Path) -> dict[str, Tensor]:
    """Read all tensors of a local folder's or a Hub model's safetensors files."""
    if not Path(folder).is_dir():
        folder = snapshot_download(str(folder), allow_patterns="*.safetensors")
    files = sorted(Path(folder).glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
