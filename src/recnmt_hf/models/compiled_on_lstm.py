"""
The steps of an ON-LSTM (Shen et al., 2019) in C: between two matmuls one pass over a sentence's gates, where torch's
operations are dozens. `ordered_neurons` has the same steps of torch's operations, and takes these where they gain.
"""

import ctypes
import functools
import itertools
from collections.abc import Sequence

import torch

from .compiled_code import compiled
from .step_matmuls import StepMatmuls


SOURCE = r"""
#include <stdint.h>
#include <string.h>

#define PRAGMA(text) _Pragma(#text)
#define SIMD PRAGMA(omp simd)
/* Sentences whose sums are made side by side: each sum is a chain of additions that wait for one another. */
#define ROWS 4

/* e^x = 2^n e^r, |r| <= ln(2) / 2, with the series of e^r. */
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the last bits are n */
    const float n = shifted - 12582912.0f;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f; /* ln(2) in two parts */
    float series = 1.0f / 5040;
    series = series * r + 1.0f / 720;
    series = series * r + 1.0f / 120;
    series = series * r + 1.0f / 24;
    series = series * r + 1.0f / 6;
    series = series * r + 0.5f;
    series = series * r + 1.0f;
    series = series * r + 1.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits << 23) + 0x3f800000u;
    float power;
    memcpy(&power, &bits, sizeof power);
    return series * power;
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

static void spread(const float *units, int64_t count, int64_t chunk, float *channels) {
    for (int64_t unit = 0; unit < count; unit++)
        for (int64_t k = 0; k < chunk; k++) channels[unit * chunk + k] = units[unit];
}

/*
 * gates (rows, 4 size + 2 units): before, the inputs' part of f, i, o, c^, f~, i~; after, the gates, of c^ the sigmoid
 * of twice its score. product (rows, 4 size + 2 units): the states' part, or none. shares (rows, 2, units): the softmax
 * of the master gates. before, cells, states (rows, size): the cells of the step before, or none, and the results.
 */
void forward_step(int64_t rows, int64_t size, int64_t chunk, float *gates, const float *product, float *shares,
                  const float *before, float *cells, float *states) {
    const int64_t units = size / chunk, width = 4 * size + 2 * units;
    for (int64_t first = 0; first < rows; first += ROWS) {
        const int64_t end = first + ROWS < rows ? first + ROWS : rows;
        for (int64_t row = first; row < end; row++) {
            float *own = gates + row * width;
            if (product) {
                const float *added = product + row * width;
                SIMD
                for (int64_t k = 0; k < width; k++) own[k] += added[k];
            }
            SIMD
            for (int64_t k = 0; k < 3 * size; k++) own[k] = sigmoid(own[k]);
            SIMD
            for (int64_t k = 3 * size; k < 4 * size; k++) own[k] = sigmoid(2.0f * own[k]);
            for (int64_t part = 0; part < 2; part++) {
                const float *scores = own + 4 * size + part * units;
                float *share = shares + (2 * row + part) * units, highest = scores[0], total = 0.0f;
                PRAGMA(omp simd reduction(max : highest))
                for (int64_t k = 0; k < units; k++) highest = scores[k] > highest ? scores[k] : highest;
                PRAGMA(omp simd reduction(+ : total))
                for (int64_t k = 0; k < units; k++) total += share[k] = exponential(scores[k] - highest);
                SIMD
                for (int64_t k = 0; k < units; k++) share[k] /= total;
            }
        }
        const float *share[2 * ROWS];
        float *master[2 * ROWS];
        double sums[2 * ROWS] = {0};
        for (int64_t each = 0; each < 2 * (end - first); each++) {
            share[each] = shares + (2 * first + each) * units;
            master[each] = gates + (first + each / 2) * width + 4 * size + (each % 2) * units;
        }
        if (end - first == ROWS) { /* a number that the compiler knows */
            for (int64_t k = 0; k < units; k++)
                for (int64_t each = 0; each < 2 * ROWS; each++) master[each][k] = (float)(sums[each] += share[each][k]);
        } else {
            for (int64_t each = 0; each < 2 * (end - first); each++)
                for (int64_t k = 0; k < units; k++) master[each][k] = (float)(sums[each] += share[each][k]);
        }
        for (int64_t row = first; row < end; row++) {
            float *own = gates + row * width, *upper = own + 4 * size, *lower = upper + units;
            const float *forget = own, *into = own + size, *out = own + 2 * size, *doubled = own + 3 * size;
            const float *old = before ? before + row * size : 0;
            float *cell = cells + row * size, *state = states + row * size, channels[chunk > 1 ? 2 * size : 1];
            upper[units - 1] = lower[units - 1] = 1.0f;
            SIMD
            for (int64_t k = 0; k < units; k++) lower[k] = 1.0f - lower[k];
            if (chunk > 1) {
                spread(upper, units, chunk, channels);
                spread(lower, units, chunk, channels + size);
                upper = channels;
                lower = channels + size;
            }
            SIMD
            for (int64_t k = 0; k < size; k++) {
                /* Of w = f~ i~: f w + f~ - w = f~ - w (1 - f), and i w + i~ - w = i~ - w (1 - i). */
                const float overlap = upper[k] * lower[k];
                const float of_cell = upper[k] - overlap * (1.0f - forget[k]);
                const float of_new = lower[k] - overlap * (1.0f - into[k]);
                const float value = of_new * (2.0f * doubled[k] - 1.0f) + (old ? of_cell * old[k] : 0.0f);
                cell[k] = value;
                state[k] = out[k] * (2.0f * sigmoid(2.0f * value) - 1.0f);
            }
        }
    }
}

/*
 * gates, shares, before, cells: as forward_step left them. given (rows, size): the gradient of the states. later
 * (later_rows <= rows, size): what came to it through the next step. grad_cells (rows, size): the gradient of the
 * cells, becomes that of the step before. gradients (rows, 4 size + 2 units): of the gates' scores; it may be gates.
 */
void backward_step(int64_t rows, int64_t size, int64_t chunk, const float *gates, const float *shares,
                   const float *before, const float *cells, const float *given, int64_t later_rows, const float *later,
                   float *grad_cells, float *gradients) {
    const int64_t units = size / chunk, width = 4 * size + 2 * units;
    float of_sums[2 * ROWS][units], channels[chunk > 1 ? 4 * size : 1];
    for (int64_t first = 0; first < rows; first += ROWS) {
        const int64_t end = first + ROWS < rows ? first + ROWS : rows;
        for (int64_t row = first; row < end; row++) {
            const float *own = gates + row * width, *cell = cells + row * size;
            const float *forget = own, *into = own + size, *out = own + 2 * size, *doubled = own + 3 * size;
            const float *upper = own + 4 * size, *lower = upper + units, *old = before ? before + row * size : 0;
            const float *from_states = given + row * size, *from_later = row < later_rows ? later + row * size : 0;
            float *grad_cell = grad_cells + row * size, *found = gradients + row * width;
            float *to_upper = of_sums[2 * (row - first)], *to_lower = of_sums[2 * (row - first) + 1];
            if (chunk > 1) {
                spread(upper, units, chunk, channels);
                spread(lower, units, chunk, channels + size);
                upper = channels;
                lower = channels + size;
                to_upper = channels + 2 * size;
                to_lower = channels + 3 * size;
            }
            SIMD
            for (int64_t k = 0; k < size; k++) {
                const float f = forget[k], i = into[k], o = out[k], new = 2.0f * doubled[k] - 1.0f;
                const float overlap = upper[k] * lower[k], old_cell = old ? old[k] : 0.0f;
                const float squashed = 2.0f * sigmoid(2.0f * cell[k]) - 1.0f;
                const float mixed = old_cell * (1.0f - f) + new * (1.0f - i);
                const float of_state = from_states[k] + (from_later ? from_later[k] : 0.0f);
                const float of_cell = grad_cell[k] + of_state * o * (1.0f - squashed * squashed);
                grad_cell[k] = of_cell * (upper[k] - overlap * (1.0f - f));
                to_upper[k] = of_cell * (old_cell - lower[k] * mixed);
                to_lower[k] = of_cell * (upper[k] * mixed - new); /* i~ is one less its sum */
                found[k] = of_cell * old_cell * overlap * f * (1.0f - f);
                found[size + k] = of_cell * new * overlap * i * (1.0f - i);
                found[2 * size + k] = of_state * squashed * o * (1.0f - o);
                found[3 * size + k] = of_cell * (lower[k] - overlap * (1.0f - i)) * (1.0f - new * new);
            }
            for (int64_t part = 0; chunk > 1 && part < 2; part++)
                for (int64_t unit = 0; unit < units; unit++) {
                    const float *each = channels + (2 + part) * size + unit * chunk;
                    float sum = 0.0f;
                    for (int64_t k = 0; k < chunk; k++) sum += each[k];
                    of_sums[2 * (row - first) + part][unit] = sum;
                }
        }
        /* A share enters its own sum and all later ones. */
        double sums[2 * ROWS] = {0};
        if (end - first == ROWS) {
            for (int64_t k = units - 1; k >= 0; k--)
                for (int64_t each = 0; each < 2 * ROWS; each++)
                    of_sums[each][k] = (float)(sums[each] += of_sums[each][k]);
        } else {
            for (int64_t each = 0; each < 2 * (end - first); each++)
                for (int64_t k = units - 1; k >= 0; k--) of_sums[each][k] = (float)(sums[each] += of_sums[each][k]);
        }
        for (int64_t each = 0; each < 2 * (end - first); each++) {
            const float *share = shares + (2 * first + each) * units;
            float *found = gradients + (first + each / 2) * width + 4 * size + (each % 2) * units, mean = 0.0f;
            PRAGMA(omp simd reduction(+ : mean))
            for (int64_t k = 0; k < units; k++) mean += share[k] * of_sums[each][k];
            SIMD
            for (int64_t k = 0; k < units; k++) found[k] = share[k] * (of_sums[each][k] - mean);
        }
    }
}
"""


class CompiledSteps:
    """
    The steps of `ordered_neurons`, of float32 in memory without gaps, in one thread.

    Args:
        library (`ctypes.CDLL`): From `SOURCE`.
    """

    def __init__(self, library: ctypes.CDLL):
        self.onward, self.back = library.forward_step, library.backward_step
        size, pointer = ctypes.c_int64, ctypes.c_void_p
        self.onward.argtypes = [size] * 3 + [pointer] * 6
        self.back.argtypes = [size] * 3 + [pointer] * 5 + [size] + [pointer] * 3
        self.onward.restype = self.back.restype = None

    def forward_steps(
        self,
        buffer: torch.Tensor,
        shares: torch.Tensor,
        cells: torch.Tensor,
        states: torch.Tensor,
        matmuls: Sequence[StepMatmuls],
        counts: Sequence[int],
        chunk_size: int,
    ) -> None:
        """As [`~.ordered_neurons.forward_steps`] has it."""
        start, before = 0, 0
        for step, count in enumerate(counts):
            for direction, matmul in enumerate(matmuls):
                product = matmul.product(states[direction, before : before + count]) if step else None
                self.onward(
                    count,
                    cells.shape[-1],
                    chunk_size,
                    address(buffer, direction, start),
                    None if product is None else product.data_ptr(),
                    address(shares, direction, start),
                    address(cells, direction, before) if step else None,
                    address(cells, direction, start),
                    address(states, direction, start),
                )
            before, start = start, start + count

    def backward_steps(
        self,
        buffer: torch.Tensor,
        gradients: torch.Tensor,
        shares: torch.Tensor,
        cells: torch.Tensor,
        gradient: torch.Tensor,
        matmuls: Sequence[StepMatmuls],
        counts: Sequence[int],
        chunk_size: int,
    ) -> None:
        """As [`~.ordered_neurons.backward_steps`] has it."""
        gradient = gradient.to(cells.dtype).contiguous()
        grad_cells = cells.new_zeros(len(cells), counts[0], cells.shape[-1])
        starts = list(itertools.accumulate(counts, initial=0))
        later: list[torch.Tensor | None] = [None] * len(matmuls)
        for step in reversed(range(len(counts))):
            start, count = starts[step], counts[step]
            for direction, matmul in enumerate(matmuls):
                came = later[direction]
                self.back(
                    count,
                    cells.shape[-1],
                    chunk_size,
                    address(buffer, direction, start),
                    address(shares, direction, start),
                    address(cells, direction, starts[step - 1]) if step else None,
                    address(cells, direction, start),
                    address(gradient, direction, start),
                    0 if came is None else len(came),
                    None if came is None else came.data_ptr(),
                    address(grad_cells, direction, 0),
                    address(gradients, direction, start),
                )
                if step:
                    later[direction] = matmul.backward(gradients[direction, start : start + count])


def address(tensor: torch.Tensor, direction: int, word: int) -> int:
    """Where a word of `(directions, words, ..)` stands in memory."""
    return tensor.data_ptr() + tensor.element_size() * (direction * tensor.stride(0) + word * tensor.stride(1))


@functools.cache
def compiled_steps() -> CompiledSteps | None:
    """The steps, compiled once in a process; `None` where that cannot be done."""
    library = compiled(SOURCE)
    return None if library is None else CompiledSteps(library)
