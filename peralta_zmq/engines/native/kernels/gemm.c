/* Rows times a weight, both in bfloat16 and summed in float, on processors that multiply pairs of
   such numbers (AVX512-BF16).

   A weight lies in panels of WIDE outputs, [panels][in / 2][WIDE][2]: for few rows it comes from
   memory in one stream. At most ROWS rows are multiplied at a time, whose sums then stay in
   registers over all inputs; the panel lies in the cache for the next of them, while the next panel
   is fetched. Each sum is taken in one order, however many rows there are.

   Knows plain memory. gemm.py builds it. */

#include <immintrin.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

enum { WIDE = 64, ROWS = 6 };     /* 24 registers of sums, 4 of the weight, one of the row */
enum { LINE = 64, AHEAD = 8192 }; /* bytes that come together; between what is read and fetched */
enum { ALONE = 1 << 18 };         /* products that one thread has done before a second one comes */

typedef uint16_t number;

/* Two numbers of each of 16 rows, to 16 numbers of each: 16 x 16 pairs are turned by four times
   taking one of the first half and one of the second. */
INLINE void turn(__m512i pairs[16]) {
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    for (int turned = 0; turned < 4; turned++) {
        __m512i from[16];
        for (int i = 0; i < 16; i++) from[i] = pairs[i];
        for (int i = 0; i < 8; i++) {
            pairs[2 * i] = _mm512_permutex2var_epi32(from[i], first, from[i + 8]);
            pairs[2 * i + 1] = _mm512_permutex2var_epi32(from[i], second, from[i + 8]);
        }
    }
}

/* `weight` is [outs, in], `in` even; outputs up to the next multiple of WIDE are zeros. */
void pack(const number *weight, number *packed, int64_t outs, int64_t in, int threads) {
    const int64_t groups = (outs + WIDE - 1) / WIDE * (WIDE / 16);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t group = 0; group < groups; group++) {
        number *to = packed + group / (WIDE / 16) * WIDE * in + group % (WIDE / 16) * 32;
        for (int64_t at = 0; at < in; at += 32) {
            __m512i pairs[16];
            const int64_t left = in - at < 32 ? in - at : 32;
            const __mmask32 here = 0xffffffffu >> (32 - left);
            for (int i = 0; i < 16; i++) {
                const int64_t row = group * 16 + i;
                pairs[i] = _mm512_maskz_loadu_epi16(row < outs ? here : 0, weight + row * in + at);
            }
            turn(pairs);
            for (int i = 0; i < left / 2; i++, to += 2 * WIDE) _mm512_storeu_si512(to, pairs[i]);
        }
    }
}

typedef struct { /* where a block of rows and a panel meet */
    const number *rows, *panel; /* [.., in]; [in / 2][WIDE][2] */
    const char *next;     /* what to fetch meanwhile, `pace` bytes for each pair of numbers */
    int64_t in, outs, pace;
    const float *begin;   /* [WIDE], of the sums */
    __mmask32 low, high;  /* which of the outputs there are */
    number *out;          /* [.., outs] */
} Meeting;

#define EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5)
#define BEGIN(r) __m512 a##r = begin_a, b##r = begin_b, c##r = begin_c, d##r = begin_d;
#define ADD(r) \
    if (r < count) { \
        __m512bh pair = (__m512bh)_mm512_set1_epi32(*(const int32_unaligned *)(row + r * m.in)); \
        a##r = _mm512_dpbf16_ps(a##r, pair, a), b##r = _mm512_dpbf16_ps(b##r, pair, b); \
        c##r = _mm512_dpbf16_ps(c##r, pair, c), d##r = _mm512_dpbf16_ps(d##r, pair, d); \
    }
#define PUT(r) \
    if (r < count) { \
        put(m.out + r * m.outs, m.low, a##r, b##r); \
        put(m.out + r * m.outs + 32, m.high, c##r, d##r); \
    }

typedef int32_t int32_unaligned __attribute__((aligned(2), may_alias));

INLINE __m512bh pairs_at(const number *at) { return (__m512bh)_mm512_loadu_si512(at); }

INLINE void put(number *out, __mmask32 which, __m512 low, __m512 high) {
    _mm512_mask_storeu_epi16(out, which, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

/* The sums have names, not numbers: compilers then keep them in registers. */
INLINE void meet(const Meeting m, const int count, const int lines) {
    const __m512 begin_a = _mm512_loadu_ps(m.begin), begin_b = _mm512_loadu_ps(m.begin + 16);
    const __m512 begin_c = _mm512_loadu_ps(m.begin + 32), begin_d = _mm512_loadu_ps(m.begin + 48);
    EACH_ROW(BEGIN)
    const number *panel = m.panel, *row = m.rows, *end = m.rows + m.in;
    const char *next = m.next;
    for (; row < end; row += 2, panel += 2 * WIDE, next += m.pace) {
        __m512bh a = pairs_at(panel), b = pairs_at(panel + 32);
        __m512bh c = pairs_at(panel + 64), d = pairs_at(panel + 96);
        for (int line = 0; line < lines; line++) _mm_prefetch(next + line * LINE, _MM_HINT_T0);
        EACH_ROW(ADD)
    }
    EACH_ROW(PUT)
}

INLINE void meet_some(const Meeting m, int64_t count, const int lines) {
    switch (count) { /* a number that is known is kept in registers */
        case 1: meet(m, 1, lines); break;
        case 2: meet(m, 2, lines); break;
        case 3: meet(m, 3, lines); break;
        case 4: meet(m, 4, lines); break;
        case 5: meet(m, 5, lines); break;
        default: meet(m, 6, lines);
    }
}

INLINE __mmask32 first_of(int64_t count) {
    return count >= 32 ? 0xffffffffu : count > 0 ? 0xffffffffu >> (32 - count) : 0;
}

/* `rows` is [num, in], `bias` [outs] or none, `out` [num, outs]. Where panels are fewer than
   threads, several threads take a panel, each for some blocks of rows. */
void multiply(const number *rows, const number *packed, const number *bias, number *out,
              int64_t num, int64_t in, int64_t outs, int threads) {
    const int64_t panels = (outs + WIDE - 1) / WIDE, blocks = (num + ROWS - 1) / ROWS;
    const int64_t wanted = (threads + panels - 1) / panels; /* threads for a panel */
    const int64_t shares = wanted < blocks ? wanted : blocks;
#pragma omp parallel for schedule(static) num_threads(threads) if (num * in * outs > ALONE)
    for (int64_t task = 0; task < panels * shares; task++) {
        const int64_t from = task / shares * WIDE, share = task % shares;
        const int64_t first = share * blocks / shares, last = (share + 1) * blocks / shares;
        const int64_t passes = last - first;
        float begin[WIDE] = {0};
        for (int64_t o = 0; bias && o < WIDE && from + o < outs; o++)
            begin[o] = _mm_cvtss_f32((__m128)_mm_cvtsi32_si128(bias[from + o] << 16));
        Meeting m = {.panel = packed + from * in, .in = in, .outs = outs, .begin = begin,
                     .low = first_of(outs - from), .high = first_of(outs - from - 32),
                     .pace = 4 * LINE / passes};
        m.next = (const char *)m.panel + (passes == 1 ? AHEAD : in * WIDE * sizeof(number));
        for (int64_t block = first; block < last; block++, m.next += in / 2 * m.pace) {
            const int64_t at = block * num / blocks, count = (block + 1) * num / blocks - at;
            m.rows = rows + at * in, m.out = out + at * outs + from;
            if (passes == 1) meet_some(m, count, 4);
            else if (passes < 4) meet_some(m, count, 2);
            else meet_some(m, count, 1);
        }
    }
}
