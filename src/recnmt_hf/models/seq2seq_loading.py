"""How a model's parameters get their values, and how a model is saved: initialisation, ties, warm start, card."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import logging

from .configuration_seq2seq import Seq2SeqConfig, registered_class, without_code
from .user_errors import UserError


def is_loaded(parameter: torch.Tensor) -> bool:
    """
    Return whether a parameter has its values from a checkpoint; `transformers.initialization` checks the same mark.
    """
    return getattr(parameter, "_is_hf_initialized", False)


@dataclass(frozen=True)
class Initialization:
    """
    Distributions of a model's initial parameters: Xavier-uniform matrices and embeddings of deviation `d_model **
    -0.5`; with `std` a normal distribution for both, with `uniform` a uniform one in `[-uniform, uniform]`.
    """

    d_model: int
    std: float | None = None
    uniform: float | None = None

    def matrix_(self, matrix: torch.Tensor) -> None:
        """Initialise the matrix of a linear map or a convolution."""
        if self.uniform is not None:
            init.uniform_(matrix, -self.uniform, self.uniform)
        elif self.std is not None:
            init.normal_(matrix, mean=0.0, std=self.std)
        else:
            init.xavier_uniform_(matrix)

    def table_(self, table: torch.Tensor, std: float) -> None:
        """Initialise a lookup table; `std` is used where the model sets no deviation."""
        if self.uniform is not None:
            init.uniform_(table, -self.uniform, self.uniform)
        else:
            init.normal_(table, mean=0.0, std=self.std if self.std is not None else std)

    def embedding_(self, table: torch.Tensor) -> None:
        """Initialise an embedding, which the model scales by `sqrt(d_model)`."""
        self.table_(table, self.d_model**-0.5)

    def recurrent_(self, module: Any) -> None:
        """
        Initialise a recurrent layer with torch's names: Xavier-uniform input matrices, orthogonal recurrent matrices
        for each gate, zero biases (forget gate of an LSTM: 1).
        """
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1 and self.uniform is not None:
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


logger = logging.get_logger(__name__)


@dataclass
class WarmStartReport:
    """Parameters copied from a baseline, fresh parameters of the model, and unused ones of the baseline."""

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
    """Base class of all models: initialisation, tied weights, loading and saving."""

    config: Seq2SeqConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: list[str] = []
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True

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
            start.embedding_(module.weight)
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

    def save_pretrained(  # type: ignore[override]  # whatever else transformers takes is passed on
        self, save_directory: str | Path, is_main_process: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """
        Save as transformers does, with a card. The code of the class, or of the model with the same `model_type` that
        it derives from, is saved if `register_for_auto_class` was called on it.
        """
        given, ignored = type(self), self._keys_to_ignore_on_save
        own = next(base for base in given.__mro__ if not base.__module__.startswith("torch."))  # not that of FSDP
        coded = registered_class(own)
        if coded is not own and coded is not None and coded.config_class.model_type != self.config.model_type:
            coded = None
        self.name_code(coded)
        folder = Path(save_directory)
        try:
            self.__class__ = own if coded is own else without_code(own)
            self._keys_to_ignore_on_save = self.still_tied() or None
            if coded is not None and coded is not own and is_main_process and not folder.is_file():
                folder.mkdir(parents=True, exist_ok=True)
                custom_object_save(coded, folder)
            super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
            if is_main_process and folder.is_dir() and not (folder / "adapter_config.json").exists():
                write_plain_card(self.config, folder)
        finally:
            self.__class__, self._keys_to_ignore_on_save = given, ignored

    def name_code(self, coded: type[Any] | None) -> None:
        """Put `coded` and the class beside it into the configuration's `auto_map`, in place of the base classes."""
        bases = (*type(self).__mro__, *type(self.config).__mro__)
        modules = {base.__module__.rpartition(".")[2] for base in bases}
        named = getattr(self.config, "auto_map", None) or {}
        kept = {
            auto_class: name
            for auto_class, name in named.items()
            if not (isinstance(name, str) and name.rpartition("--")[2].partition(".")[0] in modules)
        }
        if coded is not None and coded.__module__ != "__main__":
            there = vars(sys.modules[coded.__module__])
            kept |= {auto: name for auto, name in coded.auto_map().items() if name.partition(".")[2] in there}
        if kept or named:
            self.config.auto_map = kept

    def _upload_modified_files(  # type: ignore[override]  # as above
        self, working_dir: str | Path, repo_id: str, *args: Any, **kwargs: Any
    ) -> Any:
        # Pushing writes the repository's card over the saved one: its own where it has one, else one whose code does
        # not run.
        write_plain_card(self.config, working_dir, str(repo_id))
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    def still_tied(self) -> list[str]:
        """
        Return the names of parameters that are tied in fact: merged adapters may have changed one. Raises `UserError`
        where source and target embeddings differ that the configuration declares to be one.
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
        """Return the Auto classes of this family, e.g. `{"AutoModel": "modeling_x.XModel"}`."""
        module = cls.__module__.rsplit(".", 1)[-1]
        prefix = cls.__name__.removesuffix("ForConditionalGeneration").removesuffix("Model")
        return {
            "AutoModel": f"{module}.{prefix}Model",
            "AutoModelForSeq2SeqLM": f"{module}.{prefix}ForConditionalGeneration",
        }

    def mark_tied_weights_as_initialized(self, loading_info: Any, *args: Any, **kwargs: Any) -> None:
        # transformers marks a tied matrix by any of its names, and takes what is marked for loaded where the class is
        # not its own: a matrix that the checkpoint does not hold, or only under the name of another module's parameter
        # (the output layer's), would be left without values, unreported.
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
            self.config.decoder_vocab_size = embeddings.num_embeddings
            return embeddings
        # Of separate vocabularies transformers would resize the output matrix with the source.
        own: Any = self.get_input_embeddings()
        embeddings = self._get_resized_embeddings(own, new_num_tokens, pad_to_multiple_of, mean_resizing)
        self.set_input_embeddings(embeddings)
        self.config.vocab_size = embeddings.num_embeddings
        return embeddings

    def init_from_baseline(self, baseline: str | Path | PreTrainedModel) -> WarmStartReport:
        """
        Copy every parameter of a trained baseline whose name and shape match (two-stage training of Hao et al., 2019,
        and Weng et al., 2020).

        Args:
            baseline (`str`, `Path` or `PreTrainedModel`): A model, a saved folder or a model id of the Hub (safetensors
                only).

        Raises:
            UserError: No parameter matches.
        """
        source = baseline.state_dict() if isinstance(baseline, PreTrainedModel) else read_safetensors(baseline)
        own: dict[str, torch.Tensor] = dict(self.named_parameters())
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
    """Read all tensors of a local folder's or a Hub model's safetensors files."""
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
        files = [Path(str(cached_file(str(folder), "model.safetensors")))]
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors.update(load_file(file))
    return tensors


CARD = "README.md"
# Stands in the card that transformers gives to a repository without one; its code calls pipelines that are gone.
TEMPLATE_OF_TRANSFORMERS = "model card of a 🤗 transformers model that has been pushed on the Hub"


def usage(name: str, is_joint: bool, sentence: str) -> str:
    """
    Return code that translates a sentence with transformers alone. With `is_joint` one tokenizer serves both sides,
    else the target's is in a subfolder.
    """
    also = "" if is_joint else ", PreTrainedConfig"
    # Without a configuration it would be looked for in the subfolder.
    given = 'subfolder="target_tokenizer", config=PreTrainedConfig()'
    target = f"target_tokenizer = AutoTokenizer.from_pretrained(name, {given})"
    return "\n".join(
        [
            f"from transformers import AutoModelForSeq2SeqLM, AutoTokenizer{also}",
            "",
            f"name = {json.dumps(name, ensure_ascii=False)}",
            "# The model's own code runs; where recnmt_hf is imported, it is taken from there.",
            "model = AutoModelForSeq2SeqLM.from_pretrained(name, trust_remote_code=True)",
            "tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)",
            *([] if is_joint else [target]),
            f'batch = tokenizer([{json.dumps(sentence, ensure_ascii=False)}], return_tensors="pt")',
            "tokens = model.generate(**batch)",
            f"print({'' if is_joint else 'target_'}tokenizer.batch_decode(tokens, skip_special_tokens=True)[0])",
        ]
    )


def plain_card(config: Any, name: str) -> str:
    """Return the card of a model of which only the configuration is known."""
    kind = getattr(config, "model_type", "")
    architecture = next(iter(getattr(config, "architectures", None) or []), kind)
    code = usage(name, bool(getattr(config, "share_encoder_decoder_embeddings", True)), "...")
    if not getattr(config, "auto_map", None):
        code = f"# First import the module that registers {kind}: its code is not part of this folder.\n{code}"
    return f"""---
library_name: transformers
pipeline_tag: translation
tags: [translation, recnmt_hf, {kind}]
---

# {architecture}

An encoder-decoder of the type `{kind}`, made with [recnmt_hf](https://github.com/recnmt-hf/recnmt_hf). Its training
data and the quality of its translations are not documented yet.

```python
{code}
```
"""


def write_plain_card(config: Any, folder: str | Path, name: str = "PLACE/OF-THIS-MODEL") -> None:
    """Write [`plain_card`] into a folder that has no card, or only the default one of transformers."""
    path = Path(folder) / CARD
    if path.is_file() and TEMPLATE_OF_TRANSFORMERS not in path.read_text(encoding="utf-8"):
        return
    path.write_text(plain_card(config, name), encoding="utf-8")
