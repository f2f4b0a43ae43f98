"""
Linear recurrences since 2024 as layers of encoder and decoder, with the parameters of a self-attention: minGRU, mLSTM,
Mamba-2 and gated DeltaNet. All but the first write outer products of keys and values into a matrix for each head. In an
encoder each direction has half of the width. Padding, 0 in a mask, changes no state; states are in at least float32.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache, StaticLayer

from .configuration_nmt_transformer import NMTTransformerConfig
from .decoder_cache import MEMORY, RecurrentStates, recurrent_layer
from .kernels_cpu_matmuls import project
from .kernels_linear_attention import MOST_WORDS, linear_attention, read_words
from .kernels_shared import Mask, allowed, enabled, is_exporting, on_cpu, scan_steps, wide_type, with_autocast
from .light_decoders import linear_scan
from .recurrent_layers import inverse, left_aligned, take
from .seq2seq_loading import Initialization, is_loaded


# The input of padding to the exponential gate of mLSTM, below all others; its value is 0.
CLOSED = -80.0


class Gates(nn.Module):
    """Marks what a recurrence keeps (or the logarithm) and writes at each word, for hooks on this module."""

    def forward(self, kept: Tensor | None, log_kept: Tensor | None, written: Tensor) -> None:
        """The tensors have the shape `(batch_size, length, heads or channels)`."""


class LinearRecurrence(nn.Module):
    """
    Base class: one matrix maps words to the parts `sizes`, `mix` combines them with the states, another matrix maps the
    result back. `layer_idx` is the layer's place in the cache, `None` in an encoder.
    """

    def __init__(self, config: NMTTransformerConfig, layer_idx: int | None, sizes: dict[str, int], inner: int):
        super().__init__()
        self.layer_idx, self.sizes = layer_idx, sizes
        self.in_proj = nn.Linear(config.d_model, sum(sizes.values()), bias=False)
        self.out_proj = nn.Linear(inner, config.d_model)
        self.gates = Gates()

    def initialize(self, start: Initialization) -> None:
        if not is_loaded(self.in_proj.weight):  # its views do not have this mark
            for matrix in self.in_proj.weight.split(list(self.sizes.values())):
                start.matrix_(matrix)

    def forward(
        self, hidden_states: Tensor, attention_mask: Mask = None, cache: Cache | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Run over new words `(batch_size, length, d_model)` with their token mask `(batch_size, length)`."""
        real = None if attention_mask is None else attention_mask != 0
        mapped = project(self.in_proj, hidden_states)
        mapped = mapped.to(wide_type(mapped.dtype))
        parts = dict(zip(self.sizes, mapped.split(list(self.sizes.values()), dim=-1), strict=True))
        layer = None if self.layer_idx is None else recurrent_layer(cache, self.layer_idx)
        with with_autocast(mapped.device, None):
            mixed = self.mix(parts, real, layer)
        return project(self.out_proj, mixed.to(hidden_states.dtype)), None

    def mix(self, parts: dict[str, Tensor], real: Mask, layer: RecurrentStates | None) -> Tensor:
        """Return the result `(batch_size, length, inner)` of parts and their token mask, from a layer's states."""
        raise NotImplementedError


def masked(tensor: Tensor, real: Mask, value: float = 0.0) -> Tensor:
    """Fill a tensor `(batch_size, length, ...)` at padding."""
    return tensor if real is None else tensor.masked_fill(~real[(..., *[None] * (tensor.dim() - 2))], value)


def get_state(layer: RecurrentStates | None, name: str) -> Tensor | None:
    """Return a state of a layer of the cache, if there is one."""
    return None if layer is None else layer.get_state(name)


class MinGRU(LinearRecurrence):
    """
    minGRU (Feng et al., 2024, "Were RNNs All We Needed?", section 3.1), with biases and a matrix above the states:

        z_t = sigmoid(W_z x_t + b_z),   c_t = W_h x_t + b_h,   h_t = (1 - z_t) h_{t-1} + z_t c_t
    """

    def __init__(self, config: NMTTransformerConfig, layer_idx: int | None):
        width = config.d_model if layer_idx is not None else config.d_model // 2
        inner = max(8, 8 * round(width / 6))  # 4/3 of the width: three matrices for four
        super().__init__(config, layer_idx, {"gate": inner, "candidate": inner}, inner)
        self.bias = nn.Parameter(torch.zeros(2 * inner))

    def initialize(self, start: Initialization) -> None:
        super().initialize(start)
        init.zeros_(self.bias)

    def mix(self, parts: dict[str, Tensor], real: Mask, layer: RecurrentStates | None) -> Tensor:
        of_gate, of_candidate = self.bias.to(parts["gate"].dtype).chunk(2)
        gate = masked(torch.sigmoid(parts["gate"] + of_gate), real)
        first = get_state(layer, "mingru_state")
        kept, values = 1 - gate, gate * (parts["candidate"] + of_candidate)
        self.gates(kept, None, gate)
        states = linear_scan(kept, values, torch.zeros_like(gate[:, 0]) if first is None else first)[0]
        if layer is not None:
            layer.update_states(mingru_state=states)
        return states


class ShortConvolution(nn.Module):
    """A causal convolution of each channel over `kernel_size` real words, then SiLU."""

    def __init__(self, channels: int, kernel_size: int = 4, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, kernel_size))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def initialize(self, start: Initialization) -> None:
        bound = self.weight.shape[1] ** -0.5
        init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            init.zeros_(self.bias)

    def forward(self, inputs: Tensor, real: Mask, window: Tensor | None, with_all: bool) -> tuple[Tensor, Tensor]:
        """
        Map new words `(batch_size, length, channels)` after a window of earlier ones `(batch_size, kernel_size - 1,
        channels)`. Return the results and the windows after each word, or after the last one.
        """
        length, before = inputs.shape[1], self.weight.shape[1] - 1
        order = None if real is None or length == 1 else left_aligned(real)  # real words side by side, then padding
        inputs = inputs if order is None else take(inputs, order)
        first = inputs.new_zeros(inputs.shape[0], before, inputs.shape[2]) if window is None else window
        words, weight = torch.cat([first, inputs], dim=1), self.weight.to(inputs.dtype)
        bias = None if self.bias is None else self.bias.to(inputs.dtype)
        if length == 1:  # faster than oneDNN
            factors, convolved = weight.t().contiguous(), torch.zeros_like(weight[:, 0]) if bias is None else bias
            for t in range(before + 1):
                convolved = torch.addcmul(convolved, words[:, t : t + 1], factors[t])
        else:
            # In this layout oneDNN's convolution of two dimensions is the fastest.
            columns = words.transpose(1, 2)[:, :, None]
            convolved = nn.functional.conv2d(columns, weight[:, None, None], bias, groups=weight.shape[0])
            convolved = convolved[:, :, 0].transpose(1, 2)
        outputs = nn.functional.silu(convolved if order is None else take(convolved, inverse(order)))
        if real is None and not with_all:
            return outputs, words[:, None, length:]
        counts = torch.ones_like(inputs[:, :, 0], dtype=torch.long) if real is None else real
        counts = counts.cumsum(dim=1)[:, slice(None) if with_all else slice(-1, None)]
        places = counts[:, :, None] + torch.arange(before, device=counts.device)
        return outputs, take(words, places.flatten(1)).unflatten(1, (-1, before))


def head_norm(states: Tensor, weight: Tensor, eps: float = 1e-6, centered: bool = False) -> Tensor:
    """Divide `(.., channels)` by the root of the mean square, after subtracting the mean if `centered`."""
    states = states - states.mean(dim=-1, keepdim=True) if centered else states
    return states * torch.rsqrt(states.square().mean(dim=-1, keepdim=True) + eps) * weight.to(states.dtype)


class MatrixMemory(LinearRecurrence):
    """Base class of layers with a matrix of `key_dim` x `value_dim` for each of `heads` heads."""

    def __init__(
        self, config: NMTTransformerConfig, layer_idx: int | None, sizes: dict[str, int], heads: int, inner: int
    ):
        super().__init__(config, layer_idx, sizes, inner)
        self.heads = heads
        self.norm = nn.Parameter(torch.empty(inner))  # scales the normed result

    def initialize(self, start: Initialization) -> None:
        super().initialize(start)
        init.ones_(self.norm)

    def split_heads(self, states: Tensor, heads: int | None = None) -> Tensor:
        return states.unflatten(-1, (self.heads if heads is None else heads, -1))

    def read(
        self,
        inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
        layer: RecurrentStates | None,
        **states: Tensor,
    ) -> Tensor:
        """Return the outputs of the linear attention; store other states and the memory, or words for it."""
        if layer is None:
            return linear_attention(*inputs, None)[0]
        layer.update_states(**states)
        # Only stored words can be taken back. On CPUs, to read some of them is faster than to rewrite the memory.
        is_fast = inputs[0].shape[1] == 1 and enabled() and on_cpu(inputs[0]) and not isinstance(layer, StaticLayer)
        if not (layer.recording or is_fast):
            layer.fold_words()
            outputs, memory = linear_attention(*inputs, layer.get_state(MEMORY))
            layer.store_state(MEMORY, memory)
            return outputs
        if not layer.recording:
            layer.fold_words(at_least=MOST_WORDS)
        outputs, layer.words = read_words(*inputs, layer.get_state(MEMORY), layer.words)
        return outputs


def sizes_of(config: NMTTransformerConfig, layer_idx: int | None) -> tuple[int, int]:
    """Return heads and width of a layer: in an encoder each direction has half of both."""
    if layer_idx is not None:
        return config.decoder_attention_heads, config.d_model
    return config.encoder_attention_heads // 2, config.d_model // 2


class MLSTM(MatrixMemory):
    """
    mLSTM (Beck et al., 2024, "xLSTM: Extended Long Short-Term Memory", Eqs. 19-27), in each head:

        m_t = max(log f_t + m_{t-1}, i_t),   i'_t = exp(i_t - m_t),   f'_t = exp(log f_t + m_{t-1} - m_t)
        C_t = f'_t C_{t-1} + i'_t v_t k_t^T,   n_t = f'_t n_{t-1} + i'_t k_t
        h_t = sigmoid(o_t) * LN(C_t q_t / max(|n_t . q_t|, exp(-m_t)))

    with f = sigmoid(f~), keys scaled by 1 / sqrt(key_dim), keys and queries of half the width and a layer norm in each
    head (as in xLSTM 7B). n is a column of C, whose value is 1. Forget gates start at 3 to 6.
    """

    def __init__(self, config: NMTTransformerConfig, layer_idx: int | None):
        heads, inner = sizes_of(config, layer_idx)
        sizes = {"query": inner // 2, "key": inner // 2, "value": inner, "out": inner, "write": heads, "forget": heads}
        super().__init__(config, layer_idx, sizes, heads, inner)
        self.write_bias, self.forget_bias = nn.Parameter(torch.empty(heads)), nn.Parameter(torch.empty(heads))

    def initialize(self, start: Initialization) -> None:
        super().initialize(start)
        init.constant_(self.write_bias, 0.0)
        init.copy_(self.forget_bias, torch.linspace(3.0, 6.0, self.heads))

    def mix(self, parts: dict[str, Tensor], real: Mask, layer: RecurrentStates | None) -> Tensor:
        dtype = parts["write"].dtype
        write = masked(parts["write"] + self.write_bias.to(dtype), real, CLOSED)
        forget = masked(nn.functional.logsigmoid(parts["forget"] + self.forget_bias.to(dtype)), real)
        earlier = get_state(layer, "mlstm_stabilizer")
        # h does not depend on m, so it needs no gradient.
        stabilizer = stabilizers(forget.detach(), write.detach(), earlier)
        before = torch.cat([stabilizer[:, :1] if earlier is None else earlier[:, None], stabilizer[:, :-1]], dim=1)
        query, key, value = (self.split_heads(parts[name]) for name in ("query", "key", "value"))
        decay, gain = forget + before - stabilizer, (write - stabilizer).exp()
        self.gates(None, forget, gain)
        value = torch.cat([value, torch.ones_like(value[..., :1])], dim=-1) * gain[..., None]
        key = key * key.shape[-1] ** -0.5
        inputs = (query, key, masked(value, real), decay, None)
        outputs = self.read(inputs, layer, mlstm_stabilizer=stabilizer)
        values, normalizer = outputs[..., :-1], outputs[..., -1:]
        states = values / torch.maximum(normalizer.abs(), (-stabilizer)[..., None].exp())
        states = head_norm(states, self.split_heads(self.norm), centered=True).flatten(2)
        return torch.sigmoid(parts["out"]) * states


def stabilizers(forget: Tensor, write: Tensor, earlier: Tensor | None) -> Tensor:
    """Return m_t of all words from log f and i `(batch_size, length, heads)` and the one before, if there are any."""
    if is_exporting() or not allowed() or write.shape[1] == 1:
        first = torch.full_like(write[:, 0], -torch.inf) if earlier is None else earlier

        def step(carry: Any, forget: Tensor, write: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            highest = torch.maximum(forget + carry[0], write)
            return [highest], [highest]

        return scan_steps(step, [first], forget.transpose(0, 1), write.transpose(0, 1))[0].transpose(0, 1)
    total = forget.cumsum(dim=1)
    highest = (write - total).cummax(dim=1).values
    return total + (highest if earlier is None else torch.maximum(highest, earlier[:, None]))


class StepSizes(nn.Module):
    """
    Decays of Mamba (Gu and Dao, 2023): log a = -exp(A) dt with dt = softplus(x + b), for each head. At the start exp(A)
    is 1 to 16, and dt 0.001 to 0.1 for x = 0, spread evenly over the heads (the original draws them).
    """

    def __init__(self, heads: int):
        super().__init__()
        self.rate_log, self.bias = nn.Parameter(torch.empty(heads)), nn.Parameter(torch.empty(heads))

    def initialize(self, start: Initialization) -> None:
        heads = self.bias.shape[0]
        init.copy_(self.rate_log, torch.linspace(1.0, 16.0, heads).log())
        steps = torch.logspace(-3.0, -1.0, heads).flip(0)  # the slowest decays for the smallest rates
        init.copy_(self.bias, steps + torch.log(-torch.expm1(-steps)))

    def forward(self, inputs: Tensor, real: Mask) -> tuple[Tensor, Tensor]:
        """Return dt and log a of inputs `(batch_size, length, heads)`, zeros at padding."""
        steps = masked(nn.functional.softplus(inputs + self.bias.to(inputs.dtype)), real)
        return steps, -self.rate_log.to(inputs.dtype).exp() * steps


class ConvolvedMemory(MatrixMemory):
    """Base class of layers with a short convolution over the part `words`, which is split into `convolved` after it."""

    def __init__(self, *args: Any, convolved: list[int], has_bias: bool = False):
        super().__init__(*args)
        self.steps = StepSizes(self.heads)
        self.convolved = convolved
        self.conv = ShortConvolution(sum(convolved), bias=has_bias)

    def convolve(
        self, words: Tensor, real: Mask, layer: RecurrentStates | None
    ) -> tuple[Sequence[Tensor], dict[str, Tensor]]:
        """Return the convolved parts and the state to store."""
        with_all = layer is not None and layer.recording
        outputs, windows = self.conv(words, real, get_state(layer, "convolution_window"), with_all)
        if not with_all:  # as many steps as words
            windows = windows[:, -1:].expand(-1, words.shape[1], -1, -1)
        return outputs.split(self.convolved, dim=-1), {"convolution_window": windows}


class Mamba2(ConvolvedMemory):
    """
    Mamba-2 (Dao and Gu, 2024, "Transformers are SSMs", section 7) with one group of B and C, in each head:

        h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t^T,   y_t = C_t^T h_t + D x_t,   output: RMSNorm(y * SiLU(z))

    x, B and C pass through a short convolution. The width is 5/4 of `d_model` and the state `d_model / 8`, for the
    parameters of a self-attention (the paper: 2 `d_model`, 64 to 256).
    """

    def __init__(self, config: NMTTransformerConfig, layer_idx: int | None):
        heads, width = sizes_of(config, layer_idx)
        inner, state = width * 5 // 4, max(width // 8, 1)
        convolved = [inner, state, state]  # x, B, C
        sizes = {"gate": inner, "words": sum(convolved), "step": heads}
        super().__init__(config, layer_idx, sizes, heads, inner, convolved=convolved, has_bias=True)
        self.skip = nn.Parameter(torch.ones(heads))

    def initialize(self, start: Initialization) -> None:
        super().initialize(start)
        init.ones_(self.skip)

    def mix(self, parts: dict[str, Tensor], real: Mask, layer: RecurrentStates | None) -> Tensor:
        (inputs, write, read), states = self.convolve(parts["words"], real, layer)
        steps, decay = self.steps(parts["step"], real)
        self.gates(None, decay, steps)
        inputs = self.split_heads(inputs)
        query, key = self.split_heads(read, 1), self.split_heads(write, 1)
        outputs = self.read((query, key, inputs * steps[..., None], decay, None), layer, **states)
        outputs = (outputs + self.skip.to(inputs.dtype)[:, None] * inputs).flatten(2)
        return head_norm(outputs * nn.functional.silu(parts["gate"]), self.norm)


class GatedDeltaNet(ConvolvedMemory):
    """
    Gated DeltaNet (Yang et al., 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule", Eq. 10), in each head:

        S_t = a_t S_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T,   o_t = S_t q_t,   output: RMSNorm(o) * SiLU(g)

    b = sigmoid(W_b x). q, k and v pass through short convolutions; q and k have length 1, q is then scaled by
    1 / sqrt(key_dim). Keys have half the width of values, whose width is `d_model` (the paper: 3/4 and 3/2).
    """

    def __init__(self, config: NMTTransformerConfig, layer_idx: int | None):
        heads, inner = sizes_of(config, layer_idx)
        convolved = [inner // 2, inner // 2, inner]  # q, k, v
        sizes = {"words": sum(convolved), "out": inner, "step": heads, "rate": heads}
        super().__init__(config, layer_idx, sizes, heads, inner, convolved=convolved)
        self.norm = nn.Parameter(torch.empty(inner // heads))  # alike in all heads

    def mix(self, parts: dict[str, Tensor], real: Mask, layer: RecurrentStates | None) -> Tensor:
        convolved, states = self.convolve(parts["words"], real, layer)
        query, key, value = map(self.split_heads, convolved)
        query, key = unit(query, query.shape[-1] ** -0.5), unit(key)
        rate, (_, decay) = masked(torch.sigmoid(parts["rate"]), real), self.steps(parts["step"], real)
        self.gates(None, decay, rate)
        outputs = self.read((query, key, value, decay, rate), layer, **states)
        return head_norm(outputs, self.norm).flatten(2) * nn.functional.silu(parts["out"])


def unit(vectors: Tensor, length: float = 1.0) -> Tensor:
    """Return vectors `(.., d)` of a length."""
    return vectors * (torch.rsqrt(vectors.square().sum(dim=-1, keepdim=True) + 1e-6) * length)
