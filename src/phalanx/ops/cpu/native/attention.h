// What the attention kernels share: the call, a task, and the space that a task works in.
#pragma once
#include "common.h"

enum { KEYS = 64, ROWS = 32 };   // of a block of scores [64 keys][32 rows]

struct AttentionSizes {
    long tokens, sequences, kv_heads, group, dim, block_size;   // group: query heads of a KV head
    long q_token, q_head;                                       // strides, in elements
    long k_block, k_slot, k_head, v_block, v_slot, v_head, table_row;
    long window;                                                // 0: none
    float scale, soft_cap;                                      // 0: none
    int threads;
};

// One head's queries, a block of keys and values, and what was summed of it. A kernel adds its own layout of them:
// set_queries, set_pair (two neighbouring keys and their values; the second null behind an odd last), score, add_values.
struct HeadSpace {
    long dim, wide;   // wide: dim padded to whole strips of vectors and tiles
    float *scores, *out, *peak, *sum;   // [64][32], which all heads share, then [32][wide], [32], [32]
    static long padded(long dim) { return ceil_div(dim, 64) * 64; }
    static long shared_floats() { return KEYS * ROWS; }
    static long own_floats(long dim) { return ROWS * (padded(dim) + 2); }
    HeadSpace(long dim, float* shared, float* own) : dim(dim), wide(padded(dim)) {
        scores = shared, out = own, peak = own + ROWS * wide, sum = peak + ROWS;
    }
    void clear() {
        for (long i = 0; i < ROWS * wide; i++) out[i] = 0.0f;
        for (long r = 0; r < ROWS; r++) peak[r] = -INFINITY, sum[r] = 0.0f;
    }
};
