/* Runs one function of decode_layer.c on data from the standard input, for a foreign processor under
   an emulator. The first argument is the name of the function, the others are its numbers. An array
   is the number of its bytes, then its data (0: NULL). The input of `attend` is its struct, then the
   array of each of its pointers; its output is the data of `keys`, `values` and `out` afterwards.
   The input of the other functions is their input arrays, and the output that of their results. */

#include <stdio.h>
#include <stdlib.h>

#include "decode_layer.c"

static int64_t size;

static void *read_array(void) {
    if (fread(&size, sizeof size, 1, stdin) != 1) exit(1);
    void *data = size ? malloc(size) : NULL;
    if (size && fread(data, size, 1, stdin) != 1) exit(1);
    return data;
}

static void run_attend(void) {
    Attention a;
    if (fread(&a, sizeof a, 1, stdin) != 1) exit(1);
    a.query = read_array(), a.key = read_array(), a.value = read_array();
    a.query_norm = read_array(), a.key_norm = read_array();
    a.cosine = read_array(), a.sine = read_array();
    a.shared_keys = read_array(), a.shared_values = read_array();
    a.keys = read_array(), a.values = read_array();
    const int64_t cache_size = size;
    a.row = read_array(), a.column = read_array(), a.start = read_array(), a.end = read_array();
    a.out = read_array();
    attend(&a);
    fwrite(a.keys, cache_size, 1, stdout);
    fwrite(a.values, cache_size, 1, stdout);
    fwrite(a.out, size, 1, stdout);
}

int main(int argc, char **argv) {
    const char *name = argv[1];
    if (!strcmp(name, "attend")) {
        run_attend();
    } else if (!strcmp(name, "norm")) {
        const int64_t rows = atoll(argv[2]), width = atoll(argv[3]);
        const scalar *in = read_array(), *weight = read_array();
        scalar *out = malloc(rows * width * sizeof *out);
        norm(in, weight, out, rows, width, atof(argv[4]), 1);
        fwrite(out, sizeof *out, rows * width, stdout);
    } else if (!strcmp(name, "gate")) {
        const int64_t rows = atoll(argv[2]), stride = atoll(argv[3]), width = atoll(argv[4]);
        const scalar *gates = read_array(), *ups = read_array();
        scalar *out = malloc(rows * width * sizeof *out);
        gate(gates, ups, out, rows, stride, width, 1);
        fwrite(out, sizeof *out, rows * width, stdout);
    } else if (!strcmp(name, "sum_blocks")) {
        const int64_t blocks = atoll(argv[2]);
        float *results = malloc(2 * blocks * sizeof *results);
        sum_blocks(read_array(), results, results + blocks, blocks, atof(argv[3]), 1);
        fwrite(results, sizeof *results, 2 * blocks, stdout);
    } else {
        return 1;
    }
    return 0;
}
