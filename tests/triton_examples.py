"""Parts of models with Triton kernels; each has an `example` by which kernels are compared with torch's operators."""

from recnmt_hf.models import (
    kernels_attentional_steps,
    kernels_onlstm_transformer,
    kernels_triton_gru,
    kernels_vrnmt,
    light_decoders,
)


WITH_KERNELS = [
    kernels_onlstm_transformer,
    kernels_attentional_steps,
    kernels_vrnmt.LatentPart,
    kernels_triton_gru,
    light_decoders,
]
