/* Matrix product of rows and a packed weight in float, with the interface of gemm.c.

   A weight is packed into panels of PANEL_WIDTH outputs, [panels][in][PANEL_WIDTH], so that with few
   rows the memory is read sequentially. A block is a panel times at most BLOCK_ROWS rows; its sums
   stay in registers throughout the loop over the inputs. If there are more rows, the panel stays in
   the CPU's cache for their blocks, while the next panel is prefetched. The order of summation does
   not depend on the number of rows, so the result of a row does not either.

   The vectors are those of the compiler, so this file needs no particular processor; BLOCK_ROWS and
   LANES fit the number and size of its registers. */

#include <stddef.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

enum { PANEL_WIDTH = 16 };
#if defined(__AVX512F__)
enum { LANES = 16, BLOCK_ROWS = 12 }; /* LANES: floats per vector */
#elif defined(__AVX2__)
enum { LANES = 8, BLOCK_ROWS = 6 };
#else
enum { LANES = 4, BLOCK_ROWS = 3 };
#endif
enum { VECTORS = PANEL_WIDTH / LANES }; /* per row of a block */
enum { PREFETCH_DISTANCE = 16384 };     /* bytes */
enum { ONE_THREAD = 1 << 18 }; /* multiplications up to which one thread is faster than several */

typedef float vector __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));

/* Packs `weight`, [outs, in], into panels. The outputs from `outs` to the next multiple of
   PANEL_WIDTH are zero. */
void pack(const float *weight, float *packed, int64_t outs, int64_t in, int threads) {
    const int64_t panels = (outs + PANEL_WIDTH - 1) / PANEL_WIDTH;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t panel = 0; panel < panels; panel++) {
        const float *from = weight + panel * PANEL_WIDTH * in;
        float *to = packed + panel * PANEL_WIDTH * in;
        const int64_t width = outs - panel * PANEL_WIDTH;
        for (int64_t i = 0; i < in; i++, to += PANEL_WIDTH)
            for (int64_t o = 0; o < PANEL_WIDTH; o++) to[o] = o < width ? from[o * in + i] : 0;
    }
}

typedef struct {
    const float *rows;  /* [BLOCK_ROWS or fewer, in] */
    const float *panel; /* [in][PANEL_WIDTH] */
    const char *next;   /* start of the memory to prefetch */
    int64_t pace;       /* bytes to prefetch per input */
    int64_t in, outs;
    const float *bias;  /* [PANEL_WIDTH] */
    int64_t width;      /* outputs from the panel's first one on; may exceed PANEL_WIDTH */
    float *out;         /* rows of `outs` floats */
} Block;

/* Multiplies a block of `count` rows, which is a constant after inlining. */
INLINE void multiply_rows(const Block b, const int count) {
    const vector *bias = (const vector *)b.bias, *panel = (const vector *)b.panel;
    const char *next = b.next;
    vector sums[BLOCK_ROWS][VECTORS];
    for (int row = 0; row < count; row++)
        for (int v = 0; v < VECTORS; v++) sums[row][v] = bias[v];
    for (int64_t i = 0; i < b.in; i++, panel += VECTORS, next += b.pace) {
        __builtin_prefetch(next);
#pragma GCC unroll 12
        for (int row = 0; row < count; row++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sums[row][v] += b.rows[row * b.in + i] * panel[v];
    }
    for (int row = 0; row < count; row++)
        for (int64_t o = 0; o < PANEL_WIDTH && o < b.width; o++)
            b.out[row * b.outs + o] = sums[row][o / LANES][o % LANES];
}

static void multiply_block(const Block b, int64_t count) {
    switch (count) { /* constants, so that the compiler keeps the sums in registers */
        case 1: multiply_rows(b, 1); break;
        case 2: multiply_rows(b, 2); break;
#if defined(__AVX2__)
        case 3: multiply_rows(b, 3); break;
        case 4: multiply_rows(b, 4); break;
        case 5: multiply_rows(b, 5); break;
#endif
#if defined(__AVX512F__)
        case 6: multiply_rows(b, 6); break;
        case 7: multiply_rows(b, 7); break;
        case 8: multiply_rows(b, 8); break;
        case 9: multiply_rows(b, 9); break;
        case 10: multiply_rows(b, 10); break;
        case 11: multiply_rows(b, 11); break;
#endif
        default: multiply_rows(b, BLOCK_ROWS);
    }
}

/* out = rows * weight^T + bias: `rows` is [num_rows, in], `out` [num_rows, outs], `bias` [outs] or
   NULL. The rows are divided into blocks. */
void multiply(const float *rows, const float *packed, const float *bias, float *out,
              int64_t num_rows, int64_t in, int64_t outs, int threads) {
    const int64_t panels = (outs + PANEL_WIDTH - 1) / PANEL_WIDTH;
    const int64_t blocks = (num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
#pragma omp parallel for schedule(static) num_threads(threads) \
    if (num_rows * in * outs > ONE_THREAD)
    for (int64_t p = 0; p < panels; p++) {
        const int64_t output = p * PANEL_WIDTH;
        float panel_bias[PANEL_WIDTH] = {0};
        for (int64_t o = 0; bias && o < PANEL_WIDTH && output + o < outs; o++)
            panel_bias[o] = bias[output + o];
        const int64_t panel_size = in * PANEL_WIDTH * sizeof(float); /* bytes */
        Block b = {.panel = packed + output * in, .in = in, .outs = outs, .bias = panel_bias,
                   .width = outs - output, .pace = blocks ? panel_size / in / blocks : 0};
        b.next = (const char *)b.panel + (blocks == 1 ? PREFETCH_DISTANCE : panel_size);
        for (int64_t block = 0; block < blocks; block++, b.next += in * b.pace) {
            const int64_t row = block * num_rows / blocks;
            b.rows = rows + row * in, b.out = out + row * outs + output;
            multiply_block(b, (block + 1) * num_rows / blocks - row);
        }
    }
}

/* Uses every instruction of this file, on zeros: the process ends if the CPU lacks one. Returns 0. */
int probe(void) {
    enum { IN = 2 };
    static float weight[PANEL_WIDTH * IN], packed[PANEL_WIDTH * IN];
    static float rows[BLOCK_ROWS * IN], out[BLOCK_ROWS * PANEL_WIDTH];
    pack(weight, packed, PANEL_WIDTH, IN, 1);
    for (int num_rows = 1; num_rows <= BLOCK_ROWS; num_rows++)
        multiply(rows, packed, NULL, out, num_rows, IN, PANEL_WIDTH, 1);
    return 0;
}
