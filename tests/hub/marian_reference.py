"""Files as Marian writes them, and Marian's forward pass in NumPy, written from its equations."""

import math
import struct

import numpy as np
import yaml


SETTINGS = {
    "dec-cell": "ssru",
    "dec-cell-base-depth": 2,
    "dec-cell-high-depth": 1,
    "dec-depth": 2,
    "dim-emb": 16,
    "dim-rnn": 1024,
    "enc-cell": "gru",
    "enc-cell-depth": 1,
    "enc-depth": 2,
    "enc-type": "bidirectional",
    "input-types": [],
    "layer-normalization": False,
    "lemma-dim-emb": 0,
    "output-omit-bias": False,
    "right-left": False,
    "skip": False,
    "special-vocab": [],
    "tied-embeddings": False,
    "tied-embeddings-all": True,
    "tied-embeddings-src": False,
    "transformer-aan-activation": "swish",
    "transformer-aan-depth": 2,
    "transformer-aan-nogate": False,
    "transformer-decoder-autoreg": "self-attention",
    "transformer-decoder-dim-ffn": 0,
    "transformer-dim-aan": 2048,
    "transformer-dim-ffn": 24,
    "transformer-ffn-activation": "relu",
    "transformer-ffn-depth": 2,
    "transformer-guided-alignment-layer": "last",
    "transformer-heads": 4,
    "transformer-no-projection": False,
    "transformer-postprocess": "dan",
    "transformer-postprocess-emb": "d",
    "transformer-postprocess-top": "",
    "transformer-preprocess": "",
    "transformer-rnn-projection": False,
    "transformer-tied-layers": [],
    "transformer-train-position-embeddings": False,
    "type": "transformer",
    "ulr": False,
    "ulr-dim-emb": 0,
    "version": "v1.9.56 1234567 2021-01-01 00:00:00 +0000",
}


def settings_for(sizes, **changes):
    """Settings of a model with vocabularies of these sizes; underscores in names stand for hyphens."""
    changes = {name.replace("_", "-"): value for name, value in changes.items()}
    return {**SETTINGS, "dim-vocabs": list(sizes), **changes}


# -- arrays ------------------------------------------------------------------------------------------------------------


def shapes(settings):
    """Names and shapes of the arrays that Marian saves for these settings."""
    get = settings.__getitem__
    d, ffn = get("dim-emb"), get("transformer-dim-ffn")
    sizes = get("dim-vocabs")
    end = "_pre" if get("transformer-preprocess") == "n" else ""
    result = {}

    def norm(prefix, suffix=end):
        result[f"{prefix}_ln_scale{suffix}"] = result[f"{prefix}_ln_bias{suffix}"] = (1, d)

    def dense(prefix, name, rows, columns):
        result[f"{prefix}_W{name}"], result[f"{prefix}_b{name}"] = (rows, columns), (1, columns)

    def attention(prefix):
        for name in "qkvo":
            dense(prefix, name, d, d)
        norm(f"{prefix}_Wo")

    def feed_forward(prefix, width):
        dense(prefix, "1", d, width)
        dense(prefix, "2", width, d)
        norm(f"{prefix}_ffn")

    if get("tied-embeddings-all") or get("tied-embeddings-src"):
        result["Wemb"] = (sizes[0], d)
    else:
        result["encoder_Wemb"], result["decoder_Wemb"] = (sizes[0], d), (sizes[1], d)
    if not (get("tied-embeddings-all") or get("tied-embeddings")):
        result["decoder_ff_logit_out_Wt"] = (sizes[1], d)
    if not get("output-omit-bias"):
        result["decoder_ff_logit_out_b"] = (1, sizes[1])
    for i in range(1, get("enc-depth") + 1):
        attention(f"encoder_l{i}_self")
        feed_forward(f"encoder_l{i}_ffn", ffn)
    for i in range(1, get("dec-depth") + 1):
        kind = get("transformer-decoder-autoreg")
        if kind == "self-attention":
            attention(f"decoder_l{i}_self")
        elif kind == "rnn":
            rnn = f"decoder_l{i}_rnn"
            result |= {f"{rnn}_W": (d, d), f"{rnn}_Wf": (d, d), f"{rnn}_bf": (1, d)}
            if get("transformer-rnn-projection"):
                dense(rnn, "o", d, d)
            norm(rnn if end else f"{rnn}_ffn")
        else:
            aan, width = f"decoder_l{i}_aan", get("transformer-dim-aan")
            if get("transformer-aan-depth") == 2:
                dense(aan, "1", d, width)
                if width != d:
                    dense(aan, "2", width, d)
            if not get("transformer-aan-nogate"):
                dense(aan, "i", d, d)
                dense(aan, "f", d, d)
            norm(f"{aan}_ffn")
        attention(f"decoder_l{i}_context")
        feed_forward(f"decoder_l{i}_ffn", get("transformer-decoder-dim-ffn") or ffn)
    if end:
        norm("encoder_top", "")
        norm("decoder_top", "")
    return result


def random_arrays(settings, seed=3):
    """Arrays with weights large enough that every part of the model matters."""
    random = np.random.default_rng(seed)
    arrays = {}
    for name, shape in shapes(settings).items():
        values = random.normal(size=shape) * (0.35 if shape[0] > 1 else 0.3)
        arrays[name] = (values + ("_ln_scale" in name)).astype(np.float32)
    return arrays


# -- files -------------------------------------------------------------------------------------------------------------


def settings_bytes(settings):
    """The settings as Marian saves them: YAML text that ends in NUL, as signed bytes."""
    text = yaml.safe_dump(settings).encode() + b"\0\0\0"
    return np.frombuffer(text, dtype=np.int8)


def write_npz(path, settings, arrays):
    """Write `model.npz`; returns the path."""
    np.savez(path, **{"special:model.yml": settings_bytes(settings)}, **arrays)
    return path


FLOAT32, FLOAT16, INT8 = 0x404, 0x402, 0x101
INTGEMM8 = {"upstream": 0x10001, "fork": 0x4101}


def is_quantized(name, fork):
    """Whether int8 files of a fork hold 8-bit numbers for an array."""
    return ("Wemb" in name and fork == "fork") or name.rpartition("_")[2] in {
        *("W", "Wf", "Wo", "Wq", "Wk", "Wv", "W1", "W2", "Wi", "Wt")
    }


def quantized_item(name, values):
    """Bytes of an 8-bit array: rounded numbers, transposed except for embeddings, then the multiplier."""
    multiplier = np.float32(127 / np.abs(values).max())
    rounded = np.clip(np.rint(values * multiplier), -127, 127).astype(np.int8)
    laid_out = rounded if "Wemb" in name else rounded.T
    return aligned(laid_out.tobytes() + struct.pack("<f", multiplier))


def write_bin(path, settings, arrays, fork="fork", alphas=True, version=1):
    """Write `model.bin` with 8-bit matrices (`fork=None`: with 32-bit ones); returns the path."""
    items = []
    for name, values in arrays.items():
        if fork and is_quantized(name, fork):
            items.append((name, INTGEMM8[fork], values.shape, quantized_item(name, values)))
            if alphas:
                items.append((f"{name}_QuantMultA", FLOAT32, (1,), aligned(struct.pack("<f", 12.5))))
        else:
            kind = {2: FLOAT16, 4: FLOAT32}[values.dtype.itemsize]
            items.append((name, kind, values.shape, aligned(values.tobytes())))
    text = settings_bytes(settings)
    items.append(("special:model.yml", INT8, text.shape, text.tobytes()))
    return write_items(path, items, version)


def write_items(path, items, version=1):
    """Write items (name, type, shape, bytes) in Marian's binary format."""
    head = struct.pack("<QQ", version, len(items))
    head += b"".join(struct.pack("<4Q", len(n) + 1, kind, len(shape), len(data)) for n, kind, shape, data in items)
    head += b"".join(name.encode() + b"\0" for name, *_ in items)
    head += b"".join(struct.pack(f"<{len(shape)}i", *shape) for _, _, shape, _ in items)
    padding = -(len(head) + 8) % 256
    path.write_bytes(head + struct.pack("<Q", padding) + bytes(padding) + b"".join(data for *_, data in items))
    return path


def aligned(data):
    """Data padded to a multiple of 256 bytes, as Marian stores it."""
    return data + bytes(-len(data) % 256)


# -- forward pass ------------------------------------------------------------------------------------------------------


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


ACTIVATIONS = {
    "relu": lambda x: np.maximum(x, 0),
    "swish": lambda x: x * sigmoid(x),
    "old gelu": lambda x: x * sigmoid(1.702 * x),  # before v1.12.3
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
}


class MarianModel:
    """Marian's Transformer for one sentence pair, in float64, one target position after another."""

    def __init__(self, settings, arrays):
        self.settings = settings
        self.arrays = {name: values.astype(np.float64) for name, values in arrays.items()}
        self.pre = settings["transformer-preprocess"] == "n"
        self.has_old_gelu = [int(part) for part in settings["version"].split()[0][1:].split(".")] < [1, 12, 3]

    def act(self, setting):
        name = self.settings[setting]
        return ACTIVATIONS["old gelu" if name == "gelu" and self.has_old_gelu else name]

    def dense(self, prefix, name, x):
        y = x @ self.arrays[f"{prefix}_W{name}"]
        bias = self.arrays.get(f"{prefix}_b{name}")
        return y if bias is None else y + bias[0]

    def norm(self, prefix, x, end=""):
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        scale, bias = (self.arrays[f"{prefix}_ln_{part}{end}"][0] for part in ("scale", "bias"))
        return (x - mean) / np.sqrt(variance + 1e-6) * scale + bias

    def before(self, prefix, x):
        return self.norm(prefix, x, "_pre") if self.pre else x

    def after(self, prefix, x, y):
        return x + y if self.pre else self.norm(prefix, x + y)

    def embed(self, side, ids):
        """Embeddings times sqrt(d) plus positions; `None` is the zero vector before the first target word."""
        table = self.arrays.get("Wemb", self.arrays.get(f"{side}_Wemb"))
        d = self.settings["dim-emb"]
        rows = np.zeros((len(ids), d))
        for j, id in enumerate(ids):
            if id is not None:
                rows[j] = table[id] * math.sqrt(d)
            for k in range(d // 2):
                angle = j * 10000.0 ** (-k / (d // 2 - 1))
                rows[j, k] += math.sin(angle)
                rows[j, d // 2 + k] += math.cos(angle)
        return rows

    def attend(self, prefix, x, memory, causal=False):
        """Returns the output and the weights of all heads."""
        heads, d = self.settings["transformer-heads"], x.shape[-1]
        query, key, value = (
            self.dense(prefix, name, states).reshape(len(states), heads, d // heads).transpose(1, 0, 2)
            for name, states in (("q", x), ("k", memory), ("v", memory))
        )
        scores = query @ key.transpose(0, 2, 1) / math.sqrt(d // heads)
        if causal:
            scores = np.where(np.tril(np.ones(scores.shape[1:])), scores, -np.inf)
        weights = softmax(scores)
        context = (weights @ value).transpose(1, 0, 2).reshape(len(x), d)
        return self.dense(prefix, "o", context), weights

    def attention_block(self, prefix, x, memory=None, causal=False):
        norm = f"{prefix}_Wo"
        query = self.before(norm, x)
        y, self.weights = self.attend(prefix, query, query if memory is None else memory, causal)
        return self.after(norm, x, y)

    def feed_forward(self, prefix, x):
        inner = self.dense(prefix, "1", self.before(f"{prefix}_ffn", x))
        y = self.dense(prefix, "2", self.act("transformer-ffn-activation")(inner))
        return self.after(f"{prefix}_ffn", x, y)

    def recurrence(self, prefix, x):
        """SSRU (Kim et al., 2019)."""
        cell, outputs = np.zeros(x.shape[-1]), []
        for row in self.before(prefix, x):
            forget = sigmoid(self.dense(prefix, "f", row))
            cell = forget * cell + (1 - forget) * (row @ self.arrays[f"{prefix}_W"])
            outputs.append(np.maximum(cell, 0))
        y = np.stack(outputs)
        if self.settings["transformer-rnn-projection"]:
            y = self.dense(prefix, "o", y)
        return self.after(prefix if self.pre else f"{prefix}_ffn", x, y)

    def average(self, prefix, x):
        """Average attention (Zhang et al., 2018), with Marian's gates."""
        act = self.act("transformer-aan-activation")
        means = np.stack([x[: j + 1].mean(0) for j in range(len(x))])
        y = self.before(f"{prefix}_ffn", means)
        if f"{prefix}_W1" in self.arrays:
            y = act(self.dense(prefix, "1", y))
        if f"{prefix}_W2" in self.arrays:
            y = self.dense(prefix, "2", y)
        if not self.settings["transformer-aan-nogate"]:
            y = sigmoid(self.dense(prefix, "i", x)) * x + sigmoid(self.dense(prefix, "f", y)) * y
        return self.after(f"{prefix}_ffn", x, y)

    def encode(self, source):
        x = self.embed("encoder", source)
        for i in range(1, self.settings["enc-depth"] + 1):
            x = self.attention_block(f"encoder_l{i}_self", x)
            x = self.feed_forward(f"encoder_l{i}_ffn", x)
        return self.norm("encoder_top", x) if self.pre else x

    def decode(self, memory, target):
        """Logits `(len(target), vocabulary)`, and the cross-attention of each layer `(heads, target, source)`."""
        x, attentions = self.embed("decoder", [None, *target[:-1]]), []
        for i in range(1, self.settings["dec-depth"] + 1):
            kind = self.settings["transformer-decoder-autoreg"]
            if kind == "self-attention":
                x = self.attention_block(f"decoder_l{i}_self", x, causal=True)
            else:
                x = self.recurrence(f"decoder_l{i}_rnn", x) if kind == "rnn" else self.average(f"decoder_l{i}_aan", x)
            x = self.attention_block(f"decoder_l{i}_context", x, memory)
            attentions.append(self.weights)
            x = self.feed_forward(f"decoder_l{i}_ffn", x)
        x = self.norm("decoder_top", x) if self.pre else x
        output = self.arrays.get("decoder_ff_logit_out_Wt", self.arrays.get("Wemb", self.arrays.get("decoder_Wemb")))
        bias = self.arrays.get("decoder_ff_logit_out_b", np.zeros((1, len(output))))
        return x @ output.T + bias[0], attentions

    def __call__(self, source, target):
        return self.decode(self.encode(source), target)

    def log_probs(self, source, target):
        """Log-probability of each word of the target, whose last word is the end token."""
        logits, _ = self(source, target)
        return np.log(softmax(logits))[np.arange(len(target)), target]

    def greedy(self, source, end, forbidden=(), most=30):
        """Greedy search; the result includes the end token."""
        memory, target = self.encode(source), []
        while len(target) < most and (not target or target[-1] != end):
            logits = self.decode(memory, [*target, end])[0][-1]
            logits[list(forbidden)] = -np.inf
            target.append(int(logits.argmax()))
        return target
