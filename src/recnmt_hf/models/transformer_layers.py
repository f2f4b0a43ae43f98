"""The Transformer's layers, post- or pre-norm, and the base class of Transformer encoders and decoders."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from .kernels_cpu_matmuls import project
from .kernels_shared import Mask, dropout
from .seq2seq_outputs import Memories
from .seq2seq_stacks import Seq2SeqStack, TokenAndPositionInput


class TransformerSublayers(GradientCheckpointingLayer):
    """Feed-forward block, and residuals: post-norm `LN(x + Drop(sub(x)))` or pre-norm `x + Drop(sub(LN(x)))`."""

    def __init__(self, config: PreTrainedConfig, ffn_dim: int):
        super().__init__()
        self.normalize_before = config.normalize_before
        self.dropout = config.dropout
        self.activation_dropout = config.activation_dropout
        self.activation_fn = ACT2FN[config.activation_function]
        self.fc1 = nn.Linear(config.d_model, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, config.d_model)
        self.final_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def prepare_input(self, hidden_states: Tensor, norm: nn.LayerNorm) -> Tensor:
        """Return the input of a sub-layer."""
        return norm(hidden_states) if self.normalize_before else hidden_states

    def add_residual(self, output: Tensor, residual: Tensor, norm: nn.LayerNorm) -> Tensor:
        """Add a sub-layer's output to its residual branch."""
        hidden_states = residual + dropout(output, self.dropout, self.training)
        return hidden_states if self.normalize_before else norm(hidden_states)

    def feed_forward(self, hidden_states: Tensor) -> Tensor:
        """Compute W2 act(W1 x + b1) + b2 with its residual (Vaswani et al., 2017, Eq. 2)."""
        inner = project(self.fc1, self.prepare_input(hidden_states, self.final_layer_norm), self.activation_fn)
        inner = dropout(inner, self.activation_dropout, self.training)
        return self.add_residual(project(self.fc2, inner), hidden_states, self.final_layer_norm)


class TransformerEncoderLayer(TransformerSublayers):
    """Self-attention, then feed-forward; `self_attn` is a [`MultiHeadAttention`] or a subclass."""

    def __init__(self, config: PreTrainedConfig, self_attn: nn.Module):
        super().__init__(config, config.encoder_ffn_dim)
        self.self_attn = self_attn
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(
        self, hidden_states: Tensor, kernel_mask: Mask = None, token_mask: Mask = None, **kwargs: Any
    ) -> Tensor:
        """Run over `(batch_size, source_length, d_model)`; `token_mask` is for layers that count tokens."""
        states = self.prepare_input(hidden_states, self.self_attn_layer_norm)
        attended, _ = self.self_attn(states, attention_mask=kernel_mask, **kwargs)
        return self.feed_forward(self.add_residual(attended, hidden_states, self.self_attn_layer_norm))


class TransformerDecoderLayer(TransformerSublayers):
    """Causal self-attention, attention to the memory `"encoder"`, feed-forward; `fuse` may read further memories."""

    def __init__(self, config: PreTrainedConfig, self_attn: nn.Module, encoder_attn: nn.Module):
        super().__init__(config, config.decoder_ffn_dim)
        self.self_attn = self_attn
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.encoder_attn = encoder_attn
        self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def __call__(self, hidden_states: Tensor, kernel_mask: Any, memories: Memories, **kwargs: Any) -> Any:
        # Reentrant checkpointing follows gradients only into tensors that are positional arguments themselves.
        is_checkpointed = self.gradient_checkpointing and self.training
        states = [memory.states for memory in memories.values()] if is_checkpointed else []
        return super().__call__(hidden_states, kernel_mask, memories, *states, **kwargs)

    def forward(
        self, hidden_states: Tensor, kernel_mask: Mask, memories: Memories, *states: Tensor, **kwargs: Any
    ) -> Tensor:
        """Run over `(batch_size, target_length, d_model)`; `states` replace those of the memories (see `__call__`)."""
        if states:
            pairs = zip(memories.items(), states, strict=True)
            memories = {name: memory._replace(states=own) for (name, memory), own in pairs}
        queries = self.prepare_input(hidden_states, self.self_attn_layer_norm)
        attended, _ = self.self_attn(queries, attention_mask=kernel_mask, **kwargs)
        own = self.add_residual(attended, hidden_states, self.self_attn_layer_norm)
        queries, source = self.prepare_input(own, self.encoder_attn_layer_norm), memories["encoder"]
        attended, _ = self.encoder_attn(queries, source.states, source.kernel_mask, **kwargs)
        hidden_states = self.add_residual(attended, own, self.encoder_attn_layer_norm)
        return self.feed_forward(self.fuse(own, hidden_states, memories, **kwargs))

    def fuse(self, own: Tensor, attended: Tensor, memories: Memories, **kwargs: Any) -> Tensor:
        """Combine the states after self-attention (`own`) and after `encoder_attn` with other memories."""
        return attended


class TransformerStack(Seq2SeqStack):
    """Positions, layers and final norm of an encoder or a decoder."""

    side: str  # "encoder" or "decoder"
    # Builds the layer of an index, called as [`TransformerEncoderLayer`] or [`TransformerDecoderLayer`].
    build_layer: Callable[..., nn.Module]

    def __init__(self, config: Any, *args: Any):
        super().__init__(config, *args)
        count = getattr(config, f"{self.side}_layers")
        self.layers = nn.ModuleList([self.build_layer(config, i) for i in range(count)])
        if config.normalize_before:
            self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.post_init()

    def build_input(self, config: Any) -> nn.Module:
        has_positions = getattr(config, f"{self.side}_position_embeddings")
        return TokenAndPositionInput(config, config.position_embedding_type if has_positions else "none")
