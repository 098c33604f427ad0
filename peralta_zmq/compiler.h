/* For the C files that compiler.py compiles: a number, bfloat16 with SCALAR_IS_BF16, else float. */

#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

#ifdef SCALAR_IS_BF16
typedef uint16_t scalar;

INLINE float to_float(scalar x) {
    union { uint32_t bits; float value; } both = {(uint32_t)x << 16};
    return both.value;
}

/* Rounds to nearest, ties to even. The NaNs that processors produce stay NaN. */
INLINE scalar to_scalar(float x) {
    union { float value; uint32_t bits; } both = {x};
    return (scalar)((both.bits + 0x7fff + (both.bits >> 16 & 1)) >> 16);
}
#else
typedef float scalar;
INLINE float to_float(scalar x) { return x; }
INLINE scalar to_scalar(float x) { return x; }
#endif
