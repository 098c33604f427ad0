/* What a decoder layer of Llama's kind computes between its products of matrices, for one new
   token a row: RMS norm, SwiGLU, and attention with the norms of its heads, rotary embedding, the
   taking in of key and value, and a softmax that is taken block by block (arXiv 1805.02867).

   Knows plain memory. decode_layer.py builds it, with NUMBER_IS_BF16 for bfloat16 and else for float,
   for heads of MAX_WIDTH numbers at most, a multiple of LANES. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum { BLOCK = 64 };    /* keys at a time */
enum { PER_LINE = 64 }; /* bytes that come from memory together */

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4)));

#ifdef NUMBER_IS_BF16
typedef uint16_t number;
typedef uint32_t lanes_of_bits __attribute__((vector_size(4 * LANES)));
typedef number lanes_of_numbers __attribute__((vector_size(2 * LANES), aligned(2)));

INLINE float wide(number x) {
    union { uint32_t bits; float value; } both = {(uint32_t)x << 16};
    return both.value;
}

INLINE number narrow(float x) { /* to the nearest, to even between two; what is NaN here stays so */
    union { float value; uint32_t bits; } both = {x};
    return (number)((both.bits + 0x7fff + (both.bits >> 16 & 1)) >> 16);
}

INLINE lanes load(const number *at) {
    return (lanes)(__builtin_convertvector(*(const lanes_of_numbers *)at, lanes_of_bits) << 16);
}
#else
typedef float number;
INLINE float wide(number x) { return x; }
INLINE number narrow(float x) { return x; }
INLINE lanes load(const number *at) { return *(const lanes *)at; }
#endif

typedef struct {
    int64_t rows, heads, shared, width; /* heads of keys, queries that share one, numbers of each */
    int64_t common, room, threads;      /* places of the common part, and of a row */
    int64_t query_stride, key_stride, value_stride;              /* from one row to the next */
    const number *query, *key, *value;                           /* [rows, heads (* shared), width] */
    const number *query_norm, *key_norm;                         /* [width], or none */
    const number *cosine, *sine;                                 /* [rows, width] */
    const number *common_keys, *common_values;                   /* [heads, common, width] */
    number *keys, *values;                                       /* [rows, heads, room, width] */
    const int64_t *start, *end, *own; /* [rows]: of the common part; where the new token goes */
    number *out;                      /* [rows, heads * shared, width] */
    float epsilon, scaling;
} Attention;

typedef struct { /* of the queries that share a head of keys */
    float query[MAX_SHARED * MAX_WIDTH], sum[MAX_SHARED * MAX_WIDTH];
    float top[MAX_SHARED], total[MAX_SHARED];
} State;

/* e to the x, within five millionths of itself, in operations that compilers put in lanes; libm's is
   called number by number. A power of two, and for the rest Cephes' polynomial. */
INLINE float exp_of(float x) {
    x = x < -87 ? -87 : x > 88 ? 88 : x; /* a NaN stays one */
    float power = rintf(x * 1.44269504f), rest = x - power * 0.69314718f;
    float p = 1.9875691500e-4f;
    p = p * rest + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    union { int32_t bits; float value; } two = {((int32_t)power + 127) << 23};
    return (p * rest * rest + rest + 1) * two.value;
}

/* By what RMS norm multiplies (arXiv 1910.07467). */
INLINE float factor_of(const number *in, int64_t width, float epsilon) {
    float squares = 0;
    for (int64_t d = 0; d < width; d++) squares += wide(in[d]) * wide(in[d]);
    return 1 / sqrtf(squares / width + epsilon);
}

/* A head, normed if it is to be, turned to its place. */
static void turn(const number *in, const number *norm, const number *cosine, const number *sine,
                 float epsilon, int64_t width, float *out) {
    float head[MAX_WIDTH], factor = norm ? factor_of(in, width, epsilon) : 1;
    int64_t half = width / 2;
    for (int64_t d = 0; d < width; d++)
        head[d] = norm ? wide(narrow(wide(in[d]) * factor * wide(norm[d]))) : wide(in[d]);
    for (int64_t d = 0; d < half; d++)
        out[d] = head[d] * wide(cosine[d]) - head[d + half] * wide(sine[d]);
    for (int64_t d = half; d < width; d++)
        out[d] = head[d] * wide(cosine[d]) + head[d - half] * wide(sine[d]);
}

INLINE float sum_of(lanes parts) {
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += parts[lane];
    return sum;
}

INLINE void prefetch(const number *at, int64_t width) {
    for (int64_t d = 0; d < width; d += PER_LINE / sizeof(number)) __builtin_prefetch(at + d);
}

/* The scores of at most BLOCK keys; `ahead` is what is read next, as many rows. */
INLINE void look(const State *state, const number *keys, const number *ahead, int64_t count,
                 int64_t shared, int64_t width, float scores[][BLOCK]) {
    for (int64_t p = 0; p < count; p++) {
        lanes sums[MAX_SHARED] = {0};
        prefetch(ahead + p * width, width);
        for (int64_t d = 0; d < width; d += LANES) {
            lanes part = load(keys + p * width + d);
            for (int64_t g = 0; g < shared; g++)
                sums[g] += part * *(const lanes *)(state->query + g * width + d);
        }
        for (int64_t g = 0; g < shared; g++) scores[g][p] = sum_of(sums[g]);
    }
}

/* Scores to what counts of each value, beside a top that may be a new one. */
INLINE void soften(State *state, int64_t g, int64_t count, int64_t width, float *scores) {
    float top = state->top[g];
    for (int64_t p = 0; p < count; p++) top = scores[p] > top ? scores[p] : top;
    float kept = exp_of(state->top[g] - top), total = kept * state->total[g];
    for (int64_t p = 0; p < count; p++) total += scores[p] = exp_of(scores[p] - top);
    for (int64_t d = 0; d < width; d++) state->sum[g * width + d] *= kept;
    state->top[g] = top, state->total[g] = total;
}

/* `step` groups of lanes at a time stay in registers. */
INLINE void gather(State *state, const number *values, const number *ahead, int64_t count,
                   int64_t shared, int64_t width, float scores[][BLOCK], const int step) {
    for (int64_t d = 0; d < width; d += step * LANES) {
        lanes sums[MAX_SHARED][4] = {0};
        for (int64_t p = 0; p < count; p++) {
            prefetch(ahead + p * width + d, step * LANES);
            for (int k = 0; k < step; k++) {
                lanes part = load(values + p * width + d + k * LANES);
                for (int64_t g = 0; g < shared; g++) sums[g][k] += part * scores[g][p];
            }
        }
        for (int64_t g = 0; g < shared; g++)
            for (int k = 0; k < step; k++)
                *(lanes *)(state->sum + g * width + d + k * LANES) += sums[g][k];
    }
}

/* `next` is read after these: the same places of another row. */
INLINE void over(State *state, const number *keys, const number *values, const number *next,
                 int64_t count, int64_t shared, int64_t width) {
    for (int64_t from = 0; from < count; from += BLOCK) {
        float scores[MAX_SHARED][BLOCK];
        int64_t here = count - from < BLOCK ? count - from : BLOCK, at = from * width;
        look(state, keys + at, values + at, here, shared, width, scores);
        for (int64_t g = 0; g < shared; g++) soften(state, g, here, width, scores[g]);
        if (width % (4 * LANES))
            gather(state, values + at, next + at, here, shared, width, scores, 1);
        else
            gather(state, values + at, next + at, here, shared, width, scores, 4);
    }
}

INLINE void attend_one(const Attention *a, int64_t row, int64_t head, int64_t shared) {
    State state;
    const int64_t width = a->width, own = a->own[row], start = a->start[row];
    const int64_t room = a->room * width, of_row = row * a->heads + head;
    const int64_t of_common = (head * a->common + start) * width;
    const number *cosine = a->cosine + row * width, *sine = a->sine + row * width;
    const number *query = a->query + row * a->query_stride + head * shared * width;
    number *keys = a->keys + of_row * room, *values = a->values + of_row * room;
    number *out = a->out + of_row * shared * width;
    float key[MAX_WIDTH];

    turn(a->key + row * a->key_stride + head * width, a->key_norm, cosine, sine, a->epsilon,
         width, key);
    for (int64_t d = 0; d < width; d++) keys[own * width + d] = narrow(key[d]);
    memcpy(values + own * width, a->value + row * a->value_stride + head * width,
           width * sizeof(number));

    for (int64_t g = 0; g < shared; g++) {
        turn(query + g * width, a->query_norm, cosine, sine, a->epsilon, width,
             state.query + g * width);
        state.top[g] = -INFINITY, state.total[g] = 0;
    }
    for (int64_t d = 0; d < shared * width; d++)
        state.query[d] *= a->scaling, state.sum[d] = 0;
    over(&state, a->common_keys + of_common, a->common_values + of_common, keys,
         a->end[row] - start, shared, width);
    over(&state, keys, values, keys + a->heads * room, own + 1, shared, width);
    for (int64_t g = 0; g < shared; g++)
        for (int64_t d = 0; d < width; d++)
            out[g * width + d] = narrow(state.sum[g * width + d] / state.total[g]);
}

void attend(const Attention *a) {
#pragma omp parallel for schedule(static) num_threads(a->threads)
    for (int64_t task = 0; task < a->rows * a->heads; task++) {
        int64_t head = task / a->rows, row = task % a->rows; /* a head's common part stays near */
        switch (a->shared) { /* a number that is known is kept in registers */
            case 1: attend_one(a, row, head, 1); break;
            case 2: attend_one(a, row, head, 2); break;
            case 4: attend_one(a, row, head, 4); break;
            default: attend_one(a, row, head, a->shared);
        }
    }
}

/* RMS norm of rows that lie one after the other. */
void norm(const number *in, const number *weight, number *out, int64_t rows, int64_t width,
          float epsilon, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const number *from = in + row * width;
        float factor = factor_of(from, width, epsilon);
        for (int64_t d = 0; d < width; d++)
            out[row * width + d] = narrow(wide(from[d]) * factor * wide(weight[d]));
    }
}

/* SwiGLU of rows of which each begins `stride` numbers after the one before (arXiv 2002.05202). */
void gate(const number *gates, const number *ups, number *out, int64_t rows, int64_t stride,
          int64_t width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t d = 0; d < width; d++) {
            float x = wide(gates[row * stride + d]), up = wide(ups[row * stride + d]);
            out[row * width + d] = narrow(wide(narrow(x / (1 + exp_of(-x)))) * up);
        }
}
