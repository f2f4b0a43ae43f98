"""
The models, and all code that is saved with a checkpoint.

**Rules.** The folder is flat. Its files import torch, transformers (with safetensors and huggingface_hub) and siblings
as `from .name import ...`: `save_pretrained` copies the file of a registered class and the siblings that it imports,
recursively, and nothing more. A saved folder therefore loads with `trust_remote_code=True` where this package is not
installed. Nothing here starts a process, or a compiler but Triton's. Loaded as remote code, a class may exist twice: no
`isinstance` against our own configuration, output or cache classes. A shared file never checks which model uses it:
models override methods and pass modules.

**Files of a family.** `configuration_<family>.py` has the fields and their checks, `modeling_<family>.py` the
mechanisms in the order of the paper, each equation above the line that computes it, with a plain reference, and
`kernels_<family>.py` fast paths with the results of the references. `kernels_triton_<family>.py` has kernels for GPUs,
which are imported where Triton is installed (`try: import triton`). All other files are shared.

**A forward pass** of a generating class:

1. `Seq2SeqModelBase.forward` calls the encoder: `embed_input` adds positions to the scaled embeddings, `run`
   applies the layers, `finish` makes the output, where a model adds memories and extra outputs.
2. `memories` collects what the decoder reads: a dict maps names to `Memory(states, token_mask, kernel_mask)`, with
   one row per source. `"encoder"` is the memory that every decoder layer attends.
3. The decoder prepares the cache and the kernel masks of the memories (once per generation), and calls `embed_input`,
   `run` and `finish`. Layers receive all memories. Beams of a source are more queries to the same memory.
4. The output layer makes logits, or the loss is computed without them. Extra outputs reach the result by their names.

There are two masks. The *token mask* has the shape `(batch_size, length)`, 1 keeps; it is the `attention_mask` that
users pass. The *kernel mask* is the same in the form that the attention kernels expect.

**Generation.** `cache` is transformers' `EncoderDecoderCache`: keys, values and recurrent states, and as the part of
the cross-attention the projected memories and what all layers share (`decoder_cache.py`).

**Fast paths** are chosen by fixed rules of device, data type and shape, in functions such as `takes_onednn`,
`few_steps` and `saves_votes`. A reference is used where no rule applies, where parameters cannot be read directly
(`is_plain`: adapters, hooks, quantization), and with `RECNMT_FAST_PATHS=0`. Tests tie outputs and gradients of both.
While a model generates on the CPU, its linear layers keep a second copy of their weights (`pack_weights`).
`quantize_model` skips the layers that `read_layers` of a module names, and sets `step_layers` and `input_layers`, the
int8 matmuls of a recurrence. A hand-written backward pass derives from `CustomGradient`. A loop over words is a
`graph_operator`, so that a compiled graph has one node for all lengths; in an exported graph it is a `scan`.
"""
