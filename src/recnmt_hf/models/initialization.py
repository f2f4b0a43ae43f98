"""
How parameters start. A module with parameters that torch does not know says so itself, in a method `initialize`, which
gets the [`Initialization`] of its model.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import initialization as init


def is_loaded(parameter: torch.Tensor) -> bool:
    """Whether a parameter has its values from a checkpoint; functions of `transformers.initialization` ask it too."""
    return getattr(parameter, "_is_hf_initialized", False)


@dataclass(frozen=True)
class Initialization:
    """
    The distributions that a model's parameters start from.

    Args:
        d_model (`int`): Width of the model.
        std (`float`, *optional*): Standard deviation of all matrices. `None`: Xavier-uniform matrices, embeddings of
            deviation `d_model ** -0.5`.
        uniform (`float`, *optional*): All matrices and embeddings are uniform in `[-uniform, uniform]` instead.
    """

    d_model: int
    std: float | None = None
    uniform: float | None = None

    def matrix_(self, matrix: torch.Tensor) -> None:
        """Of a linear map or a convolution."""
        if self.uniform is not None:
            init.uniform_(matrix, -self.uniform, self.uniform)
        elif self.std is not None:
            init.normal_(matrix, mean=0.0, std=self.std)
        else:
            init.xavier_uniform_(matrix)

    def table_(self, table: torch.Tensor, std: float) -> None:
        """Rows that are looked up; `std` where the model names no deviation."""
        if self.uniform is not None:
            init.uniform_(table, -self.uniform, self.uniform)
        else:
            init.normal_(table, mean=0.0, std=self.std if self.std is not None else std)

    def embedding_(self, table: torch.Tensor) -> None:
        """Rows of width `d_model`, which the model scales by `sqrt(d_model)`: channels have about unit variance."""
        self.table_(table, self.d_model**-0.5)

    def recurrent_(self, module: Any) -> None:
        """
        A recurrent cell or layer with torch's parameter names: Xavier-uniform input matrices, orthogonal recurrent
        matrices gate by gate, zero biases (forget gate of an LSTM: 1).
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
