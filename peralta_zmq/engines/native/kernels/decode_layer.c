/* Everything that a decoder layer of the Llama family computes between its matmuls, for a few new
   tokens per row: RMS norm, SwiGLU, and attention with head norms, rotary embedding, the write of
   keys and values to the KV cache, and an online softmax (arXiv 1805.02867) over blocks of keys.
   `decode` computes all layers, with the matmuls of another library; `sum_blocks` summarizes the
   logits for the sampler.

   A row caches one sequence. The keys and values of a prefix that several rows have in common are
   stored once, in the shared part; a row's own part holds the rest of its sequence.

   Compiled by decode_layer.py, for bfloat16 with SCALAR_IS_BF16 and for float without. The width of
   a head (head_dim) is a multiple of WIDTH_UNIT and at most MAX_WIDTH. At most MAX_GROUP query
   heads share a key head. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "compiler.h"

#if defined(SCALAR_IS_BF16) && defined(__AVX512BF16__) && LANES == 16 && WIDTH_UNIT % 32 == 0
#define HAS_PAIRS /* vdpbf16ps multiplies 32 pairs of bfloat16 and adds the products to 16 sums */
#include <immintrin.h>
#endif

enum { BLOCK = 64 };      /* keys per step of the online softmax */
enum { CACHE_LINE = 64 }; /* bytes */

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4))); /* a SIMD vector */

#ifdef SCALAR_IS_BF16
typedef uint32_t lanes_of_bits __attribute__((vector_size(4 * LANES)));
typedef scalar lanes_of_scalars __attribute__((vector_size(2 * LANES), aligned(2)));

INLINE lanes load(const scalar *from) {
    return (lanes)(__builtin_convertvector(*(const lanes_of_scalars *)from, lanes_of_bits) << 16);
}
#else
INLINE lanes load(const scalar *from) { return *(const lanes *)from; }
#endif

/* Arguments of `attend`. */
typedef struct {
    int64_t tokens;                             /* new tokens of all rows */
    int64_t heads, group, width;                /* key heads; query heads per key head; head_dim */
    int64_t shared, capacity;                   /* positions of the shared part; of a row */
    int64_t threads;
    int64_t query_stride, key_stride, value_stride; /* scalars from one token to the next */
    const scalar *query;                        /* [tokens, heads * group, width] */
    const scalar *key, *value;                  /* [tokens, heads, width] */
    const scalar *query_norm, *key_norm;        /* [width], weights of the head norms, or NULL */
    const scalar *cosine, *sine;                /* [tokens, width], rotary embedding */
    const scalar *shared_keys, *shared_values;  /* [heads, shared, width] */
    scalar *keys, *values;                      /* [rows, heads, capacity, width], own parts */
    const int64_t *row, *column;                /* [tokens], position of each in keys and values */
    const int64_t *start, *end;                 /* [tokens], span of the shared part */
    scalar *out;                                /* [tokens, heads * group, width] */
    float epsilon, scaling;
} Attention;

#ifdef HAS_PAIRS

typedef scalar operand; /* of the scores: queries, rounded as torch rounds them */
enum { DOT_STEP = 2 * LANES };
INLINE operand to_operand(float x) { return to_scalar(x); }
INLINE __m512bh load_pairs(const scalar *from) { return (__m512bh)_mm512_loadu_si512(from); }

INLINE lanes add_products(lanes sums, const operand *query, const scalar *key) {
    return (lanes)_mm512_dpbf16_ps((__m512)sums, load_pairs(query), load_pairs(key));
}

#else

typedef float operand;
enum { DOT_STEP = LANES };
INLINE operand to_operand(float x) { return x; }

INLINE lanes add_products(lanes sums, const operand *query, const scalar *key) {
    return sums + load(key) * *(const lanes *)query;
}

#endif

/* Running result of the online softmax, for the query heads that share a key head. */
typedef struct {
    operand query[MAX_GROUP * MAX_WIDTH];
    float sum[MAX_GROUP * MAX_WIDTH]; /* sum of exp(score - max) * value */
    float max[MAX_GROUP];             /* maximum of the scores */
    float total[MAX_GROUP];           /* sum of exp(score - max) */
} State;

/* e^x with a relative error below 3e-7 (4e-6 without fused multiply-add): a power of two times
   Cephes' polynomial for the remainder. Compilers vectorize it, unlike libm's function. */
INLINE float fast_exp(float x) {
    x = x < -87 ? -87 : x > 88 ? 88 : x; /* NaN stays NaN */
    float power = rintf(x * 1.44269504f);
    float rest = x - power * 0.693359375f + power * 2.12194440e-4f; /* ln 2 in two parts */
    float p = 1.9875691500e-4f;
    p = p * rest + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    union { int32_t bits; float value; } two = {((int32_t)power + 127) << 23};
    return (p * rest * rest + rest + 1) * two.value;
}

/* The factor by which RMS norm (arXiv 1910.07467) scales a vector. */
INLINE float rms_factor(const scalar *in, int64_t width, float epsilon) {
    float squares = 0;
    for (int64_t d = 0; d < width; d++) squares += to_float(in[d]) * to_float(in[d]);
    return 1 / sqrtf(squares / width + epsilon);
}

/* RMS norm of one head, unless `norm` is NULL, then rotary embedding. */
static void rotate(const scalar *in, const scalar *norm, const scalar *cosine, const scalar *sine,
                   float epsilon, int64_t width, float *out) {
    float head[MAX_WIDTH], factor = norm ? rms_factor(in, width, epsilon) : 1;
    int64_t half = width / 2;
    for (int64_t d = 0; d < width; d++)
        head[d] = norm ? to_float(to_scalar(to_float(in[d]) * factor * to_float(norm[d])))
                       : to_float(in[d]);
    for (int64_t d = 0; d < half; d++)
        out[d] = head[d] * to_float(cosine[d]) - head[d + half] * to_float(sine[d]);
    for (int64_t d = half; d < width; d++)
        out[d] = head[d] * to_float(cosine[d]) + head[d - half] * to_float(sine[d]);
}

typedef float half_lanes __attribute__((vector_size(2 * LANES)));
typedef float quarter_lanes __attribute__((vector_size(LANES)));

/* The sum of all lanes. Adds halves first, because compilers would add one lane after the other. */
INLINE float horizontal_sum(lanes terms) {
    half_lanes halves[2];
    quarter_lanes quarters[2];
    memcpy(halves, &terms, sizeof halves);
    halves[0] += halves[1];
    memcpy(quarters, halves, sizeof quarters);
    quarters[0] += quarters[1];
    float sum = 0;
    for (int lane = 0; lane < LANES / 4; lane++) sum += quarters[0][lane];
    return sum;
}

/* Computes the scores of `count` keys, at most BLOCK. Prefetches their values. */
INLINE void qk_scores(const State *state, const scalar *keys, const scalar *values, int64_t count,
                      int64_t group, int64_t width, float scaling, float scores[][BLOCK]) {
    for (int64_t p = 0; p < count; p++) {
        lanes sums[MAX_GROUP] = {0};
        for (int64_t d = 0; d < width; d += CACHE_LINE / sizeof(scalar))
            __builtin_prefetch(values + p * width + d);
        for (int64_t d = 0; d < width; d += DOT_STEP)
            for (int64_t g = 0; g < group; g++)
                sums[g] = add_products(sums[g], state->query + g * width + d, keys + p * width + d);
        for (int64_t g = 0; g < group; g++) scores[g][p] = scaling * horizontal_sum(sums[g]);
    }
}

/* Replaces each score of query head `g` by exp(score - max), with the running maximum, and rescales
   the earlier sums to a larger maximum. */
INLINE void online_softmax(State *state, int64_t g, int64_t count, int64_t width, float *scores) {
    float max = state->max[g];
    for (int64_t p = 0; p < count; p++) max = scores[p] > max ? scores[p] : max;
    float rescale = fast_exp(state->max[g] - max), total = rescale * state->total[g];
    for (int64_t p = 0; p < count; p++) total += scores[p] = fast_exp(scores[p] - max);
    for (int64_t d = 0; d < width; d++) state->sum[g * width + d] *= rescale;
    state->max[g] = max, state->total[g] = total;
}

/* Adds `count` values times their weights to the sums. Keeps the sums of `step` * DOT_STEP scalars
   in registers at a time. */
#ifdef HAS_PAIRS

INLINE void weighted_sum(State *state, const scalar *values, int64_t count, int64_t group,
                         int64_t width, float weights[][BLOCK], const int step) {
    const __m512i order = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i upper = _mm512_add_epi32(order, _mm512_set1_epi32(8));
    scalar pairs[MAX_GROUP][BLOCK + 2]; /* weights of positions p and p + 1 */
    for (int64_t g = 0; g < group; g++) {
        for (int64_t p = 0; p < BLOCK; p++) pairs[g][p] = to_scalar(weights[g][p]);
        pairs[g][count] = 0;
    }
    for (int64_t d = 0; d < width; d += step * DOT_STEP) {
        __m512 sums[MAX_GROUP][4] = {0};
        for (int64_t p = 0; p < count; p += 2) {
            const scalar *first = values + p * width + d;
            const scalar *second = p + 1 < count ? first + width : first;
            for (int k = 0; k < step; k++) {
                __m512i a = _mm512_loadu_si512(first + k * DOT_STEP);
                __m512i b = _mm512_loadu_si512(second + k * DOT_STEP);
                __m512bh low = (__m512bh)_mm512_unpacklo_epi16(a, b);
                __m512bh high = (__m512bh)_mm512_unpackhi_epi16(a, b);
                for (int64_t g = 0; g < group; g++) {
                    uint32_t both;
                    memcpy(&both, pairs[g] + p, sizeof both);
                    __m512bh weight = (__m512bh)_mm512_set1_epi32(both);
                    sums[g][2 * k] = _mm512_dpbf16_ps(sums[g][2 * k], low, weight);
                    sums[g][2 * k + 1] = _mm512_dpbf16_ps(sums[g][2 * k + 1], high, weight);
                }
            }
        }
        for (int64_t g = 0; g < group; g++)
            for (int k = 0; k < step; k++) { /* unpack has interleaved groups of four */
                __m512 low = sums[g][2 * k], high = sums[g][2 * k + 1];
                lanes *to = (lanes *)(state->sum + g * width + d + k * DOT_STEP);
                to[0] += (lanes)_mm512_permutex2var_ps(low, order, high);
                to[1] += (lanes)_mm512_permutex2var_ps(low, upper, high);
            }
    }
}

#else

INLINE void weighted_sum(State *state, const scalar *values, int64_t count, int64_t group,
                         int64_t width, float weights[][BLOCK], const int step) {
    for (int64_t d = 0; d < width; d += step * LANES) {
        lanes sums[MAX_GROUP][4] = {0};
        for (int64_t p = 0; p < count; p++) {
            for (int k = 0; k < step; k++) {
                lanes value = load(values + p * width + d + k * LANES);
                for (int64_t g = 0; g < group; g++) sums[g][k] += value * weights[g][p];
            }
        }
        for (int64_t g = 0; g < group; g++)
            for (int k = 0; k < step; k++)
                *(lanes *)(state->sum + g * width + d + k * LANES) += sums[g][k];
    }
}

#endif

/* Attends to `count` positions. */
INLINE void attend_range(State *state, const scalar *keys, const scalar *values, int64_t count,
                         int64_t group, int64_t width, float scaling) {
    enum { WIDE = 4 * LANES }; /* scalars */
    for (int64_t first = 0; first < count; first += BLOCK) {
        float scores[MAX_GROUP][BLOCK];
        int64_t size = count - first < BLOCK ? count - first : BLOCK, offset = first * width;
        qk_scores(state, keys + offset, values + offset, size, group, width, scaling, scores);
        for (int64_t g = 0; g < group; g++) online_softmax(state, g, size, width, scores[g]);
        if (width % WIDE)
            weighted_sum(state, values + offset, size, group, width, scores, 1);
        else
            weighted_sum(state, values + offset, size, group, width, scores, WIDE / DOT_STEP);
    }
}

/* The index of a key head's first own key in `keys`; the same for `values`. */
INLINE int64_t own_offset(const Attention *a, int64_t token, int64_t head) {
    return (a->row[token] * a->heads + head) * a->capacity * a->width;
}

/* Writes the key and value of a new token to the cache. */
INLINE void write_head(const Attention *a, int64_t token, int64_t head) {
    const int64_t width = a->width, offset = own_offset(a, token, head) + a->column[token] * width;
    float key[MAX_WIDTH];
    rotate(a->key + token * a->key_stride + head * width, a->key_norm, a->cosine + token * width,
           a->sine + token * width, a->epsilon, width, key);
    for (int64_t d = 0; d < width; d++) a->keys[offset + d] = to_scalar(key[d]);
    memcpy(a->values + offset, a->value + token * a->value_stride + head * width,
           width * sizeof(scalar));
}

/* Attention of one token for one key head and its `group` query heads, to the span of the shared
   part and to the row's own part up to the token. */
INLINE void attend_head(const Attention *a, int64_t token, int64_t head, int64_t group) {
    State state;
    const int64_t width = a->width, start = a->start[token];
    const int64_t own = own_offset(a, token, head), shared = (head * a->shared + start) * width;
    const scalar *query = a->query + token * a->query_stride + head * group * width;
    scalar *out = a->out + (token * a->heads + head) * group * width;
    float rotated[MAX_WIDTH];

    for (int64_t g = 0; g < group; g++) {
        rotate(query + g * width, a->query_norm, a->cosine + token * width,
               a->sine + token * width, a->epsilon, width, rotated);
        for (int64_t d = 0; d < width; d++) {
            state.query[g * width + d] = to_operand(rotated[d]);
            state.sum[g * width + d] = 0;
        }
        state.max[g] = -INFINITY, state.total[g] = 0;
    }
    attend_range(&state, a->shared_keys + shared, a->shared_values + shared, a->end[token] - start,
                 group, width, a->scaling);
    attend_range(&state, a->keys + own, a->values + own, a->column[token] + 1, group, width,
                 a->scaling);
    for (int64_t g = 0; g < group; g++)
        for (int64_t d = 0; d < width; d++)
            out[g * width + d] = to_scalar(state.sum[g * width + d] / state.total[g]);
}

/* Attention of all new tokens. */
void attend(const Attention *a) {
    const int64_t tokens = a->tokens;
#pragma omp parallel num_threads(a->threads)
    {
#pragma omp for schedule(static)
        for (int64_t task = 0; task < tokens * a->heads; task++)
            write_head(a, task % tokens, task / tokens);
#pragma omp for schedule(static) /* when all keys are written: a row may have several new tokens */
        for (int64_t task = 0; task < tokens * a->heads; task++) {
            /* All tokens of a head in sequence, so that its keys stay in the CPU's cache. */
            const int64_t head = task / tokens, token = task % tokens;
            switch (a->group) { /* constants, so that the compiler keeps the sums in registers */
                case 1: attend_head(a, token, head, 1); break;
                case 2: attend_head(a, token, head, 2); break;
                case 4: attend_head(a, token, head, 4); break;
                default: attend_head(a, token, head, a->group);
            }
        }
    }
}

INLINE void norm_row(const scalar *in, const scalar *weight, scalar *out, int64_t width,
                     float epsilon) {
    float factor = rms_factor(in, width, epsilon);
    for (int64_t d = 0; d < width; d++)
        out[d] = to_scalar(to_float(in[d]) * factor * to_float(weight[d]));
}

/* RMS norm of contiguous rows, [rows, width]. */
void norm(const scalar *in, const scalar *weight, scalar *out, int64_t rows, int64_t width,
          float epsilon, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++)
        norm_row(in + row * width, weight, out + row * width, width, epsilon);
}

/* SwiGLU (arXiv 2002.05202): silu(gates) * ups. Rows of `gates` and `ups` start `stride` scalars
   apart; `out` is contiguous. */
void gate(const scalar *gates, const scalar *ups, scalar *out, int64_t rows, int64_t stride,
          int64_t width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t d = 0; d < width; d++) {
            float x = to_float(gates[row * stride + d]), up = to_float(ups[row * stride + d]);
            out[row * width + d] = to_scalar(to_float(to_scalar(x / (1 + fast_exp(-x)))) * up);
        }
}

/* Adds `update` to `hidden`, both [rows, width], and writes the RMS norm of the sums to `out`. */
void add_and_norm(scalar *hidden, const scalar *update, const scalar *weight, scalar *out,
                  int64_t rows, int64_t width, float epsilon, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        scalar *sum = hidden + row * width;
        for (int64_t d = 0; d < width; d++)
            sum[d] = to_scalar(to_float(sum[d]) + to_float(update[row * width + d]));
        norm_row(sum, weight, out + row * width, width, epsilon);
    }
}

/* The type of `multiply` in gemm.c and gemm_float.c. */
typedef void Multiply(const scalar *rows, const scalar *packed, const scalar *bias, scalar *out,
                      int64_t num_rows, int64_t in, int64_t outs, int threads);

typedef struct {
    const scalar *packed, *bias; /* in panels; [outs], or NULL */
    int64_t in, outs;
} Linear;

/* Weights of a layer, and its part of the KV cache. */
typedef struct {
    const scalar *attention_norm, *mlp_norm;   /* [hidden_size], before the attention and the MLP */
    const scalar *query_norm, *key_norm;       /* as in Attention */
    const scalar *shared_keys, *shared_values;
    scalar *keys, *values;
    Linear qkv, attention_out, gate_up, down;  /* qkv: queries, keys and values in one weight */
} Layer;

/* Arguments of `decode`. */
typedef struct {
    const Attention *attention; /* the fields that all layers have in common */
    const Layer *layers;
    Multiply *multiply;
    int64_t num_layers;
    scalar *hidden;                /* [tokens, hidden_size], embeddings; overwritten */
    const scalar *last_norm;       /* [hidden_size] */
    scalar *out;                   /* [tokens, hidden_size], last hidden states */
    scalar *qkv, *attended, *gates_and_ups, *gated, *update; /* memory for intermediate results */
    float epsilon;                 /* of all norms */
} Decode;

INLINE void product(const Decode *d, const scalar *rows, const Linear *linear, scalar *out) {
    const Attention *a = d->attention;
    d->multiply(rows, linear->packed, linear->bias, out, a->tokens, linear->in, linear->outs,
                a->threads);
}

/* All layers, and the norm of the last hidden states. */
void decode(const Decode *d) {
    Attention a = *d->attention;
    const int64_t tokens = a.tokens;
    const int threads = a.threads;
    const int64_t hidden_size = d->layers->qkv.in, inner_size = d->layers->down.in;
    scalar *normed = d->out; /* read before the last norm is written */
    a.query_stride = a.key_stride = a.value_stride = d->layers->qkv.outs;
    a.query = d->qkv, a.out = d->attended;
    a.key = a.query + a.heads * a.group * a.width, a.value = a.key + a.heads * a.width;
    norm(d->hidden, d->layers->attention_norm, normed, tokens, hidden_size, d->epsilon, threads);
    for (int64_t l = 0; l < d->num_layers; l++) {
        const Layer *layer = d->layers + l;
        const scalar *next_norm = l + 1 < d->num_layers ? layer[1].attention_norm : d->last_norm;
        a.query_norm = layer->query_norm, a.key_norm = layer->key_norm;
        a.shared_keys = layer->shared_keys, a.shared_values = layer->shared_values;
        a.keys = layer->keys, a.values = layer->values;
        product(d, normed, &layer->qkv, d->qkv);
        attend(&a);
        product(d, d->attended, &layer->attention_out, d->update);
        add_and_norm(d->hidden, d->update, layer->mlp_norm, normed, tokens, hidden_size, d->epsilon,
                     threads);
        product(d, normed, &layer->gate_up, d->gates_and_ups);
        gate(d->gates_and_ups, d->gates_and_ups + inner_size, d->gated, tokens, 2 * inner_size,
             inner_size, threads);
        product(d, d->gated, &layer->down, d->update);
        add_and_norm(d->hidden, d->update, next_norm, normed, tokens, hidden_size, d->epsilon,
                     threads);
    }
}

/* For each of `blocks` blocks of LOGITS_PER_BLOCK logits: the largest one, and the sum of
   exp(scale * (logit - largest)). */
void sum_blocks(const scalar *logits, float *largest, float *sums, int64_t blocks, float scale,
                int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t block = 0; block < blocks; block++) {
        const scalar *from = logits + block * LOGITS_PER_BLOCK;
        float max = -FLT_MAX, sum = 0; /* finite, also if all logits are -inf */
#pragma omp simd reduction(max : max)
        for (int i = 0; i < LOGITS_PER_BLOCK; i++) {
            float logit = to_float(from[i]);
            max = logit > max ? logit : max;
        }
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < LOGITS_PER_BLOCK; i++) sum += fast_exp(scale * (to_float(from[i]) - max));
        largest[block] = max, sums[block] = sum;
    }
}

/* Uses every instruction of this file, on zeros: the process ends if the CPU lacks one. Returns 0. */
int probe(void) {
    enum { WIDTH = 4 * LANES, ROWS = 2, KEYS = 16 };
    static scalar zeros[ROWS * KEYS * WIDTH], out[ROWS * KEYS * WIDTH];
    const int64_t row[ROWS] = {0, 1}, column[ROWS] = {KEYS - 1};
    const int64_t start[ROWS] = {0}, end[ROWS] = {KEYS, KEYS - 1};
    const Attention a = {
        .tokens = ROWS, .heads = 1, .group = 1, .width = WIDTH, .shared = KEYS, .capacity = KEYS,
        .threads = 1, .query_stride = WIDTH, .key_stride = WIDTH, .value_stride = WIDTH,
        .query = zeros, .key = zeros, .value = zeros, .query_norm = zeros, .key_norm = zeros,
        .cosine = zeros, .sine = zeros, .shared_keys = zeros, .shared_values = zeros,
        .keys = zeros, .values = zeros, .row = row, .column = column, .start = start, .end = end,
        .out = out, .epsilon = 1, .scaling = 1};
    attend(&a);
    norm(zeros, zeros, out, ROWS, WIDTH, 1, 1);
    gate(zeros, zeros, out, ROWS, WIDTH, WIDTH, 1);
    add_and_norm(out, zeros, zeros, out, 1, WIDTH, 1, 1);
    static scalar logits[LOGITS_PER_BLOCK];
    float largest, sum;
    sum_blocks(logits, &largest, &sum, 1, 1, 1);
    return 0;
}
