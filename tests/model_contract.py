"""
The promises of every model, as test methods that a model's own file inherits.

A file of the suite says which model:

    class TestX(ModelContract):
        config_class, model_class = XConfig, XForConditionalGeneration
        variants = {"default": {}, "pre-norm": {"normalize_before": True}}
"""

import copy
import dataclasses
import io
import itertools
import json
import pickle
import warnings

import pytest
import torch
import transformers
from compiled_graphs import FEW_LENGTHS, count_training, graphs_of_marian, needs_compiler
from packaging import version
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, CompileConfig, masking_utils
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache, StaticCache
from transformers.modeling_outputs import BaseModelOutput
from user_errors import rejects

import recnmt_hf
from recnmt_hf.families import FAMILIES
from recnmt_hf.models.seq2seq_outputs import CACHE


VOCABULARY = 37
TINY = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}
GENERATION = {
    "greedy": {},
    "beam": {"num_beams": 4},
    "n-best": {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.6},
    "sampling": {"do_sample": True},
    "several-samples": {"do_sample": True, "num_return_sequences": 3},
    "beam-sample": {"do_sample": True, "num_beams": 3},
}


def ragged_batch(lengths=(7, 4, 1), target_lengths=(5, 3, 2), seed=3):
    """Source ids, mask and labels with padding on the right."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(4, VOCABULARY, (len(lengths), max(lengths)), generator=generator)
    mask = (torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]).long()
    labels = torch.randint(4, VOCABULARY, (len(lengths), max(target_lengths)), generator=generator)
    labels[torch.arange(max(target_lengths))[None, :] >= torch.tensor(target_lengths)[:, None]] = -100
    return {"input_ids": source, "attention_mask": mask, "labels": labels}


def source_of(batch):
    """The sources of a batch, with their mask."""
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def pad(tensor, side, amount, filling):
    """The rows of a tensor with `amount` further columns on a side."""
    more = tensor.new_full((len(tensor), amount, *tensor.shape[2:]), filling)
    return torch.cat([more, tensor] if side == "left" else [tensor, more], 1)


def left_padded(batch):
    """The same sentences with their source padding on the left."""
    source, mask = torch.zeros_like(batch["input_ids"]), torch.zeros_like(batch["attention_mask"])
    for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
        source[row, -length:], mask[row, -length:] = batch["input_ids"][row, :length], 1
    return {**batch, "input_ids": source, "attention_mask": mask}


def scatter_parameters(model, std=0.3):
    """Large random parameters: at usual initial values wrong states and masks hardly show."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * std)
    return model


def family_model(model_type, seed=5, **fields):
    """A family's small model of tiny sizes, without dropout."""
    torch.manual_seed(seed)
    family, dropouts = FAMILIES[model_type], ("dropout", "attention_dropout", "activation_dropout")
    small = {**TINY, "decoder_layers": 1, **dict.fromkeys(dropouts, 0.0), **family.small, **fields}
    return family.load_class("ForConditionalGeneration")(family.load_class("Config")(**small))


def gradients_of(model):
    """The gradients of all parameters that have one."""
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def static_cache(model, length):
    """A static cache of both attentions, handed in."""
    decoder = model.config.get_text_config(decoder=True)
    return EncoderDecoderCache(*(StaticCache(config=decoder, max_cache_len=length) for _ in range(2)))


def resets_growing_layers():
    """Before 5.20 transformers' own growing layers were zeroed and kept their length."""
    layer = DynamicLayer()
    layer.update(torch.ones(1, 1, 2, 1), torch.ones(1, 1, 2, 1))
    layer.reset()
    return layer.get_seq_length() == 0


def aligned(model):
    """
    A copy in memory of its own. Loaded weights stand in their file's memory at any address, where vector instructions
    may sum in another order; their copy computes the same bits as the model that was saved.
    """
    return copy.deepcopy(model).eval()


class ModelContract:
    config_class = None
    model_class = None
    variants = {"default": {}}
    # Fields of the family's plain model, which computes what its baseline does, and parameters that presets with these
    # fields have beyond their baselines.
    plain = None
    growth = ()
    # Modules that only training calls, by a part of their names.
    called_in_training = ()
    # Sizes where the number of layers has no influence but on the time.
    one_layer = {"encoder_layers": 1, "decoder_layers": 1}
    # Lengths in `count_training`. torch makes a graph of the first one and then one of all, as users have it; for the
    # variants besides the default, the one of all.
    compiled = {"lengths": FEW_LENGTHS}
    compiled_variants = {"lengths": FEW_LENGTHS, "dynamic": True}

    def config(self, **fields):
        return self.config_class(**{**TINY, **fields})

    def model(self, fields=None, dtype=torch.float64, scattered=True):
        torch.manual_seed(5)
        model = self.model_class(self.config(**(fields or {}))).to(dtype).eval()
        return scatter_parameters(model) if scattered else model

    def test_runs_on_the_meta_device(self, variant, monkeypatch):
        """
        Forward, backward and a decoding step, all on one device and without reading any number of a tensor; built or
        moved there.
        """
        for name in ("_ignore_bidirectional_mask_sdpa", "_ignore_causal_mask_sdpa"):  # transformers reads its mask
            monkeypatch.setattr(masking_utils, name, lambda *args, **kwargs: False, raising=False)
        batch = {name: tensor.to("meta") for name, tensor in ragged_batch().items()}
        for device in ("cpu", "meta"):
            with torch.device(device):
                model = self.model_class(self.config(**variant)).to("meta")
            model.tie_weights()
            assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
            assert model.eval()(**batch).logits.is_meta
        for return_logits in (True, False):
            model.train().zero_grad()
            model(**batch, smoothing=0.1, return_logits=return_logits).loss.backward()
            assert all(parameter.grad.is_meta for parameter in model.parameters())
        source = source_of(batch)
        with torch.no_grad():
            outputs = model.eval()(**source, decoder_input_ids=batch["input_ids"][:, :2], use_cache=True)
            given = {"cache": outputs[CACHE], "encoder_outputs": model.get_encoder()(**source)}
            for cache in (given["cache"], static_cache(model, 7)):
                for _ in range(2):  # a static cache is filled by the first step
                    settings = {**given, "cache": cache, "attention_mask": source["attention_mask"]}
                    step = model(**settings, decoder_input_ids=batch["input_ids"][:, :1])
                    assert step.logits.is_meta and step.logits.shape[1] == 1
            given["cache"].reorder_cache(torch.arange(3, device="meta"))

    @pytest.mark.parametrize("side", ["left", "right"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
    def test_padding_changes_nothing(self, variant, side, dtype):
        """Source and target padded by k on a side, filled with anything: the same logits."""
        tolerance = 1e-5 if dtype == torch.float32 else 1e-10
        model = self.model(variant, dtype, scattered=dtype == torch.float64)
        source, target = torch.randint(4, VOCABULARY, (2, 6)), torch.randint(4, VOCABULARY, (2, 5))
        ones = torch.ones_like
        expected = model(source, ones(source), decoder_input_ids=target, decoder_attention_mask=ones(target)).logits
        plain = model(source, decoder_input_ids=target).logits
        torch.testing.assert_close(plain, expected, atol=tolerance, rtol=0)
        for amount, filling in itertools.product((1, 3), (0, VOCABULARY - 1)):
            logits = model(
                pad(source, side, amount, filling),
                pad(ones(source), side, amount, 0),
                decoder_input_ids=pad(target, side, amount, filling),
                decoder_attention_mask=pad(ones(target), side, amount, 0),
            ).logits
            real = logits[:, amount:] if side == "left" else logits[:, :-amount]
            torch.testing.assert_close(real, expected, atol=tolerance, rtol=0)

    def test_ragged_batch_equals_single_sentences(self, variant):
        model = self.model(variant)
        batch = ragged_batch()
        together = model(**batch).logits
        for row, (length, target) in enumerate(zip((7, 4, 1), (5, 3, 2), strict=True)):
            alone = model(
                input_ids=batch["input_ids"][row : row + 1, :length], labels=batch["labels"][row : row + 1, :target]
            ).logits
            torch.testing.assert_close(together[row : row + 1, :target], alone, atol=1e-10, rtol=0)

    def test_source_of_padding_only_gives_numbers(self, variant):
        model = self.model(variant)
        batch = ragged_batch()
        batch["attention_mask"][1] = 0
        before = model(**batch).logits
        assert torch.isfinite(before).all()
        batch["input_ids"][1] = 5
        torch.testing.assert_close(model(**batch).logits, before, atol=1e-10, rtol=0)

    @pytest.mark.parametrize("mode", GENERATION)
    @pytest.mark.parametrize("prompt", [1, 4])
    def test_every_cache_gives_the_same_logits(self, variant, mode, prompt):
        """
        Logits of every step without a cache, with a growing or a static one, made by `generate` or handed in, made with
        a configuration or without; with a prompt of several tokens; without gradients and in inference mode.
        """
        model = self.model(variant)
        batch = ragged_batch()
        del batch["labels"]
        generator = torch.Generator().manual_seed(8)
        start = torch.randint(4, VOCABULARY, (3, prompt), generator=generator)
        settings = {"decoder_input_ids": start, "max_new_tokens": 5, "min_new_tokens": 5, **GENERATION[mode]}

        def logits(**cache):
            torch.manual_seed(2)
            found = model.generate(
                **batch, **settings, **cache, output_logits=True, return_dict_in_generate=True, disable_compile=True
            )
            return found.sequences, torch.stack(found.logits)

        tokens, expected = logits(use_cache=False)
        caches = {
            "growing": {},
            "static": {"cache_implementation": "static"},
            "without a configuration": {CACHE: EncoderDecoderCache(DynamicCache(), DynamicCache())},
            "static, larger than needed": {CACHE: static_cache(model, 20)},
        }
        for name, cache in caches.items():
            found = logits(**cache)
            assert torch.equal(found[0], tokens), name
            torch.testing.assert_close(found[1], expected, atol=1e-9, rtol=0, msg=lambda text, n=name: f"{n}: {text}")
        with torch.inference_mode():
            assert torch.equal(logits()[0], tokens)

    @pytest.mark.parametrize("beams", [1, 3])
    def test_padded_prompts_go_on_as_they_do_alone(self, variant, beams):
        """With every cache: each beam of a prompt knows its padding, and is continued as without."""
        model = self.model(variant)
        batch = ragged_batch()
        prompt = torch.tensor([[0, 0, 1, 8], [1, 6, 7, 8], [0, 1, 7, 9]])
        settings = {"num_beams": beams, "max_new_tokens": 4, "min_new_tokens": 4, "disable_compile": True}
        settings |= {"output_logits": True, "return_dict_in_generate": True}
        prompts = {"decoder_input_ids": prompt, "decoder_attention_mask": (prompt != 0).long()}
        caches = ({}, {"use_cache": False}, {"cache_implementation": "static"}, {CACHE: static_cache(model, 12)})
        found = [model.generate(**source_of(batch), **prompts, **settings, **cache) for cache in caches]
        for row, (length, padding) in enumerate(zip((7, 4, 1), (2, 0, 1), strict=True)):
            source = batch["input_ids"][row : row + 1, :length]
            alone = model.generate(source, decoder_input_ids=prompt[row : row + 1, padding:], **settings)
            for each in found:
                assert torch.equal(each.sequences[row : row + 1, padding:], alone.sequences)
                own = tuple(logits[row * beams : (row + 1) * beams] for logits in each.logits)
                torch.testing.assert_close(own, alone.logits, atol=1e-9, rtol=0)

    def test_a_cache_serves_a_second_source(self, variant):
        """A handed-in cache that is reset holds nothing of the source before, whatever its length."""
        model = self.model(variant)
        decoder = model.config.get_text_config(decoder=True)
        growing = [EncoderDecoderCache(DynamicCache(config=decoder), DynamicCache(config=decoder))]
        for cache in (static_cache(model, 12), *(growing if resets_growing_layers() else [])):
            for length in (6, 3, 9):
                source = torch.randint(4, VOCABULARY, (2, length))
                cache.reset()
                settings = {"max_new_tokens": 4, "output_logits": True, "return_dict_in_generate": True}
                found = model.generate(source, **{CACHE: cache}, disable_compile=True, **settings)
                expected = model.generate(source, use_cache=False, **settings)
                torch.testing.assert_close(found.logits, expected.logits, atol=1e-9, rtol=0)

    def test_names_of_the_cache(self, variant):
        """Before 5.24 transformers named it `past_key_values`. Another name is refused, since it would be ignored."""
        model = self.model(variant)
        source, words = torch.randint(4, VOCABULARY, (2, 5)), torch.randint(4, VOCABULARY, (2, 4))
        encoded = model.get_encoder()(source)
        for part in (model, model.model):
            expected = part(source, decoder_input_ids=words)[0][:, 3:]
            for name in ("cache", "past_key_values"):
                cache = part(source, decoder_input_ids=words[:, :3], use_cache=True)[CACHE]
                found = part(encoder_outputs=encoded, decoder_input_ids=words[:, 3:], **{name: cache})
                assert found[CACHE] is cache
                torch.testing.assert_close(found[0], expected, atol=1e-10, rtol=0)
            with rejects(field="state"):
                part(source, decoder_input_ids=words, state=cache)

    def test_steps_equal_teacher_forcing(self, variant):
        model = self.model(variant)
        batch = ragged_batch()
        target = model.prepare_decoder_input_ids_from_labels(batch["labels"])
        inputs = source_of(batch)
        forced = model(**inputs, decoder_input_ids=target).logits
        encoder_outputs = model.get_encoder()(**inputs)
        cache, steps = None, []
        given = {"encoder_outputs": encoder_outputs, "attention_mask": batch["attention_mask"], "use_cache": True}
        for t in range(target.shape[1]):
            outputs = model(**given, decoder_input_ids=target[:, t : t + 1], cache=cache)
            cache = outputs[CACHE]
            assert cache.get_seq_length() == t + 1
            steps.append(outputs.logits)
        torch.testing.assert_close(torch.cat(steps, 1), forced, atol=1e-10, rtol=0)

    def test_memories_are_projected_once_per_source(self, variant, monkeypatch):
        """Five beams of two sentences: the encoder runs once, and each layer stores two rows of a memory once."""
        model, seen, rows = self.model(variant), [], []
        layer_class = type(model.model.decoder.prepare_cache(None, True).cross_attention_cache.layers[0])
        store = layer_class.store

        def watch(layer, name, keys, values):
            seen.append((id(layer), name, keys.shape[0]))
            store(layer, name, keys, values)

        monkeypatch.setattr(layer_class, "store", watch)
        model.get_encoder().register_forward_hook(lambda module, args, output: rows.append(len(output[0])))
        source = torch.randint(4, VOCABULARY, (2, 6))
        found = model.generate(source, num_beams=5, max_new_tokens=6, min_new_tokens=6, return_dict_in_generate=True)
        assert rows == [2] and {count for *_, count in seen} == {2} and len(set(seen)) == len(seen)
        layers = found[CACHE].cross_attention_cache.layers
        assert {place for place, name, _ in seen if name == "encoder"} == set(map(id, layers))

    def test_a_decoding_step_costs_a_fixed_number_of_operations(self, variant):
        model, cache, counts = self.model(variant, torch.float32), None, []

        class Count(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                counts[-1] += not function.is_view
                return function(*args, **(kwargs or {}))

        with torch.no_grad():
            inputs = {"encoder_outputs": model.get_encoder()(torch.randint(4, VOCABULARY, (2, 9))), "use_cache": True}
            for _ in range(5):
                counts.append(0)
                with Count():
                    words = torch.ones(8, 1, dtype=torch.long)
                    cache = model(decoder_input_ids=words, cache=cache, **inputs)[CACHE]
        assert len(set(counts[1:])) == 1, counts

    def test_beams_of_a_batch_equal_beams_of_single_sentences(self, variant):
        model = self.model(variant)
        batch = ragged_batch()
        settings = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 8, "min_new_tokens": 8}
        together = model.generate(**source_of(batch), **settings)
        for row, length in enumerate((7, 4, 1)):
            alone = model.generate(batch["input_ids"][row : row + 1, :length], **settings)
            assert torch.equal(together[2 * row : 2 * row + 2], alone)

    def test_beam_score_is_the_log_probability(self, variant):
        model = self.model(variant)
        batch = ragged_batch()
        settings = {"num_beams": 4, "max_new_tokens": 8, "length_penalty": 0.0, "output_scores": True}
        found = model.generate(**source_of(batch), **settings, return_dict_in_generate=True)
        tokens = found.sequences[:, 1:]
        logits = model(**source_of(batch), decoder_input_ids=found.sequences[:, :-1]).logits.log_softmax(-1)
        end = model.config.eos_token_id
        before_end = ((tokens == end).cumsum(1) - (tokens == end).long()) == 0
        sums = (logits.gather(-1, tokens[:, :, None])[:, :, 0] * before_end).sum(1)
        torch.testing.assert_close(found.sequences_scores.double(), sums, atol=1e-4, rtol=1e-5)

    def test_cache_select_repeat_reorder_reset(self, variant):
        """Rows of a filled cache can be selected, repeated and permuted, across sentences too."""
        model = self.model(variant)
        batch = ragged_batch()
        inputs = source_of(batch)
        prefix, following = torch.randint(4, VOCABULARY, (3, 3)), torch.randint(4, VOCABULARY, (3, 1))
        full = model(**inputs, decoder_input_ids=torch.cat([prefix, following], 1)).logits[:, -1:]
        encoded = model.get_encoder()(**inputs)

        def run(words, rows=slice(None), **cache):
            memory = copy.copy(encoded)
            for name, value in memory.items():
                if isinstance(value, torch.Tensor):
                    memory[name] = value[rows]
            mask = inputs["attention_mask"][rows]
            settings = {"encoder_outputs": memory, "attention_mask": mask, "use_cache": True}
            return model(decoder_input_ids=words[rows], **settings, **cache)

        repeated, shuffled = torch.arange(3).repeat_interleave(2), torch.tensor([5, 0, 3, 2, 1, 4])
        for rows, *changes in (
            (torch.tensor([2, 0, 1]), ("reorder_cache", torch.tensor([2, 0, 1]))),
            (torch.tensor([0, 2]), ("batch_select_indices", torch.tensor([0, 2]))),
            (repeated, ("batch_repeat_interleave", 2)),
            (repeated[shuffled], ("batch_repeat_interleave", 2), ("reorder_cache", shuffled)),
        ):
            cache = run(prefix)[CACHE]
            for name, argument in changes:
                getattr(cache, name)(argument)
            torch.testing.assert_close(run(following, rows, cache=cache).logits, full[rows], atol=1e-10, rtol=0)
        cache = run(prefix)[CACHE]
        cache.reset()
        assert all(not layer.is_initialized for layer in cache.cross_attention_cache.layers)
        assert cache.get_seq_length() == 0 or not resets_growing_layers()

    @pytest.mark.parametrize("role", ["main", "assistant"])
    @pytest.mark.parametrize("agreement", [0.02, 1.0], ids=["right-now-and-then", "wrong"])
    def test_assisted_decoding_equals_greedy(self, variant, role, agreement):
        """With a base Transformer as the other model, and one of its own kind; drafts rejected from the first token."""
        if version.parse(transformers.__version__) < version.parse("5.16"):
            pytest.skip("before 5.16 transformers leaves rejected drafts in the assistant's cache")
        model = self.model(variant)
        base = recnmt_hf.NMTTransformerForConditionalGeneration(recnmt_hf.NMTTransformerConfig(**TINY)).double().eval()
        base = scatter_parameters(base)
        twin = self.model(variant)
        generator = torch.Generator().manual_seed(6)
        with torch.no_grad():
            for parameter in twin.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.copy_((1 - agreement) * parameter + agreement * noise)
        source = torch.randint(4, VOCABULARY, (1, 6), generator=generator)
        settings = {"max_new_tokens": 10, "output_logits": True, "return_dict_in_generate": True}
        for main, other in ((model, twin), (model, base)) if role == "main" else ((twin, model), (base, model)):
            greedy = main.generate(source, **settings)
            found = main.generate(source, assistant_model=other, **settings)
            assert torch.equal(found.sequences, greedy.sequences)
            torch.testing.assert_close(found.logits, greedy.logits, atol=1e-9, rtol=0)
        found = model.generate(source, prompt_lookup_num_tokens=2, output_attentions=True, **settings)
        greedy = model.generate(source, **settings)
        torch.testing.assert_close(found.logits, greedy.logits, atol=1e-9, rtol=0)

    def test_eager_equals_sdpa(self, variant, monkeypatch):
        model = self.model(variant)
        batch = ragged_batch()
        assert model.config._attn_implementation == "sdpa"
        fused, calls = torch.nn.functional.scaled_dot_product_attention, []
        monkeypatch.setattr(
            torch.nn.functional,
            "scaled_dot_product_attention",
            lambda *args, **kwargs: (calls.append(1), fused(*args, **kwargs))[1],
        )
        expected = model(**batch).logits
        if not calls:
            pytest.skip("attends by no dot products that transformers has several implementations of")
        calls.clear()
        model.set_attn_implementation("eager")
        torch.testing.assert_close(model(**batch).logits, expected, atol=1e-10, rtol=0)
        assert not calls

    def test_encoder_and_decoder_are_found(self, variant):
        """As by transformers' own lookup: a text model has no encoder of images."""
        model = self.model(variant)
        assert model.get_encoder() is model.model.get_encoder() is model.model.encoder
        assert model.get_decoder() is model.model.get_decoder() is model.model.decoder
        assert model.get_encoder(modality="image") is model

    def test_gradients_of_hidden_states_can_be_kept(self, variant):
        model = self.model(variant)
        outputs = model(**ragged_batch(), output_hidden_states=True)
        # A decoder may read a memory of its own alone; then the encoder has no layers, and its input leads nowhere.
        encoded = outputs.encoder_hidden_states if len(outputs.encoder_hidden_states) > 1 else ()
        kept = [*encoded, *outputs.decoder_hidden_states]
        for states in kept:
            states.retain_grad()
        outputs.loss.backward()
        assert all(states.grad is not None and states.grad.abs().sum() > 0 for states in kept)

    def test_attentions_come_on_request(self, variant):
        model = self.model(variant)
        batch = ragged_batch()
        expected = model(**batch).logits
        outputs = model(**batch, output_attentions=True, output_hidden_states=True)
        torch.testing.assert_close(outputs.logits, expected, atol=1e-10, rtol=0)
        if outputs.cross_attentions == ():
            pytest.skip("this variant attends no source words")
        assert len(outputs.cross_attentions) == model.config.decoder_layers
        weights = outputs.cross_attentions[-1]
        assert weights.shape[0] == 3 and weights.shape[-2:] == (5, 7)
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))
        assert (weights[1, ..., 4:] == 0).all()
        assert outputs.decoder_hidden_states[-1].shape == (3, 5, model.config.d_model)

    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    def test_chunked_loss_equals_plain(self, variant, smoothing):
        """The loss without logits, its gradients, and torch's own smoothed cross-entropy agree."""
        model = self.model(variant)
        batch = ragged_batch()
        losses, gradients = [], []
        for return_logits in (True, False):
            model.zero_grad()
            outputs = model(**batch, smoothing=smoothing, return_logits=return_logits)
            assert (outputs.logits is not None) == return_logits
            outputs.loss.backward()
            losses.append(outputs.loss.detach())
            gradients.append(gradients_of(model))
        logits = model(**batch).logits
        reference = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=smoothing
        )
        torch.testing.assert_close(losses[0], reference.detach())
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(*gradients, atol=1e-10, rtol=1e-8)

    def test_the_loss_without_logits_has_no_second_derivative(self, variant):
        model = self.model(variant)
        loss = model(**ragged_batch(), return_logits=False).loss
        with rejects("Set the environment variable"):
            torch.autograd.grad(loss, model.lm_head.weight, create_graph=True)
        nothing = {**ragged_batch(), "labels": torch.full((3, 5), -100)}
        for settings in ({}, {"return_logits": False}):
            assert model(**nothing, num_items_in_batch=0, **settings).loss == 0

    def test_accumulated_loss_equals_one_batch(self, variant):
        model = self.model(variant)
        batch = ragged_batch()
        whole = model(**batch).loss
        count = (batch["labels"] != -100).sum()
        parts = [
            model(**{name: tensor[i : i + 1] for name, tensor in batch.items()}, num_items_in_batch=count).loss
            for i in range(3)
        ]
        torch.testing.assert_close(sum(parts), whole)

    def test_gradient_reaches_every_parameter(self, variant):
        model = self.model(variant).train()
        model(**ragged_batch()).loss.backward()
        without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
        assert without == []

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_gradient_checkpointing_changes_nothing(self, variant, reentrant):
        model = self.model(variant).train()
        batch = ragged_batch()

        def gradients():
            model.zero_grad()
            torch.manual_seed(4)
            model(**batch).loss.backward()
            return gradients_of(model)

        expected = gradients()
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": reentrant})
        torch.testing.assert_close(gradients(), expected, atol=1e-10, rtol=1e-8)

    def test_bfloat16_trains(self, variant):
        model = self.model(variant, torch.float32, scattered=False).train()
        batch = ragged_batch()
        with torch.autocast("cpu", torch.bfloat16):
            low = model(**batch, return_logits=False).loss
        low.backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())
        model.eval()
        with torch.autocast("cpu", torch.bfloat16):
            low = model(**batch, return_logits=False).loss
        torch.testing.assert_close(low, model(**batch).loss, atol=0.05, rtol=0.05)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=["fp16", "bf16", "fp64"])
    def test_any_dtype_loaded_in_any_way_runs(self, variant, dtype, tmp_path):
        """`dtype=`, saved in that type, `.to()`: loss, gradients, greedy search and beams, and near float32."""
        model = self.model(variant, torch.float32, scattered=False)
        batch = ragged_batch()
        expected = model(**batch).loss
        model.save_pretrained(tmp_path / "single")
        self.model(variant, dtype, scattered=False).save_pretrained(tmp_path / "own")
        ways = {
            "dtype=": self.model_class.from_pretrained(tmp_path / "single", dtype=dtype),
            "saved": self.model_class.from_pretrained(tmp_path / "own", dtype="auto"),
            "to": copy.deepcopy(model).to(dtype),
        }
        source = source_of(batch)
        tolerance = 1e-5 if dtype == torch.float64 else 0.05
        for name, each in ways.items():
            kinds = {p.dtype for p in each.parameters()} | {b.dtype for b in each.buffers() if b.is_floating_point()}
            assert kinds == {dtype}, name
            each.eval()
            torch.testing.assert_close(each(**batch).loss.float(), expected, atol=tolerance, rtol=tolerance)
            for beams in (1, 3):
                assert each.generate(**source, num_beams=beams, max_new_tokens=4).shape[0] == 3
            for settings in ({}, {"return_logits": False}):
                each.train()(**batch, **settings).loss.backward()
                assert all(torch.isfinite(p.grad).all() for p in each.parameters() if p.grad is not None), name
        table = {n: b for n, b in model.double().named_buffers() if n.endswith("table")}
        for name, loaded in ways["dtype="].double().named_buffers():
            if name in table and dtype == torch.float64:
                assert torch.equal(loaded, table[name]), "sinusoids have all digits of their type"

    def test_gradients_of_float16_under_a_scaler(self, variant):
        """The loss without logits gets the scaler's factor before anything is rounded to float16."""
        model = self.model({**variant, "vocab_size": 4000, "decoder_vocab_size": None}, torch.float32, False)
        batch = ragged_batch()

        def gradients(**settings):
            model.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(**batch, num_items_in_batch=1000, **settings).loss
            (loss * 2.0**16).backward()
            return {name: gradient / 2.0**16 for name, gradient in gradients_of(model).items()}

        plain, chunked = gradients(), gradients(return_logits=False)
        largest = max(gradient.abs().max().item() for gradient in plain.values())
        for name, gradient in plain.items():
            tolerance = 2e-2 * gradient.abs().max().item() + 1e-4 * largest
            torch.testing.assert_close(chunked[name], gradient, atol=tolerance, rtol=0.05)
        head = chunked["model.shared.weight" if "model.shared.weight" in chunked else "lm_head.weight"]
        assert (head == 0).float().mean() < 0.05

    def test_labels_outside_the_vocabulary_are_refused(self, variant):
        model = self.model(variant)
        for wrong in (-1, -99, VOCABULARY):
            batch = ragged_batch()
            batch["labels"][0, 1] = wrong
            target = torch.ones_like(batch["labels"])
            for settings in ({}, {"return_logits": False}, {"return_logits": False, "smoothing": 0.1}):
                with pytest.raises((IndexError, RuntimeError)):
                    model(**batch, decoder_input_ids=target, **settings)

    def losses_agree(self, model):
        """With and without logits, and in generation every layer is called."""
        batch = ragged_batch()
        expected = model(**batch).loss
        torch.testing.assert_close(model(**batch, return_logits=False).loss, expected, atol=1e-5, rtol=1e-4)
        for beams in (1, 3):
            assert model.generate(**source_of(batch), num_beams=beams, max_new_tokens=4).shape[0] == 3
        return expected

    def test_adapters_on_every_linear_layer(self, variant):
        """LoRA on all projections and the output matrix counts in every loss and gets the same gradients from each."""
        peft = pytest.importorskip("peft", reason="peft is not installed")
        model = self.model(variant)
        before = model(**ragged_batch()).loss.detach()
        linears = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]
        settings = peft.LoraConfig(r=2, target_modules=linears, init_lora_weights=False, task_type="SEQ_2_SEQ_LM")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of adapters on tied matrices
            adapted = peft.get_peft_model(copy.deepcopy(model), settings).eval()
        after = self.losses_agree(adapted)
        assert abs(after - before) > 1e-3
        found = []
        for settings in ({}, {"return_logits": False}):
            adapted.zero_grad()
            adapted(**ragged_batch(), **settings).loss.backward()
            found.append(gradients_of(adapted))
        assert any("lm_head" in name for name in found[0])
        torch.testing.assert_close(*found, atol=1e-9, rtol=1e-7)
        with adapted.disable_adapter():
            torch.testing.assert_close(self.losses_agree(adapted), before)

    def test_learned_prefix(self, variant):
        """PEFT's prefix tuning hands in a cache that holds keys and values already."""
        peft = pytest.importorskip("peft", reason="peft is not installed")
        model = self.model(variant, torch.float32, scattered=False)
        # RNMT's configuration file has no number of heads, which PEFT asks for.
        settings = peft.PrefixTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=3, num_attention_heads=4)
        tuned = peft.get_peft_model(model, settings)
        batch = ragged_batch()
        if model.config.cache_layer_types() is not None:
            with rejects(field="cache"):
                tuned(**batch)
            return
        loss = tuned(**batch).loss
        loss.backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in tuned.parameters() if p.requires_grad)
        torch.testing.assert_close(tuned(**batch, return_logits=False).loss, loss)
        tuned.eval()
        assert tuned.generate(**source_of(batch), max_new_tokens=4, num_beams=2).shape[0] == 3

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_dynamic_quantization(self, variant):
        """torch's own 8-bit linear layers, whose weight is no tensor."""
        model = self.model(variant, torch.float32, scattered=False)
        expected = model(**ragged_batch()).loss
        quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, torch.qint8)
        torch.testing.assert_close(self.losses_agree(quantized), expected, atol=0.1, rtol=0.05)

    def test_weight_only_quantization(self, variant):
        quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
        model = self.model(variant, torch.float32, scattered=False)
        expected = model(**ragged_batch()).loss
        model.requires_grad_(False)
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
        torch.testing.assert_close(self.losses_agree(model), expected, atol=0.1, rtol=0.05)

    def test_modules_with_hooks_are_called(self, variant):
        """As tools that observe or replace modules need it: fast paths would read their parameters only."""
        model, batch = self.model({**self.one_layer, **variant}), ragged_batch()
        expected = model(**batch).loss
        for name, module in model.named_modules():
            if isinstance(module, (torch.nn.Linear, torch.nn.RNNCellBase)):
                calls = []
                hook = module.register_forward_hook(lambda *args, calls=calls: calls.append(args))
                torch.testing.assert_close(model(**batch).loss, expected, atol=1e-10, rtol=0)
                assert calls or any(part in name for part in self.called_in_training), name
                hook.remove()

    def test_saved_model_loads_bit_equal(self, variant, tmp_path):
        model = self.model(variant, torch.float32)
        model.save_pretrained(tmp_path)
        batch = ragged_batch()
        for kind in (self.model_class, AutoModelForSeq2SeqLM):
            loaded, report = kind.from_pretrained(tmp_path, output_loading_info=True)
            assert type(loaded) is self.model_class and not any(report.values())
            torch.testing.assert_close(loaded.state_dict(), model.state_dict(), atol=0, rtol=0)
            assert torch.equal(aligned(loaded)(**batch).logits, model(**batch).logits)
        assert not list(tmp_path.glob("*.bin")), "weights are saved as safetensors"
        assert type(AutoConfig.from_pretrained(tmp_path)) is self.config_class
        base = AutoModel.from_pretrained(tmp_path)
        torch.testing.assert_close(base.state_dict(), model.model.state_dict(), atol=0, rtol=0)

    def test_an_output_matrix_that_came_apart_is_saved(self, variant, tmp_path):
        """As adapters leave it that trained a copy of a tied matrix and were merged."""
        model = self.model(
            {**variant, "tie_word_embeddings": True, "share_encoder_decoder_embeddings": True}, torch.float32
        )
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
        model.save_pretrained(tmp_path)
        loaded = self.model_class.from_pretrained(tmp_path).eval()
        assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
        assert torch.equal(aligned(loaded)(**ragged_batch()).logits, model(**ragged_batch()).logits)
        decoder = model.model.decoder
        decoder.embed_tokens = torch.nn.Embedding.from_pretrained(torch.randn_like(decoder.embed_tokens.weight))
        with rejects(field="model.decoder.embed_tokens.weight"):
            model.save_pretrained(tmp_path / "two")

    def test_a_missing_embedding_is_reported_and_initialized(self, variant, tmp_path):
        model = self.model({**variant, "share_encoder_decoder_embeddings": True}, torch.float32)
        model.save_pretrained(tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        missing = [name for name in tensors if name.endswith(("shared.weight", "embed_tokens.weight"))]
        rest = {name: tensor for name, tensor in tensors.items() if name not in missing}
        save_file(rest, tmp_path / "model.safetensors", {"format": "pt"})
        for model_class in (self.model_class, type(model.model)):
            loaded, report = model_class.from_pretrained(tmp_path, output_loading_info=True)
            assert any("shared.weight" in name for name in report["missing_keys"])
            assert not any(parameter.is_meta for parameter in loaded.parameters())
            embedding = loaded.get_input_embeddings().weight
            assert torch.isfinite(embedding).all() and 0 < embedding.std() < 1

    @pytest.mark.parametrize("share", [True, False], ids=["shared", "separate"])
    def test_the_bare_model_resizes(self, variant, share, tmp_path):
        model = self.model({**variant, "share_encoder_decoder_embeddings": share}, torch.float32).model
        model.resize_token_embeddings(VOCABULARY + 5)
        assert model.config.vocab_size == model.encoder.embed_tokens.num_embeddings == VOCABULARY + 5
        assert model.config.decoder_vocab_size == model.decoder.embed_tokens.num_embeddings
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path)
        assert torch.equal(loaded.get_input_embeddings().weight, model.get_input_embeddings().weight)

    def test_a_subclass_is_saved_with_code_that_loads(self, variant, tmp_path):
        """A user's own classes stand in no file that the Hub would have: the folder names those of the zoo."""

        class OwnConfig(self.config_class):
            pass

        class Own(self.model_class):
            config: OwnConfig

        model = Own(OwnConfig(**self.config(**variant).to_diff_dict()))
        model.save_pretrained(tmp_path)
        names = json.loads((tmp_path / "config.json").read_text())["auto_map"]
        assert set(names) == {"AutoConfig", "AutoModel", "AutoModelForSeq2SeqLM"}
        for name in names.values():
            module, wanted = name.split(".")
            assert f"class {wanted}(" in (tmp_path / f"{module}.py").read_text()
        assert type(Own.from_pretrained(tmp_path)) is Own
        assert type(AutoModelForSeq2SeqLM.from_pretrained(tmp_path)) is self.model_class

    @pytest.mark.parametrize("share", [True, False], ids=["shared", "separate"])
    @pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
    def test_tied_embeddings(self, variant, share, tie, tmp_path):
        fields = {**variant, "share_encoder_decoder_embeddings": share, "tie_word_embeddings": tie}
        if not share:
            fields["decoder_vocab_size"] = VOCABULARY - 4
        model = self.model(fields, torch.float32)

        def check(model):
            encoder, decoder = model.model.encoder.embed_tokens.weight, model.model.decoder.embed_tokens.weight
            assert (encoder.data_ptr() == decoder.data_ptr()) == share
            assert (decoder.data_ptr() == model.lm_head.weight.data_ptr()) == tie
            return len({p.data_ptr() for p in (encoder, decoder, model.lm_head.weight)})

        assert check(model) == 3 - share - tie
        model.save_pretrained(tmp_path)
        loaded = self.model_class.from_pretrained(tmp_path)
        check(loaded)
        source = torch.randint(4, VOCABULARY - 4, (2, 5))
        expected = model(source, decoder_input_ids=source).logits
        assert torch.equal(aligned(loaded)(source, decoder_input_ids=source).logits, expected)
        if share:
            model.resize_token_embeddings(VOCABULARY + 5)
            check(model)
        else:
            model.resize_token_embeddings(VOCABULARY + 5)
            model.resize_decoder_token_embeddings(VOCABULARY + 5)
        resized = model(source, decoder_input_ids=source).logits
        assert resized.shape[-1] == VOCABULARY + 5
        torch.testing.assert_close(resized[..., : expected.shape[-1]], expected)
        model.save_pretrained(tmp_path / "resized")
        loaded = self.model_class.from_pretrained(tmp_path / "resized")
        assert torch.equal(aligned(loaded)(source, decoder_input_ids=source).logits, resized)

    def test_warm_start_from_baseline(self, variant, tmp_path):
        baseline = recnmt_hf.NMTTransformerForConditionalGeneration(recnmt_hf.NMTTransformerConfig(**TINY))
        baseline.save_pretrained(tmp_path)
        # The baseline has one vocabulary; models that default to two are given one too.
        model = self.model_class(self.config(**{**variant, "share_encoder_decoder_embeddings": True}))
        report = model.init_from_baseline(tmp_path)
        own, theirs = model.state_dict(), baseline.state_dict()
        assert "model.shared.weight" in report.copied
        for name in report.copied:
            assert torch.equal(own[name], theirs[name]), name
        assert set(report.copied).isdisjoint(report.fresh)
        reported = set(report.copied) | set(report.fresh)
        assert reported >= {name for name, _ in model.named_parameters()}
        assert reported - {name for name, _ in model.named_buffers()} <= {name for name, _ in model.named_parameters()}
        with rejects(field=str(tmp_path.parent)):
            model.init_from_baseline(tmp_path.parent)

    def test_warm_start_from_its_own_baseline(self, variant):
        """All that the baseline has is copied; the plain model is then the baseline."""
        config = self.config(**variant).baseline()
        if config is None:
            pytest.skip("this variant is a baseline itself")
        baseline = scatter_parameters(AutoModelForSeq2SeqLM.from_config(config).double()).eval()
        model = self.model(variant)
        own, theirs = model.state_dict(), baseline.state_dict()
        report = model.init_from_baseline(baseline)
        is_shared = {name: name in theirs and theirs[name].shape == own[name].shape for name in own}
        assert report.copied and report.fresh and not any(is_shared[name] for name in report.fresh)
        assert all(torch.equal(own[name], theirs[name]) for name in report.copied)
        assert not any(is_shared.get(name) for name in report.unused) and config.baseline() is None

    def test_the_plain_model_is_its_baseline(self):
        if self.plain is None:
            pytest.skip("the baseline has this class itself")
        plain = self.model(self.plain)
        baseline = scatter_parameters(AutoModelForSeq2SeqLM.from_config(self.config().baseline()).double()).eval()
        report = plain.init_from_baseline(baseline)
        assert report.fresh == report.unused == [] and plain.config.baseline() is None
        torch.testing.assert_close(plain(**ragged_batch()).logits, baseline(**ragged_batch()).logits)

    def test_parameters_beyond_those_of_the_baseline(self):
        for preset, fields, number in self.growth:
            config = self.config_class.from_preset(preset, vocab_size=100, **fields)
            with torch.device("meta"):
                sizes = [
                    AutoModelForSeq2SeqLM.from_config(each).num_parameters() for each in (config, config.baseline())
                ]
            assert sizes[0] - sizes[1] == number, (preset, fields)

    @pytest.mark.slow
    def test_hub_code_loads_without_the_package(self, tmp_path, stranger):
        """Saved folders of all variants generate the same tokens in a process that cannot import recnmt_hf."""
        source = torch.randint(4, VOCABULARY, (2, 5))
        expected = {}
        for variant, fields in self.variants.items():
            model = self.model(fields, torch.float32)
            model.save_pretrained(tmp_path / variant)
            expected[variant] = model.generate(source, num_beams=3, max_new_tokens=7).tolist()
        code = f"""
            import torch
            from transformers import AutoModel, AutoModelForSeq2SeqLM
            source, found = torch.tensor({source.tolist()}), {{}}
            for variant in {list(self.variants)}:
                model = AutoModelForSeq2SeqLM.from_pretrained(variant, trust_remote_code=True).eval()
                base = AutoModel.from_pretrained(variant, trust_remote_code=True)
                model.save_pretrained(variant + "-again")
                again = AutoModelForSeq2SeqLM.from_pretrained(variant + "-again", trust_remote_code=True).eval()
                each = [m.generate(source, num_beams=3, max_new_tokens=7).tolist() for m in (model, again)]
                found[variant] = each
        """
        found = stranger(code, tmp_path)
        assert found == {variant: [tokens, tokens] for variant, tokens in expected.items()}

    def test_encoder_outputs_may_be_given_in_any_form(self, variant):
        model = self.model(variant)
        batch = ragged_batch()
        expected = model(**batch).logits
        encoded = model.get_encoder()(batch["input_ids"], batch["attention_mask"])
        rest = {"attention_mask": batch["attention_mask"], "labels": batch["labels"]}
        forms = [encoded, tuple(getattr(encoded, field.name) for field in dataclasses.fields(encoded)), dict(encoded)]
        for evidence in ({}, {"output_attentions": True}, {"output_hidden_states": True}):
            form = model.get_encoder()(batch["input_ids"], batch["attention_mask"], return_dict=False, **evidence)
            assert type(form) is tuple
            forms.append(form)
        if type(encoded).__mro__[1] is BaseModelOutput:
            forms.append(BaseModelOutput(last_hidden_state=encoded.last_hidden_state))
        for form in forms:
            torch.testing.assert_close(model(encoder_outputs=form, **rest).logits, expected, atol=1e-10, rtol=0)
        found = model.generate(encoder_outputs=encoded, attention_mask=batch["attention_mask"], max_new_tokens=5)
        assert torch.equal(found, model.generate(**source_of(batch), max_new_tokens=5))

    def test_embeddings_replace_ids(self, variant):
        model = self.model(variant)
        batch = ragged_batch()
        expected = model(**batch).logits
        embedded = model.get_input_embeddings()(batch.pop("input_ids"))
        torch.testing.assert_close(model(inputs_embeds=embedded, **batch).logits, expected)

    def test_predictions_of_the_trainer_are_the_logits(self, variant):
        """All that an output holds beside loss and logits is named for it."""
        model, source = self.model(variant), torch.full((1, 3), 5)
        outputs = model(source, decoder_input_ids=source, use_cache=True, output_attentions=True)
        usual = {f"{side}_{name}" for side in ("encoder", "decoder") for name in ("attentions", "hidden_states")}
        ignored = {*model.config.keys_to_ignore_at_inference, "logits", "cross_attentions", *usual}
        assert set(outputs) <= ignored and "auxiliary_loss" in ignored

    def test_tuple_output(self, variant):
        model = self.model(variant)
        batch = ragged_batch()
        loss, logits, *_ = model(**batch, return_dict=False)
        outputs = model(**batch)
        assert torch.equal(loss, outputs.loss) and torch.equal(logits, outputs.logits)

    @torch.no_grad()
    def test_outputs_can_be_copied_pickled_and_saved(self, variant):
        model = self.model(variant)
        source = source_of(ragged_batch())
        inputs = {**source, "decoder_input_ids": source["input_ids"], "use_cache": True, "output_attentions": True}
        made = [model.get_encoder()(**source, output_attentions=True), model.model(**inputs), model(**inputs)]
        made.append(model.generate(**source, max_new_tokens=2, return_dict_in_generate=True, output_attentions=True))
        for outputs in made:
            file = io.BytesIO()
            torch.save(outputs, file)
            file.seek(0)
            loaded = torch.load(file, weights_only=False)
            for found in (copy.deepcopy(outputs), pickle.loads(pickle.dumps(outputs)), loaded):
                assert type(found) is type(outputs) and found.keys() == outputs.keys()
                for name, value in outputs.items():
                    if isinstance(value, torch.Tensor):
                        assert torch.equal(found[name], value), name

    def test_missing_inputs_are_named(self, variant):
        model = self.model(variant)
        with rejects(field="input_ids"):
            model(decoder_input_ids=torch.tensor([[1]]))
        for called in (model, model.model):
            with rejects(field="decoder_input_ids"):
                called(torch.tensor([[5, 2]]))

    def test_dummy_inputs(self, variant):
        """Check the inputs with which transformers' tools call an unknown model."""
        model = self.model(variant)
        assert model(**model.dummy_inputs).logits.shape[0] == model.dummy_inputs["input_ids"].shape[0]
        assert model.model(**model.model.dummy_inputs).last_hidden_state.isfinite().all()

    @pytest.mark.slow
    @needs_compiler
    def test_compiled_graphs_serve_all_lengths(self, variant):
        """
        Forward and backward passes over several lengths: as many graphs as MarianMT, no breaks, eager's gradients.
        """
        config = self.config(**{**self.one_layer, **variant})
        for name in ("dropout", "attention_dropout", "activation_dropout", "readout_dropout"):
            if hasattr(config, name):
                setattr(config, name, 0.0)
        torch.manual_seed(5)
        model = scatter_parameters(self.model_class(config).double(), std=0.1).train()
        settings = self.compiled if variant == self.variants["default"] else self.compiled_variants
        graphs, breaks = count_training(model, **settings)
        assert breaks == 0 and graphs <= graphs_of_marian(count_training, **settings)

    @pytest.mark.slow
    @needs_compiler
    def test_compiled_by_transformations_of_the_graph(self):
        """Whether kernels can be made of a graph, backward passes included; and of a step with a static cache."""
        model = self.model({**self.one_layer, **self.variants["default"]}, torch.float32)
        batch = ragged_batch()
        expected = model(**batch).logits
        torch._dynamo.reset()  # what other models compiled counts against the limit of recompilations
        compiled = torch.compile(model, backend="aot_eager", fullgraph=model._can_compile_fullgraph)
        torch.testing.assert_close(compiled(**batch).logits, expected, atol=1e-5, rtol=1e-5)
        options = CompileConfig(backend="eager", fullgraph=model._can_compile_fullgraph, dynamic=False)
        options._compile_all_devices = True  # generation compiles steps with a static cache, on accelerators alone
        static = {"cache_implementation": "static", "compile_config": options, "max_new_tokens": 4}
        source = source_of(batch)
        assert model.generate(**source, **static).equal(model.generate(**source, max_new_tokens=4))

    @pytest.mark.slow
    @pytest.mark.skipif(
        not hasattr(torch.compiler, "is_exporting"), reason="this torch unrolls recurrences in exported graphs"
    )
    def test_an_exported_graph_is_free_of_batch_and_lengths(self):
        """
        Other numbers and lengths of sentences than those it was made with give the same logits. Another variant of
        every family is exported in hub/test_onnx.py.
        """
        model = self.model({**self.one_layer, **self.variants["default"]})
        rows, source, target = (torch.export.Dim(name, min=2) for name in ("batch_size", "length", "target_length"))

        def inputs(*lengths, words=5):
            batch = ragged_batch(lengths, [words] * (len(lengths) - 1) + [words - 1])
            labels = batch.pop("labels")
            target = {"decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels)}
            target["decoder_attention_mask"] = (labels != -100).long()
            return {**batch, **target, "use_cache": False}

        shapes = {name: {0: rows, 1: source} for name in ("input_ids", "attention_mask")}
        shapes |= {name: {0: rows, 1: target} for name in ("decoder_input_ids", "decoder_attention_mask")}
        shapes["use_cache"] = None
        torch.compiler.reset()  # lengths that other tests' graphs were made for would count as fixed
        with torch.no_grad():
            program = torch.export.export(model, (), inputs(7, 4, 1), dynamic_shapes=shapes, strict=False).module()
            for lengths, words in (((7, 4, 1), 5), ((12, 3), 9), ((2, 3, 1, 3, 2), 2)):
                given = inputs(*lengths, words=words)
                torch.testing.assert_close(program(**given).logits, model(**given).logits, atol=1e-9, rtol=0)

    @pytest.mark.slow
    def test_learns_short_sequences(self):
        """A few hundred steps on random digits: reversing them is learned almost perfectly."""
        torch.manual_seed(7)
        model = self.model_class(self.config(**{**self.variants["default"], "dropout": 0.0})).train()
        for name in ("attention_dropout", "activation_dropout"):
            setattr(model.config, name, 0.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / 60, 1.0, (600 - s) / 200))

        def batch(count):
            digits = torch.randint(4, 14, (count, 5))
            return digits, torch.cat([digits.flip(1), torch.full((count, 1), 2)], 1)

        def share_learned():
            source, labels = batch(100)
            found = model.eval().generate(source, num_beams=2, max_new_tokens=6, min_new_tokens=6, eos_token_id=None)
            model.train()
            return (found[:, 1:6] == labels[:, :5]).all(1).float().mean()

        for step in range(1, 601):
            source, labels = batch(64)
            model(input_ids=source, labels=labels, return_logits=False).loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if step % 50 == 0 and share_learned() >= 0.97:
                return
        assert share_learned() >= 0.9
