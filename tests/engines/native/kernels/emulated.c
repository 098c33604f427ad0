/* Runs one function of decode_layer.c on data from the standard input, for a foreign processor under
   an emulator. The input is the struct of `attend`, then for each of its pointers the number of bytes
   and the data (0: NULL). The output is the data of `keys`, `values` and `out` afterwards. */

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

int main(void) {
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
    return 0;
}
