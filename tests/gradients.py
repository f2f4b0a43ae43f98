"""Check of written backward passes against differences."""

import torch


def check_gradients(function, inputs):
    """
    Raise an error unless the gradients for double precision inputs are right along random directions: a few calls in
    place of two for each number, with tolerances a hundredth of torch's own.
    """
    torch.autograd.gradcheck(function, inputs, fast_mode=True, rtol=1e-5, atol=1e-7)
