"""Fully sharded models: the same losses and gradients as whole ones, on two processes."""

import os
import subprocess
import sys
import textwrap

import pytest


PROGRAM = """
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    import recnmt_hf

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    config = recnmt_hf.NMTTransformerConfig.from_preset("tiny", vocab_size=50, d_model=32, dropout=0.0)

    def build():
        torch.manual_seed(1)
        return recnmt_hf.NMTTransformerForConditionalGeneration(config)

    whole, sharded = build(), build()
    for layer in [*sharded.model.encoder.layers, *sharded.model.decoder.layers]:
        fully_shard(layer)
    fully_shard(sharded)
    torch.manual_seed(5 + rank)
    batch = {"input_ids": torch.randint(4, 50, (4, 7)), "labels": torch.randint(4, 50, (4, 5)), "label_smoothing": 0.1}
    for return_logits in (False, True):
        losses = [model(**batch, return_logits=return_logits).loss for model in (sharded, whole)]
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
        for (name, shard), full in zip(sharded.named_parameters(), whole.parameters(), strict=True):
            mean = full.grad.clone()
            dist.all_reduce(mean)
            torch.testing.assert_close(shard.grad.full_tensor(), mean / 2, atol=1e-6, rtol=1e-5)
        sharded.zero_grad()
        whole.zero_grad()
    print("equal")
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_fully_sharded_step_equals_a_whole_one(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    port = str(20000 + (os.getpid() + 7919) % 20000)
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port, str(program)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.count("equal") == 2
