/* Matrix product of rows and a packed weight in bfloat16, accumulated in float.

   A weight is packed into panels of PANEL_WIDTH outputs, [panels][in / 2][PANEL_WIDTH][2], so that
   with few rows the memory is read sequentially. A block is a panel times at most BLOCK_ROWS rows;
   its sums stay in registers throughout the loop over the inputs. If there are more rows, the panel
   stays in the CPU's cache for their blocks, while the next panel is prefetched. The order of
   summation does not depend on the number of rows, so the result of a row does not either.

   Compiled by gemm.py for processors with AVX512-BF16, whose instruction vdpbf16ps adds the products
   of 16 pairs to 16 sums. With WITH_AMX, the sums are computed with tdpbf16ps of AMX, which
   multiplies matrices of 16 x 32 and 32 x 16. With WITH_FMA, for processors on which vdpbf16ps is
   slow, vfmadd multiplies floats: rows are converted once per call, weights in registers. */

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define INLINE static inline __attribute__((always_inline))

enum { PANEL_WIDTH = 32 };
#ifdef WITH_AMX
enum { BLOCK_ROWS = 32 }; /* tile registers: 4 for sums, 2 for rows, 2 for weights */
enum { STEP = 32 };       /* inputs per instruction */
#else
enum { BLOCK_ROWS = 12 }; /* registers: 24 for sums, 2 or 4 for weights, 1 or 2 for a row */
enum { STEP = 2 };
#endif
enum { CACHE_LINE = 64, PREFETCH_DISTANCE = 8192 }; /* bytes */
enum { ONE_THREAD = 1 << 18 }; /* multiplications up to which one thread is faster than several */

typedef uint16_t scalar;
#ifdef WITH_FMA
typedef float operand; /* a number of a row when it is multiplied */
enum { MAX_CONVERTED = 8 * BLOCK_ROWS }; /* rows at a time, so that they stay in the CPU's cache */
enum { ONE_THREAD_CONVERTS = 1 << 13 };  /* numbers up to which one thread is faster */
#else
typedef scalar operand;
#endif

/* Transposes 16 x 16 pairs of scalars in place: afterwards, pairs[i] is the former column i. Each
   of the four rounds interleaves the first half of the vectors with the second half. */
INLINE void transpose(__m512i pairs[16]) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int round = 0; round < 4; round++) {
        __m512i from[16];
        for (int i = 0; i < 16; i++) from[i] = pairs[i];
        for (int i = 0; i < 8; i++) {
            pairs[2 * i] = _mm512_permutex2var_epi32(from[i], low, from[i + 8]);
            pairs[2 * i + 1] = _mm512_permutex2var_epi32(from[i], high, from[i + 8]);
        }
    }
}

/* Packs `weight`, [outs, in], into panels; `in` is a multiple of STEP. The outputs from `outs` to the next
   multiple of PANEL_WIDTH are zero. */
void pack(const scalar *weight, scalar *packed, int64_t outs, int64_t in, int threads) {
    const int64_t per_panel = PANEL_WIDTH / 16; /* groups of 16 outputs */
    const int64_t groups = (outs + PANEL_WIDTH - 1) / PANEL_WIDTH * per_panel;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t group = 0; group < groups; group++) {
        scalar *to = packed + group / per_panel * PANEL_WIDTH * in + group % per_panel * 32;
        for (int64_t first = 0; first < in; first += 32) {
            __m512i pairs[16];
            const int64_t count = in - first < 32 ? in - first : 32;
            const __mmask32 mask = 0xffffffffu >> (32 - count);
            for (int i = 0; i < 16; i++) {
                const int64_t row = group * 16 + i;
                const scalar *from = weight + row * in + first;
                pairs[i] = _mm512_maskz_loadu_epi16(row < outs ? mask : 0, from);
            }
            transpose(pairs);
            for (int i = 0; i < count / 2; i++, to += 2 * PANEL_WIDTH)
                _mm512_storeu_si512(to, pairs[i]);
        }
    }
}

typedef struct {
    const operand *rows;  /* [BLOCK_ROWS or fewer, in] */
    const scalar *panel;  /* [in / 2][PANEL_WIDTH][2] */
    const char *next;     /* start of the memory to prefetch */
    int64_t pace;         /* bytes to prefetch per STEP inputs */
    int64_t in, outs;
    const float *bias;    /* [PANEL_WIDTH] */
    int64_t width;        /* outputs from the panel's first one on; may exceed PANEL_WIDTH */
    scalar *out;          /* rows of `outs` scalars */
} Block;

/* A mask with the lowest `count` bits set; `count` is limited to 0 to 32. */
INLINE __mmask32 first_bits(int64_t count) {
    return count >= 32 ? 0xffffffffu : count > 0 ? 0xffffffffu >> (32 - count) : 0;
}

/* Rounds 32 outputs to bfloat16, and stores the first `count` of them. */
INLINE void store(scalar *out, int64_t count, __m512 low, __m512 high) {
    _mm512_mask_storeu_epi16(out, first_bits(count), (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

#ifdef WITH_AMX

enum { TILE_ROWS = 16, TILE_ROW_BYTES = 64 }; /* of the largest tile */

/* The operand of ldtilecfg. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileConfig;

/* Requests Linux's permission to use AMX in this process. Returns 0 if it is granted. */
static int request_permission(void) {
    const int request = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    return syscall(SYS_arch_prctl, request, tile_data);
}

/* Multiplies a block of `count` rows. Tile registers:
   0, 1  sums of the first 16 rows, for the first and the last 16 outputs
   2, 3  the same of the other rows, if there are any
   4, 5  inputs of the first 16 rows, and of the others
   6, 7  weights for the first and the last 16 outputs */
static void multiply_block(const Block b, int64_t count) {
    const int64_t first = count < TILE_ROWS ? count : TILE_ROWS, others = count - first;
    const int64_t row_stride = b.in * sizeof(scalar), panel_stride = 2 * TILE_ROW_BYTES; /* bytes */
    const scalar *rows = b.rows, *other_rows = b.rows + first * b.in, *panel = b.panel;
    const char *next = b.next;
    float sums[BLOCK_ROWS][PANEL_WIDTH];
    TileConfig config = {.palette = 1, .rows = {first, first, others, others, first, others, 16, 16}};
    for (int tile = 0; tile < 8; tile++) config.row_bytes[tile] = config.rows[tile] ? TILE_ROW_BYTES : 0;
    /* Finishes earlier stores: the intrinsics do not declare which memory they read. */
    __asm__ volatile("" ::: "memory");
    _tile_loadconfig(&config);
    _tile_loadd(0, b.bias, 0); /* the same bias for each row */
    _tile_loadd(1, b.bias + 16, 0);
    if (others) {
        _tile_loadd(2, b.bias, 0);
        _tile_loadd(3, b.bias + 16, 0);
    }
    for (int64_t i = 0; i < b.in; i += STEP, panel += STEP * PANEL_WIDTH, next += b.pace) {
        for (int64_t byte = 0; byte < b.pace; byte += CACHE_LINE)
            _mm_prefetch(next + byte, _MM_HINT_T0);
        _tile_loadd(6, panel, panel_stride);
        _tile_loadd(7, panel + 32, panel_stride);
        _tile_loadd(4, rows + i, row_stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (others) {
            _tile_loadd(5, other_rows + i, row_stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0], sizeof sums[0]);
    _tile_stored(1, sums[0] + 16, sizeof sums[0]);
    if (others) {
        _tile_stored(2, sums[TILE_ROWS], sizeof sums[0]);
        _tile_stored(3, sums[TILE_ROWS] + 16, sizeof sums[0]);
    }
    _tile_release();
    for (int64_t row = 0; row < count; row++)
        store(b.out + row * b.outs, b.width, _mm512_loadu_ps(sums[row]),
              _mm512_loadu_ps(sums[row] + 16));
}

#else

static int request_permission(void) { return 0; }

/* The sums of row r are a##r and b##r, 16 outputs each: as separate variables, because compilers do
   not keep this array in registers. */
#define EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) \
    DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)
#define BEGIN(r) __m512 a##r = bias_a, b##r = bias_b;
#define STORE(r) \
    if (r < count) store(t.out + r * t.outs, t.width, a##r, b##r);

#ifdef WITH_FMA

typedef struct { __m512 first, second; } Pairs; /* the first and the second scalars of 16 pairs */

INLINE Pairs load(const scalar *from) {
    const __m512i pairs = _mm512_loadu_si512(from), upper = _mm512_set1_epi32(0xffff0000);
    return (Pairs){(__m512)_mm512_slli_epi32(pairs, 16), (__m512)_mm512_and_si512(pairs, upper)};
}

#define ADD(r) \
    if (r < count) { \
        const __m512 first = _mm512_set1_ps(row[r * t.in]); \
        const __m512 second = _mm512_set1_ps(row[r * t.in + 1]); \
        a##r = _mm512_fmadd_ps(first, a.first, a##r); \
        b##r = _mm512_fmadd_ps(first, b.first, b##r); \
        a##r = _mm512_fmadd_ps(second, a.second, a##r); \
        b##r = _mm512_fmadd_ps(second, b.second, b##r); \
    }

#else

typedef int32_t int32_unaligned __attribute__((aligned(2), may_alias));
typedef __m512bh Pairs; /* 16 pairs of scalars */

INLINE Pairs load(const scalar *from) { return (Pairs)_mm512_loadu_si512(from); }

#define ADD(r) \
    if (r < count) { \
        __m512bh pair = (__m512bh)_mm512_set1_epi32(*(const int32_unaligned *)(row + r * t.in)); \
        a##r = _mm512_dpbf16_ps(a##r, pair, a), b##r = _mm512_dpbf16_ps(b##r, pair, b); \
    }

#endif

/* Multiplies a block of `count` rows. Prefetches `prefetched_lines` cache lines per pair of inputs.
   Both are constants after inlining. */
INLINE void multiply_rows(const Block t, const int count, const int prefetched_lines) {
    const __m512 bias_a = _mm512_loadu_ps(t.bias), bias_b = _mm512_loadu_ps(t.bias + 16);
    EACH_ROW(BEGIN)
    const operand *row = t.rows, *end = t.rows + t.in;
    const scalar *panel = t.panel;
    const char *next = t.next;
    for (; row < end; row += STEP, panel += STEP * PANEL_WIDTH, next += t.pace) {
        const Pairs a = load(panel), b = load(panel + 32);
        for (int line = 0; line < prefetched_lines; line++)
            _mm_prefetch(next + line * CACHE_LINE, _MM_HINT_T0);
        EACH_ROW(ADD)
    }
    EACH_ROW(STORE)
}

INLINE void multiply_and_prefetch(const Block t, int64_t count, const int prefetched_lines) {
    switch (count) { /* constants, so that the compiler keeps the sums in registers */
        case 1: multiply_rows(t, 1, prefetched_lines); break;
        case 2: multiply_rows(t, 2, prefetched_lines); break;
        case 3: multiply_rows(t, 3, prefetched_lines); break;
        case 4: multiply_rows(t, 4, prefetched_lines); break;
        case 5: multiply_rows(t, 5, prefetched_lines); break;
        case 6: multiply_rows(t, 6, prefetched_lines); break;
        case 7: multiply_rows(t, 7, prefetched_lines); break;
        case 8: multiply_rows(t, 8, prefetched_lines); break;
        case 9: multiply_rows(t, 9, prefetched_lines); break;
        case 10: multiply_rows(t, 10, prefetched_lines); break;
        case 11: multiply_rows(t, 11, prefetched_lines); break;
        default: multiply_rows(t, 12, prefetched_lines);
    }
}

/* Multiplies a block of `count` rows. Prefetches 2 or 1 cache lines per pair of inputs. */
static void multiply_block(const Block block, int64_t count) {
    if (block.pace > CACHE_LINE) multiply_and_prefetch(block, count, 2);
    else multiply_and_prefetch(block, count, 1);
}

#endif

/* The same as `multiply` below, for rows of operands. */
static void multiply_operands(const operand *rows, const scalar *packed, const scalar *bias,
                              scalar *out, int64_t num_rows, int64_t in, int64_t outs,
                              int threads) {
    const int64_t panels = (outs + PANEL_WIDTH - 1) / PANEL_WIDTH;
    const int64_t blocks = (num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const int64_t threads_per_panel = (threads + panels - 1) / panels;
    const int64_t parts = threads_per_panel < blocks ? threads_per_panel : blocks; /* of a panel */
#pragma omp parallel for schedule(static) num_threads(threads) \
    if (num_rows * in * outs > ONE_THREAD)
    for (int64_t task = 0; task < panels * parts; task++) {
        const int64_t output = task / parts * PANEL_WIDTH, part = task % parts;
        const int64_t first = part * blocks / parts, last = (part + 1) * blocks / parts;
        const int64_t passes = last - first; /* blocks of this task, which all use one panel */
        float panel_bias[PANEL_WIDTH] = {0};
        for (int64_t o = 0; bias && o < PANEL_WIDTH && output + o < outs; o++)
            panel_bias[o] = _mm_cvtss_f32((__m128)_mm_cvtsi32_si128((uint32_t)bias[output + o] << 16));
        Block b = {.panel = packed + output * in, .in = in, .outs = outs, .bias = panel_bias,
                   .width = outs - output, .pace = STEP * PANEL_WIDTH * sizeof(scalar) / passes};
        b.next = (const char *)b.panel +
                 (passes == 1 ? PREFETCH_DISTANCE : in * PANEL_WIDTH * sizeof(scalar));
        for (int64_t block = first; block < last; block++, b.next += in / STEP * b.pace) {
            const int64_t row = block * num_rows / blocks;
            b.rows = rows + row * in, b.out = out + row * outs + output;
            multiply_block(b, (block + 1) * num_rows / blocks - row);
        }
    }
}

/* out = rows * weight^T + bias: `rows` is [num_rows, in], `out` [num_rows, outs], `bias` [outs] or
   NULL; `in` is a multiple of STEP. The rows are divided into blocks. If there are fewer panels than
   threads, several threads share a panel, and each multiplies some of the blocks. */
void multiply(const scalar *rows, const scalar *packed, const scalar *bias, scalar *out,
              int64_t num_rows, int64_t in, int64_t outs, int threads) {
#ifdef WITH_FMA
    const int64_t most = num_rows < MAX_CONVERTED ? num_rows : MAX_CONVERTED;
    float *converted = malloc(most * in * sizeof *converted);
    if (!converted && num_rows) {
        fputs("gemm.c: no memory to convert rows\n", stderr);
        abort();
    }
    for (int64_t first = 0; first < num_rows; first += most) {
        const int64_t count = first + most < num_rows ? most : num_rows - first;
        const scalar *from = rows + first * in;
#pragma omp parallel for schedule(static) num_threads(threads) if (count * in > ONE_THREAD_CONVERTS)
        for (int64_t i = 0; i < count * in; i++) {
            const uint32_t bits = (uint32_t)from[i] << 16;
            memcpy(converted + i, &bits, sizeof bits);
        }
        multiply_operands(converted, packed, bias, out + first * outs, count, in, outs, threads);
    }
    free(converted);
#else
    multiply_operands(rows, packed, bias, out, num_rows, in, outs, threads);
#endif
}

/* Requests permission to use AMX, and uses every instruction of this file, on zeros: the process
   ends if the CPU lacks one. Call it before the other functions. Returns 0 if they may be used. */
int probe(void) {
    static scalar weight[PANEL_WIDTH * STEP], packed[PANEL_WIDTH * STEP];
    static scalar rows[BLOCK_ROWS * STEP], out[BLOCK_ROWS * PANEL_WIDTH];
    if (request_permission()) return 1;
    pack(weight, packed, PANEL_WIDTH, STEP, 1);
    for (int num_rows = 1; num_rows <= BLOCK_ROWS; num_rows++)
        multiply(rows, packed, NULL, out, num_rows, STEP, PANEL_WIDTH, 1);
    return 0;
}
