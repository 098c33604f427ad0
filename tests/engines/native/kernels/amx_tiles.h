/* Emulates the AMX instructions of gemm.c with AVX512. In front of gemm.c, it replaces their
   intrinsics and the system call for the permission to use them. A tile that is not configured, or
   whose size does not match, ends the process, as on a CPU with AMX. There are two differences from
   such a CPU: denormal numbers are not flushed to zero, and the compiler sees which memory is read,
   so that the barrier in gemm.c is not tested. Source: Intel's Software Developer's Manual,
   volume 2. */

#include <assert.h>
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h> /* before `syscall` is replaced */

enum { MAX_TILE_ROWS = 16, MAX_ROW_BYTES = 64 };
enum { TMM0, TMM1, TMM2, TMM3, TMM4, TMM5, TMM6, TMM7, NUM_TILES };

typedef struct {
    int rows, row_bytes; /* as configured; 0 if the tile may not be used */
    char data[MAX_TILE_ROWS][MAX_ROW_BYTES];
} EmulatedTile;

static _Thread_local EmulatedTile emulated_tiles[NUM_TILES];
static int is_permitted;

/* Stands for the system call arch_prctl, and grants only the permission to use tiles. */
static long permit(long call, int code, int feature) {
    assert(call == SYS_arch_prctl && code == 0x1023); /* ARCH_REQ_XCOMP_PERM */
    assert(feature == 18);                            /* XFEATURE_XTILEDATA */
    is_permitted = 1;
    return 0;
}

static void assert_zero(const uint8_t *bytes, int first, int last) {
    for (int i = first; i <= last; i++) assert(bytes[i] == 0);
}

/* `config` is the operand of ldtilecfg, 64 bytes: the palette in byte 0, the row sizes of the tiles
   from byte 16 on, their numbers of rows from byte 48 on. */
static void load_config(const void *config) {
    const uint8_t *bytes = config;
    assert(is_permitted);
    assert(bytes[0] == 1);
    assert_zero(bytes, 1, 15);
    assert_zero(bytes, 32, 47);
    assert_zero(bytes, 56, 63);
    memset(emulated_tiles, 0, sizeof emulated_tiles);
    for (int i = 0; i < NUM_TILES; i++) {
        uint16_t row_bytes;
        memcpy(&row_bytes, bytes + 16 + 2 * i, sizeof row_bytes);
        assert(row_bytes <= MAX_ROW_BYTES && bytes[48 + i] <= MAX_TILE_ROWS);
        assert(!row_bytes == !bytes[48 + i]);
        emulated_tiles[i].row_bytes = row_bytes;
        emulated_tiles[i].rows = bytes[48 + i];
    }
}

static void release_tiles(void) { memset(emulated_tiles, 0, sizeof emulated_tiles); }

static void load_tile(int number, const void *from, int64_t stride) {
    EmulatedTile *tile = emulated_tiles + number;
    assert(tile->rows);
    memset(tile->data, 0, sizeof tile->data);
    for (int row = 0; row < tile->rows; row++)
        memcpy(tile->data[row], (const char *)from + row * stride, tile->row_bytes);
}

static void store_tile(int number, void *to, int64_t stride) {
    const EmulatedTile *tile = emulated_tiles + number;
    assert(tile->rows);
    for (int row = 0; row < tile->rows; row++)
        memcpy((char *)to + row * stride, tile->data[row], tile->row_bytes);
}

/* sums += rows * weights. Adds up the products of the first numbers of all pairs, and those of the
   second numbers; then adds both totals to the sum. */
static void add_products(int sums_number, int rows_number, int weights_number) {
    EmulatedTile *sums = emulated_tiles + sums_number;
    const EmulatedTile *rows = emulated_tiles + rows_number;
    const EmulatedTile *weights = emulated_tiles + weights_number;
    const int pairs = rows->row_bytes / 4;
    const __m512i upper = _mm512_set1_epi32(0xffff0000);
    assert(sums != rows && sums != weights && rows != weights);
    assert(rows->rows && weights->rows == pairs);
    assert(sums->rows == rows->rows && sums->row_bytes == weights->row_bytes);
    for (int row = 0; row < rows->rows; row++) {
        __m512 first = _mm512_setzero_ps(), second = _mm512_setzero_ps();
        for (int i = 0; i < pairs; i++) {
            int32_t pair;
            memcpy(&pair, rows->data[row] + 4 * i, sizeof pair);
            const __m512i a = _mm512_set1_epi32(pair), b = _mm512_loadu_si512(weights->data[i]);
            first = _mm512_fmadd_ps((__m512)_mm512_slli_epi32(a, 16),
                                    (__m512)_mm512_slli_epi32(b, 16), first);
            second = _mm512_fmadd_ps((__m512)_mm512_and_si512(a, upper),
                                     (__m512)_mm512_and_si512(b, upper), second);
        }
        const __m512 sum = _mm512_loadu_ps(sums->data[row]);
        _mm512_storeu_ps(sums->data[row], _mm512_add_ps(sum, _mm512_add_ps(first, second)));
    }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig load_config
#define _tile_release release_tiles
/* Like the intrinsics, these accept only the digits 0 to 7 as the number of a tile. */
#define _tile_loadd(tile, from, stride) load_tile(TMM##tile, from, stride)
#define _tile_stored(tile, to, stride) store_tile(TMM##tile, to, stride)
#define _tile_dpbf16ps(sums, rows, weights) add_products(TMM##sums, TMM##rows, TMM##weights)
#define syscall permit
