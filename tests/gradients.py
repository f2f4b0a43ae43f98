"""Checks of written backward passes: against differences, and of the memory that they take."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def check_gradients(function, inputs):
    """
    Raise an error unless the gradients for double precision inputs are right along random directions: a few calls in
    place of two for each number, with tolerances a hundredth of torch's own.
    """
    torch.autograd.gradcheck(function, inputs, fast_mode=True, rtol=1e-5, atol=1e-7)


class LargestTensor(TorchDispatchMode):
    """While it is entered, `nbytes` is the size of the largest storage behind what operations put out."""

    nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        for output in outputs if isinstance(outputs, (tuple, list)) else [outputs]:
            if isinstance(output, torch.Tensor):
                self.nbytes = max(self.nbytes, output.untyped_storage().nbytes())
        return outputs
