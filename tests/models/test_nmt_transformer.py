"""The base Transformer: the contract, and its own equations against a slow reference."""

import math

import pytest
import torch
from model_contract import VOCABULARY, ModelContract, ragged_batch

from recnmt_hf import NMTTransformerConfig, NMTTransformerForConditionalGeneration
from recnmt_hf.models.attention import RelativeMultiHeadAttention, directional_mask


class TestNMTTransformer(ModelContract):
    config_class = NMTTransformerConfig
    model_class = NMTTransformerForConditionalGeneration
    variants = {
        "default": {},
        "pre-norm": {"normalize_before": True, "activation_function": "gelu"},
        "learned": {"position_embedding_type": "learned"},
        "relative": {"self_attention_type": "relative", "max_relative_positions": 3},
        "directional": {"self_attention_type": "directional"},
    }


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


class SlowTransformer:
    """The equations of Vaswani et al. (2017) for one sentence at a time, head by head, in float64."""

    def __init__(self, model):
        self.config = model.config
        self.weights = {name: tensor.double() for name, tensor in model.state_dict().items()}

    def linear(self, name, x):
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def norm(self, name, x):
        mean = x.mean(-1, keepdim=True)
        variance = ((x - mean) ** 2).mean(-1, keepdim=True)
        scaled = (x - mean) / torch.sqrt(variance + self.config.layer_norm_eps)
        return scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def attention(self, name, x, memory, allowed, heads, relative=None):
        q, k, v = self.linear(f"{name}.q_proj", x), self.linear(f"{name}.k_proj", memory), None
        v = self.linear(f"{name}.v_proj", memory)
        width = x.shape[-1] // heads
        contexts = []
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            qh, kh, vh = q[:, part], k[:, part], v[:, part]
            scores = torch.empty(len(x), len(memory), dtype=torch.float64)
            for i in range(len(x)):
                for j in range(len(memory)):
                    key = kh[j]
                    if relative:
                        clip = relative
                        tables = self.weights[f"{name}.relative_keys"]
                        table = tables[head if len(tables) > 1 else 0]
                        key = key + table[min(max(j - i, -clip), clip) + clip]
                    scores[i, j] = (qh[i] @ key) / width**0.5
            weights = softmax_rows(scores, allowed[head] if isinstance(allowed, tuple) else allowed)
            rows = []
            for i in range(len(x)):
                row = torch.zeros(width, dtype=torch.float64)
                for j in range(len(memory)):
                    value = vh[j]
                    if relative:
                        tables = self.weights[f"{name}.relative_values"]
                        table = tables[head if len(tables) > 1 else 0]
                        value = value + table[min(max(j - i, -clip), clip) + clip]
                    row = row + weights[i, j] * value
                rows.append(row)
            contexts.append(torch.stack(rows))
        return self.linear(f"{name}.out_proj", torch.cat(contexts, -1))

    def sublayer(self, name, x, function):
        if self.config.normalize_before:
            return x + function(self.norm(name, x))
        return self.norm(name, x + function(x))

    def feed_forward(self, name, x):
        return self.linear(f"{name}.fc2", torch.relu(self.linear(f"{name}.fc1", x)))

    def input(self, side, ids):
        config = self.config
        x = self.weights[f"model.{side}.embed_tokens.weight"][ids] * config.d_model**0.5
        kind = config.position_embedding_type if getattr(config, f"{side}_position_embeddings") else "none"
        for position in range(len(ids)):
            for i in range(config.d_model // 2):
                angle = position / 10000 ** (2 * i / config.d_model)
                sine, cosine = math.sin(angle), math.cos(angle)
                places = {"sinusoidal": (2 * i, 2 * i + 1), "marian": (i, config.d_model // 2 + i)}.get(kind)
                if places:
                    x[position, places[0]] += sine
                    x[position, places[1]] += cosine
        return x

    def logits(self, source, target):
        config = self.config
        n, m = len(source), len(target)
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
        for layer in range(config.encoder_layers):
            name = f"model.encoder.layers.{layer}"
            heads = config.encoder_attention_heads
            x = self.sublayer(
                f"{name}.self_attn_layer_norm",
                x,
                lambda y, n=name, h=heads: self.attention(f"{n}.self_attn", y, y, allowed, h, relative),
            )
            x = self.sublayer(f"{name}.final_layer_norm", x, lambda y, n=name: self.feed_forward(n, y))
        memory = self.norm("model.encoder.layer_norm", x) if config.normalize_before else x
        causal = [[j <= i for j in range(m)] for i in range(m)]
        over_source = [[True] * n for _ in range(m)]
        y = self.input("decoder", target)
        for layer in range(config.decoder_layers):
            name = f"model.decoder.layers.{layer}"
            heads = config.decoder_attention_heads
            y = self.sublayer(
                f"{name}.self_attn_layer_norm",
                y,
                lambda z, n=name, h=heads: self.attention(f"{n}.self_attn", z, z, causal, h, relative),
            )
            y = self.sublayer(
                f"{name}.encoder_attn_layer_norm",
                y,
                lambda z, n=name, h=heads: self.attention(f"{n}.encoder_attn", z, memory, over_source, h),
            )
            y = self.sublayer(f"{name}.final_layer_norm", y, lambda z, n=name: self.feed_forward(n, z))
        if config.normalize_before:
            y = self.norm("model.decoder.layer_norm", y)
        return y @ self.weights["lm_head.weight"].T


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"normalize_before": True},
        {"position_embedding_type": "marian", "scale_embedding": True},
        {"encoder_position_embeddings": False, "decoder_position_embeddings": False},
        {"self_attention_type": "relative", "max_relative_positions": 2},
        {"self_attention_type": "relative", "max_relative_positions": 2, "relative_per_head": False},
        {"self_attention_type": "directional"},
        {"self_attention_type": "directional", "directional_include_self": True},
    ],
    ids=lambda fields: "-".join(f"{value}" for value in fields.values()) or "default",
)
def test_equations(fields):
    """Every sentence of a padded batch against the equations, to 1e-10."""
    model = TestNMTTransformer().model(fields)
    slow = SlowTransformer(model)
    batch = ragged_batch()
    target = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    logits = model(**batch).logits
    for row, (length, steps) in enumerate(zip((7, 4, 1), (5, 3, 2), strict=True)):
        expected = slow.logits(batch["input_ids"][row, :length].tolist(), target[row, :steps].tolist())
        torch.testing.assert_close(logits[row, :steps], expected, atol=1e-10, rtol=0)


def test_relative_attention_makes_no_pairwise_vectors():
    """No tensor of query x key x head width appears on the way, forward or backward."""
    config = TestNMTTransformer().config(self_attention_type="relative")
    config._attn_implementation = "sdpa"
    attention = RelativeMultiHeadAttention(config, 32, 4, max_relative_positions=3, relative_per_head=True)
    torch.nn.init.normal_(attention.relative_keys)
    torch.nn.init.normal_(attention.relative_values)
    length, largest = 50, 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            outputs = function(*args, **(kwargs or {}))
            for output in outputs if isinstance(outputs, (tuple, list)) else [outputs]:
                if isinstance(output, torch.Tensor):
                    largest = max(largest, output.numel())
            return outputs

    with Watch():
        attention(torch.randn(1, length, 32))[0].sum().backward()
    assert largest <= 4 * length * length  # scores of four heads, nothing eight times as wide


def test_directional_mask_of_a_head_without_keys_gives_zero():
    mask = directional_mask(torch.tensor([[1, 1, 0]]), 2, 3, False, torch.device("cpu"))
    assert mask[0, 0].tolist() == [[False] * 3, [True, False, False], [True, True, False]]
    assert mask[0, 1].tolist() == [[False, True, False], [False] * 3, [False] * 3]


def test_parameter_counts():
    """Body without embeddings at base and big size (SPEC 0.2), and the tying's three totals."""
    from recnmt_hf import NMTTransformerModel

    for preset, expected in (("base", 44.14e6), ("big", 176.36e6)):
        with torch.device("meta"):
            model = NMTTransformerModel(NMTTransformerConfig.from_preset(preset, vocab_size=100))
        body = sum(p.numel() for name, p in model.named_parameters() if "embed" not in name and "shared" not in name)
        assert abs(body - expected) < 5e3, (preset, body)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"d_model": 30}, "encoder_attention_heads=4 is not allowed.*divisor of d_model=30"),
        ({"dropout": 1.5}, "dropout=1.5 is not allowed.*0 to below 1"),
        ({"encoder_layers": 0}, "encoder_layers=0 is not allowed.*>= 1"),
        ({"encoder_layers": "6"}, "encoder_layers='6'"),
        ({"normalize_before": "yes"}, "normalize_before='yes'.*True or False"),
        ({"position_embedding_type": "rotary"}, "position_embedding_type='rotary'.*'sinusoidal'"),
        ({"self_attention_type": "local"}, "self_attention_type='local'.*'relative'"),
        ({"activation_function": "nope"}, "activation_function='nope'.*ACT2FN"),
        ({"decoder_vocab_size": 10}, "decoder_vocab_size=10.*Remedy: set share_encoder_decoder_embeddings=False"),
        ({"pad_token_id": VOCABULARY}, f"pad_token_id={VOCABULARY}.*id from 0 to {VOCABULARY - 1}"),
        ({"self_attention_type": "directional", "encoder_attention_heads": 1}, "encoder_attention_heads=1.*even"),
        ({"init_std": -1.0}, "init_std=-1.0"),
    ],
)
def test_wrong_values_are_refused_with_the_remedy(fields, message):
    with pytest.raises(ValueError, match=f"NMTTransformerConfig: {message}"):
        TestNMTTransformer().config(**fields)


def test_unknown_preset():
    with pytest.raises(ValueError, match="no preset 'huge'; choose one of base, big, small, tiny"):
        NMTTransformerConfig.from_preset("huge")


def test_relative_positions_replace_absolute_ones_by_default():
    assert NMTTransformerConfig(self_attention_type="relative").position_embedding_type == "none"
    both = NMTTransformerConfig(self_attention_type="relative", position_embedding_type="sinusoidal")
    assert both.position_embedding_type == "sinusoidal"
    assert NMTTransformerConfig().position_embedding_type == "sinusoidal"


def test_sequences_beyond_the_position_table_are_refused():
    model = TestNMTTransformer().model({"max_position_embeddings": 8})
    long = torch.full((1, 9), 5)
    with pytest.raises(
        ValueError, match=r"9 tokens does not fit the position table of 8 rows.*max_position_embeddings"
    ):
        model(long, decoder_input_ids=long[:, :2])
    free = TestNMTTransformer().model({"max_position_embeddings": 8, "self_attention_type": "relative"})
    assert free(long, decoder_input_ids=long).logits.shape == (1, 9, VOCABULARY)


def test_attention_kernels_that_do_not_fit_are_refused():
    for kind in ("relative", "directional"):
        config = TestNMTTransformer().config(self_attention_type=kind)
        with pytest.raises(ValueError, match=f"self_attention_type='{kind}' cannot be computed"):
            NMTTransformerForConditionalGeneration._from_config(config, attn_implementation="flex_attention")
