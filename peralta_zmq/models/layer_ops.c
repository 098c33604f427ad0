/* RMS norm and rotary embedding of whole rows, with their backward passes: one pass over the rows
   instead of one for each operation of torch.

   Compiled by layer_ops.py, with SCALAR_IS_BF16 for bfloat16 rows and without for float rows. All
   other arrays are float, and all arrays are contiguous. n is the number of rows. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "compiler.h"

/* Stores each row [width], times its factor, in `factors` [n], times `weight`. */
void norm(const scalar *restrict rows, const float *restrict weight, float *restrict out,
          float *restrict factors, int64_t n, int64_t width, float epsilon, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < n; i++) {
        const scalar *row = rows + i * width;
        float *to = out + i * width, squares = 0;
        for (int64_t d = 0; d < width; d++) squares += to_float(row[d]) * to_float(row[d]);
        float factor = factors[i] = 1 / sqrtf(squares / width + epsilon);
        for (int64_t d = 0; d < width; d++)
            to[d] = to_float(to_scalar(to_float(row[d]) * factor)) * weight[d];
    }
}

/* Gradients of the rows, and of the weight: one sum for each thread, [threads, width]. */
void norm_backward(const scalar *restrict rows, const float *restrict weight,
                   const float *restrict factors, const float *restrict grads,
                   scalar *restrict rows_grad, float *restrict weight_grads, int64_t n,
                   int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t part = 0; part < threads; part++) {
        float *restrict weight_grad = weight_grads + part * width;
        memset(weight_grad, 0, width * sizeof(float));
        for (int64_t i = n * part / threads; i < n * (part + 1) / threads; i++) {
            const scalar *row = rows + i * width;
            const float *grad = grads + i * width;
            scalar *to = rows_grad + i * width;
            float factor = factors[i], sum = 0;
            for (int64_t d = 0; d < width; d++) {
                float product = grad[d] * to_float(row[d]);
                sum += product * weight[d];
                weight_grad[d] += factor * product;
            }
            float shift = factor * factor * factor * sum / width;
            for (int64_t d = 0; d < width; d++)
                to[d] = to_scalar(factor * grad[d] * weight[d] - shift * to_float(row[d]));
        }
    }
}

/* Rotary embedding of the heads [n, heads, width]; cosines and sines are [n, width]. */
void rotate(const scalar *restrict rows, const float *restrict cosines,
            const float *restrict sines, float *restrict out, int64_t n, int64_t heads,
            int64_t width, int threads) {
    int64_t half = width / 2;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < n; i++) {
        const float *cosine = cosines + i * width, *sine = sines + i * width;
        for (int64_t head = i * heads; head < (i + 1) * heads; head++) {
            const scalar *low = rows + head * width, *high = low + half;
            float *to = out + head * width;
            for (int64_t d = 0; d < half; d++) {
                float a = to_float(low[d]), b = to_float(high[d]);
                to[d] = a * cosine[d] - b * sine[d];
                to[d + half] = b * cosine[d + half] + a * sine[d + half];
            }
        }
    }
}

/* For compiler.load: these functions need no instructions beyond the compiler's -march. */
int probe(void) {
    float row[64], weight[64], out[64], factor, sums[64];
    scalar rows[64], rows_grad[64];
    for (int d = 0; d < 64; d++) {
        row[d] = weight[d] = 1;
        rows[d] = to_scalar((float)d);
    }
    norm(rows, weight, out, &factor, 1, 64, 1, 1);
    norm_backward(rows, weight, &factor, row, rows_grad, sums, 1, 64, 1);
    rotate(rows, row, row, out, 1, 1, 64, 1);
    return 0;
}
