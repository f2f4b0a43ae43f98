"""An independent slow reference of the base Transformer, for the tests of equations."""

import math
import sys

import torch
from model_contract import left_padded, ragged_batch

from recnmt_hf.models import kernels_shared


def multiply_instead_of_dropping(monkeypatch):
    """Dropout of probability p multiplies by 1 + p in training: the results then show exactly where it stands."""
    real = kernels_shared.dropout
    for name, module in list(sys.modules.items()):
        for attribute, value in list(vars(module).items()) if name.startswith("recnmt_hf.models.") else ():
            if value is real:
                monkeypatch.setattr(module, attribute, lambda x, p, training: x * (1 + p) if training else x)


def softmax_rows(scores, allowed):
    """Row by row, one query at a time: softmax over the allowed keys, zeros for a query without any."""
    weights = torch.zeros_like(scores)
    for i in range(scores.shape[0]):
        keys = [j for j in range(scores.shape[1]) if allowed[i][j]]
        if keys:
            exponentials = torch.stack([scores[i, j].exp() for j in keys])
            for j, value in zip(keys, exponentials / exponentials.sum(), strict=True):
                weights[i, j] = value
    return weights


def name_fields(fields):
    """A test's name from its configuration fields."""
    return "-".join(f"{value}" for value in fields.values()).replace(" ", "") or "default"


def recurrent_step(weights, name, cell, x, state, memory=None, suffix="_l0"):
    """One step of torch's cell with the parameters `name`: its state, and of an LSTM its memory."""
    i = weights[f"{name}.weight_ih{suffix}"] @ x + weights[f"{name}.bias_ih{suffix}"]
    h = weights[f"{name}.weight_hh{suffix}"] @ state + weights[f"{name}.bias_hh{suffix}"]
    n = len(state)
    if cell == "rnn":
        return torch.tanh(i + h), memory
    if cell == "gru":
        reset, update = torch.sigmoid(i[:n] + h[:n]), torch.sigmoid(i[n : 2 * n] + h[n : 2 * n])
        return (1 - update) * torch.tanh(i[2 * n :] + reset * h[2 * n :]) + update * state, memory
    into, forget, new, out = (i + h).split(n)
    memory = torch.sigmoid(forget) * memory + torch.sigmoid(into) * torch.tanh(new)
    return torch.sigmoid(out) * torch.tanh(memory), memory


def compare(model, slow, side="right", **settings):
    """
    Compare the logits of a padded batch, a sentence of one word among them, with the equations to 1e-10. Yield the
    outputs with each row, the places of its words, and its number of target words.
    """
    batch = ragged_batch()
    target = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    outputs = model(**(batch if side == "right" else left_padded(batch)), **settings)
    for row, (length, steps) in enumerate(zip((7, 4, 1), (5, 3, 2), strict=True)):
        expected = slow.logits(batch["input_ids"][row, :length].tolist(), target[row, :steps].tolist())
        torch.testing.assert_close(outputs.logits[row, :steps], expected, atol=1e-10, rtol=0)
        yield outputs, row, slice(0, length) if side == "right" else slice(-length, None), steps


class SlowTransformer:
    """
    The equations of Vaswani et al. (2017) for one sentence at a time, head by head, in float64; of a model in training
    with `multiply_instead_of_dropping`.
    """

    def __init__(self, model):
        self.config, self.training = model.config, model.training
        self.weights = {name: tensor.double() for name, tensor in model.state_dict().items()}

    def factor(self, dropout):
        return 1 + getattr(self.config, dropout) if self.training else 1

    def linear(self, name, x):
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def norm(self, name, x):
        mean = x.mean(-1, keepdim=True)
        variance = ((x - mean) ** 2).mean(-1, keepdim=True)
        scaled = (x - mean) / torch.sqrt(variance + self.config.layer_norm_eps)
        return scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def distance(self, name, head, offset, clip):
        """The vector of a relative position, if the model has them."""
        if not clip:
            return 0
        tables = self.weights[name]
        return tables[head if len(tables) > 1 else 0][min(max(offset, -clip), clip) + clip]

    def attention(self, name, x, memory, allowed, heads, relative=None):
        q, k = self.linear(f"{name}.q_proj", x), self.linear(f"{name}.k_proj", memory)
        v = self.linear(f"{name}.v_proj", memory)
        width = memory.shape[-1] // heads
        contexts = []
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            qh, kh, vh = q[:, part], k[:, part], v[:, part]
            scores = torch.empty(len(x), len(memory), dtype=torch.float64)
            for i in range(len(x)):
                for j in range(len(memory)):
                    key = kh[j] + self.distance(f"{name}.relative_keys", head, j - i, relative)
                    scores[i, j] = (qh[i] @ key) / width**0.5
            weights = softmax_rows(scores, allowed[head] if isinstance(allowed, tuple) else allowed)
            weights = weights * self.factor("attention_dropout")
            rows = []
            for i in range(len(x)):
                row = torch.zeros(width, dtype=torch.float64)
                for j in range(len(memory)):
                    value = vh[j] + self.distance(f"{name}.relative_values", head, j - i, relative)
                    row = row + weights[i, j] * value
                rows.append(row)
            contexts.append(torch.stack(rows))
        return self.linear(f"{name}.out_proj", torch.cat(contexts, -1))

    def sublayer(self, name, x, function):
        factor = self.factor("dropout")
        if self.config.normalize_before:
            return x + factor * function(self.norm(name, x))
        return self.norm(name, x + factor * function(x))

    def feed_forward(self, name, x, factor=1):
        return self.linear(f"{name}.fc2", factor * torch.relu(self.linear(f"{name}.fc1", x)))

    def feed_forward_sublayer(self, name, x):
        factor = self.factor("activation_dropout")
        return self.sublayer(f"{name}.final_layer_norm", x, lambda y: self.feed_forward(name, y, factor))

    def decoder_self(self, name, x, causal, heads, relative):
        """Compute the first sub-layer of the decoder."""
        return self.attention(name, x, x, causal, heads, relative)

    def fuse(self, layer, own, attended):
        """Compute what a variant does between attention to the encoder and the feed-forward block."""
        return attended

    def finish(self, states):
        """Compute what a variant does with the decoder's last states `(length, d_model)`."""
        return states

    def embed(self, side, ids):
        x = self.weights[f"model.{side}.embed_tokens.weight"][ids]
        return x * self.config.d_model**0.5 if self.config.scale_embedding else x.clone()

    def add_positions(self, side, x):
        """Add sinusoids in place."""
        kind = self.config.position_embedding_type if getattr(self.config, f"{side}_position_embeddings") else "none"
        size = x.shape[1]
        for position in range(len(x)):
            for i in range(size // 2):
                angle = position / 10000 ** (2 * i / (size - 2 if kind == "tensor2tensor" else size))
                halves = (i, size // 2 + i)
                places = {"sinusoidal": (2 * i, 2 * i + 1), "marian": halves, "tensor2tensor": halves}.get(kind)
                if places:
                    x[position, places[0]] += math.sin(angle)
                    x[position, places[1]] += math.cos(angle)
        return x

    def input(self, side, ids):
        return self.add_positions(side, self.embed(side, ids)) * self.factor("dropout")

    def logits(self, source, target):
        return self.decode(target, self.encode(source))

    def encode(self, source):
        """The memory of one sentence (a list of ids), `(length, d_model)`."""
        config = self.config
        n = len(source)
        everything = [[True] * n for _ in range(n)]
        allowed = everything
        if config.self_attention_type == "directional":
            half = config.encoder_attention_heads // 2
            keep = config.directional_include_self
            back = [[j < i or (keep and i == j) for j in range(n)] for i in range(n)]
            ahead = [[j > i or (keep and i == j) for j in range(n)] for i in range(n)]
            allowed = (back,) * half + (ahead,) * half
        relative = config.max_relative_positions if config.self_attention_type == "relative" else None
        x = self.input("encoder", source)
        self.layer_states = []
        for layer in range(config.encoder_layers):
            name = f"model.encoder.layers.{layer}"
            heads = config.encoder_attention_heads
            x = self.sublayer(
                f"{name}.self_attn_layer_norm",
                x,
                lambda y, n=name, h=heads: self.attention(f"{n}.self_attn", y, y, allowed, h, relative),
            )
            x = self.feed_forward_sublayer(name, x)
            self.layer_states.append(x)
        if config.normalize_before:
            self.layer_states[-1] = self.norm("model.encoder.layer_norm", x)
        return self.layer_states[-1]

    def decode(self, target, memory):
        """The logits of one sentence, `(length, vocabulary)`."""
        config = self.config
        n, m = len(memory), len(target)
        relative = config.max_relative_positions if config.self_attention_type == "relative" else None
        causal = [[j <= i for j in range(m)] for i in range(m)]
        over_source = [[True] * n for _ in range(m)]
        y = self.input("decoder", target)
        for layer in range(config.decoder_layers):
            name = f"model.decoder.layers.{layer}"
            heads = config.decoder_attention_heads
            y = self.sublayer(
                f"{name}.self_attn_layer_norm",
                y,
                lambda z, n=name, h=heads: self.decoder_self(f"{n}.self_attn", z, causal, h, relative),
            )
            own = y
            y = self.sublayer(
                f"{name}.encoder_attn_layer_norm",
                y,
                lambda z, n=name, h=heads: self.attention(f"{n}.encoder_attn", z, memory, over_source, h),
            )
            y = self.fuse(layer, own, y)
            y = self.feed_forward_sublayer(name, y)
        if config.normalize_before:
            y = self.norm("model.decoder.layer_norm", y)
        y = self.finish(y)
        return y @ self.weights["lm_head.weight"].T
