"""Recurrent positional embeddings: the contract, and every reading of the paper against a slow reference."""

import pytest
import torch
from model_contract import ModelContract, static_cache
from slow_transformer import SlowTransformer, compare, multiply_instead_of_dropping, name_fields, recurrent_step
from user_errors import rejects

from recnmt_hf import RPETransformerConfig, RPETransformerForConditionalGeneration
from recnmt_hf.models.modeling_rpe_transformer import SlicedProjection
from recnmt_hf.models.recurrent_layers import CachedRecurrence


TYPED = {"rpe_type": "rpehead", "rpe_head_partition": "typed"}
SLICED = {"rpe_type": "mprhead", "rpe_head_partition": "slice"}
WITHOUT_POSITIONS = {"encoder_position_embeddings": False, "decoder_position_embeddings": False}


class TestRPETransformer(ModelContract):
    config_class = RPETransformerConfig
    model_class = RPETransformerForConditionalGeneration
    plain = {"rpe_type": None}
    growth = [  # the paper: 0.37M and 0.49M at base size
        ("base", {}, 361_984),
        ("base", {"rpe_type": "rpehead"}, 565_120),
        ("base", {"rpe_cell": "gru"}, 822_784),
        ("base", TYPED, 565_120 - 737_280),
        ("base", SLICED, 361_984 - 1_376_256),
        ("big", {}, 1_444_864),
    ]
    variants = {
        "default": {},
        "typed-lstm-directional-pre-norm": {
            **TYPED,
            "rpe_cell": "lstm",
            "self_attention_type": "directional",
            "normalize_before": True,
        },
        "sliced-sru-relative": {**SLICED, "rpe_cell": "sru", "self_attention_type": "relative"},
    }

    def test_one_step_of_the_recurrence_for_each_new_word(self, variant, monkeypatch):
        """With beams and any length: cached words are not run again."""
        model, lengths = self.model(variant), []
        run = CachedRecurrence.forward

        def watch(self, inputs, *args, **kwargs):
            lengths.append(tuple(inputs.shape[:2]))
            return run(self, inputs, *args, **kwargs)

        monkeypatch.setattr(CachedRecurrence, "forward", watch)
        prompt = torch.randint(4, 30, (2, 4))
        settings = {"num_beams": 3, "max_new_tokens": 5, "min_new_tokens": 5, "decoder_input_ids": prompt}
        model.generate(torch.randint(4, 30, (2, 6)), **settings)
        # The start token stands before the prompt.
        assert lengths == [(6, 5)] + [(6, 1)] * 4

    def test_static_caches_hold_the_state_in_place(self, variant):
        model = self.model(variant)
        cache = static_cache(model, 9)
        source, words = torch.randint(4, 30, (2, 6)), torch.randint(4, 30, (2, 6))
        inputs = {"encoder_outputs": model.get_encoder()(source), "cache": cache, "use_cache": True}
        steps, places = [], set()
        for first, last in ((0, 2), (2, 3), (3, 6)):
            steps.append(model(decoder_input_ids=words[:, first:last], **inputs).logits)
            states = cache.self_attention_cache.layers[0].states
            places.add(tuple(state.data_ptr() for state in states.values()))
        assert len(places) == 1
        expected = model(source, decoder_input_ids=words).logits
        torch.testing.assert_close(torch.cat(steps, 1), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    "fields",
    [
        {"rpe_cell": "gru"},
        {"rpe_type": "rpehead", "rpe_recurrence": "projected"},
        {"rpe_recurrence": "projected", "rpe_cell": "lstm"},
        {"rpe_encoder": False, "rpe_dim": 32},
        {"rpe_decoder": False},
    ],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_other_recurrences_go_through_the_cache(fields):
    """Cases that the variants above lack: steps, beams, padded prompts, roll-backs and exchanged rows."""
    contract = TestRPETransformer()
    contract.test_steps_equal_teacher_forcing(fields)
    contract.test_every_cache_gives_the_same_logits(fields, "beam", 4)
    contract.test_padded_prompts_go_on_as_they_do_alone(fields, 3)
    contract.test_cache_select_repeat_reorder_reset(fields)
    contract.test_gradient_reaches_every_parameter(fields)
    contract.test_assisted_decoding_equals_greedy(fields, "main", 0.02)


class SlowRPE(SlowTransformer):
    """Section 3 of Chen et al. (2019) for one sentence, word by word and head by head."""

    def input(self, side, ids):
        config, width, size = self.config, self.config.d_model, self.config.rpe_dim
        recurs = getattr(config, f"rpe_{side}")
        kind = config.position_embedding_type if getattr(config, f"{side}_position_embeddings") else "none"
        if config.rpe_type is None or size == 0 or not (recurs or (kind != "none" and size < width)):
            return super().input(side, ids)
        channels = width - size
        plain, recurrent = self.embed(side, ids).split([channels, size], dim=1)
        plain = self.add_positions(side, plain.clone())
        if recurs:
            recurrent = torch.stack(self.recurrent_positions(side, list(recurrent)))
            self.positions[side] = recurrent
        if config.rpe_type == "rpehead":
            mixed = torch.cat([plain, recurrent], -1)
        else:
            heads = getattr(config, f"{side}_attention_heads")
            rows = []
            for p, r in zip(plain, recurrent, strict=True):
                slices = []
                for head in range(heads):
                    slices += [p[head * channels // heads : (head + 1) * channels // heads]]
                    slices += [r[head * size // heads : (head + 1) * size // heads]]
                rows.append(torch.cat(slices))
            mixed = torch.stack(rows)
        return mixed * self.factor("dropout")

    def recurrent_positions(self, side, words):
        name, size = f"model.{side}.embed_input.recurrent_positions", self.config.rpe_dim
        if self.config.rpe_recurrence == "projected":
            cell = f"{name}.recurrence.{'forward_rnn' if side == 'encoder' else 'rnn'}"
            found, r, memory = [], torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
            for word in words:
                state, memory, _ = self.step(cell, word, r, memory)
                r = torch.tanh(self.linear(f"{cell}.out_proj", state))
                found.append(r)
            return found
        if side == "decoder":
            states = self.run(f"{name}.recurrence.rnn", words, size)
        else:
            onward = self.run(f"{name}.recurrence.forward_rnn", words, size // 2)
            backward = self.run(f"{name}.recurrence.backward_rnn", words[::-1], size // 2)[::-1]
            states = [torch.cat(pair) for pair in zip(onward, backward, strict=True)]
        return [torch.tanh(self.linear(f"{name}.out_proj", state)) for state in states]

    def run(self, name, words, size):
        state, memory, found = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64), []
        for word in words:
            state, memory, out = self.step(name, word, state, memory)
            found.append(out)
        return found

    def step(self, name, x, state, memory):
        """The next state and memory, and what is put out."""
        w, cell = self.weights, self.config.rpe_cell
        if cell == "sru":
            n = len(memory)
            parts = (w[f"{name}.in_proj.weight"] @ x).split(n)
            v, b = w[f"{name}.gate_weight"], w[f"{name}.gate_bias"]
            forget = torch.sigmoid(parts[0] + v[0] * memory + b[0])
            reset = torch.sigmoid(parts[1] + v[1] * memory + b[1])
            memory = forget * memory + (1 - forget) * parts[2]
            out = reset * memory + (1 - reset) * (parts[3] if len(x) != n else x)
            return out, memory, out
        state, memory = recurrent_step(w, name, cell, x, state, memory)
        return state, memory, state

    def linear(self, name, x):
        """A partition, if any, as the equivalent dense matrix with zeros."""
        width, weights = self.config.d_model, self.weights
        if f"{name}.plain_proj.weight" in weights:
            plain = self.config.d_model - self.config.rpe_dim
            matrix = torch.zeros(width, width, dtype=torch.float64)
            matrix[:plain, :plain] = weights[f"{name}.plain_proj.weight"]
            matrix[plain:, plain:] = weights[f"{name}.recurrent_proj.weight"]
            bias = torch.cat([weights[f"{name}.{part}_proj.bias"] for part in ("plain", "recurrent")])
            return x @ matrix.T + bias
        if weights[f"{name}.weight"].dim() == 3:
            return x @ torch.block_diag(*weights[f"{name}.weight"]).T + weights[f"{name}.bias"]
        return super().linear(name, x)

    def logits(self, source, target):
        self.positions = {}
        return super().logits(source, target)


# Tables 1 and 3 and figure 2 by fields alone; then the open readings, the cells, and the base model's own options.
EQUATIONS = [
    {"rpe_type": None},
    {},
    {"rpe_type": "rpehead"},
    *({"rpe_type": kind, "rpe_dim": size} for kind in ("rpehead", "mprhead") for size in (0, 8, 16, 24, 32)),
    {"decoder_position_embeddings": False},
    {"encoder_position_embeddings": False},
    WITHOUT_POSITIONS,
    *(
        {"rpe_type": kind, f"rpe_{side}": False, f"{side}_position_embeddings": False}
        for kind in ("rpehead", "mprhead")
        for side in ("encoder", "decoder")
    ),
    {"rpe_encoder": False, "rpe_decoder": False, **WITHOUT_POSITIONS},
    {"rpe_encoder": False},
    {"rpe_type": "rpehead", "rpe_decoder": False},
    {"rpe_dim": 32, "rpe_encoder": False},
    *({"rpe_cell": cell} for cell in ("gru", "lstm", "sru")),
    *(
        {"rpe_recurrence": "projected", "rpe_cell": cell, "rpe_type": kind}
        for cell, kind in (("rnn", "mprhead"), ("gru", "rpehead"), ("lstm", "mprhead"))
    ),
    TYPED,
    SLICED,
    {**TYPED, "rpe_dim": 8, "self_attention_type": "relative", "max_relative_positions": 2},
    {**TYPED, "rpe_dim": 32},
    {**SLICED, "rpe_decoder": False, "self_attention_type": "directional"},
    {"position_embedding_type": "marian", "scale_embedding": False},
    {"normalize_before": True, "encoder_attention_heads": 2, "rpe_type": "rpehead"},
    {"decoder_attention_heads": 8},
    {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("fields", EQUATIONS, ids=name_fields)
def test_equations(fields, side):
    """Every sentence of a padded batch, one of a single word among them, against the equations, to 1e-10."""
    check_equations(TestRPETransformer().model({"layer_norm_eps": 0.1, **fields}), side)


def test_dropout_stands_where_the_equations_have_it(monkeypatch):
    multiply_instead_of_dropping(monkeypatch)
    model = TestRPETransformer().model({"dropout": 0.2, "attention_dropout": 0.3, "activation_dropout": 0.5}).train()
    model.set_attn_implementation("eager")
    check_equations(model, "right")


def check_equations(model, side):
    slow = SlowRPE(model)
    for outputs, row, words, steps in compare(model, slow, side, output_attentions=True):
        found = {"encoder": outputs.source_recurrent_positions, "decoder": outputs.target_recurrent_positions}
        assert {name for name, positions in found.items() if positions} == set(slow.positions)
        for name, place in (("encoder", words), ("decoder", slice(0, steps))):
            if name in slow.positions:
                torch.testing.assert_close(found[name][0][row, place], slow.positions[name], atol=1e-10, rtol=0)


def test_usual_shares_of_the_channels():
    shares = {
        (size, kind): RPETransformerConfig.from_preset(size, vocab_size=100, rpe_type=kind).rpe_dim
        for size in ("tiny", "small", "base", "big")
        for kind in ("rpehead", "mprhead")
    }
    assert [shares[size, "rpehead"] for size in ("tiny", "small", "base", "big")] == [96, 192, 320, 640]
    assert [shares[size, "mprhead"] for size in ("tiny", "small", "base", "big")] == [64, 128, 256, 512]
    for fields in ({"d_model": 18, "encoder_attention_heads": 3}, {"d_model": 6, "encoder_attention_heads": 3}):
        fields |= {"decoder_attention_heads": 1}
        sizes = [RPETransformerConfig(**fields, rpe_type=kind).rpe_dim for kind in ("rpehead", "mprhead")]
        assert all(0 < size <= fields["d_model"] and size % 2 == 0 for size in sizes)
    assert RPETransformerConfig(rpe_type=None).rpe_dim == 0


def test_sequences_are_as_long_as_the_channels_without_recurrence_allow():
    """A table of positions limits the length; recurrences alone have none."""
    words = torch.full((1, 70), 5)
    with rejects(field="max_position_embeddings"):
        TestRPETransformer().model()(words, decoder_input_ids=words[:, :3])
    model = TestRPETransformer().model({"rpe_dim": 32})
    assert model.config.sides_with_positions == ()
    assert torch.isfinite(model(words, decoder_input_ids=words).logits).all()


def test_sliced_projections_start_as_dense_ones_of_their_size():
    """Xavier-uniform for each head; a loaded matrix is left alone."""
    torch.manual_seed(0)
    model = TestRPETransformer().model({**SLICED, "d_model": 256, "rpe_dim": 128}, scattered=False)
    projection = model.model.encoder.layers[0].self_attn.q_proj
    assert isinstance(projection, SlicedProjection) and projection.weight.shape == (4, 64, 64)
    bound = (6 / 128) ** 0.5
    assert 0.98 * bound < projection.weight.abs().max() <= bound and projection.bias.eq(0).all()
    scattered = torch.nn.init.normal_(projection.weight).clone()
    projection.weight._is_hf_initialized = True
    model._init_weights(projection)
    assert projection.weight.equal(scattered)
