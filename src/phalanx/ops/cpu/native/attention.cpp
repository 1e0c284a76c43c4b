// Causal attention over a blocked KV cache, for ragged batches of prompts, chunks and decode steps in one call.
//
// A task is one sequence, one KV head, and up to 32 rows, a row being (new token, query head of that KV head): so a key
// read once serves all query heads of its group. Keys come in blocks of 64 that begin at multiples of 64; they are
// gathered from the cache as floats, and each row keeps a running maximum and sum (online softmax). A row's result
// depends on its own query and context only, not on the rows or sequences beside it.
#include "common.h"

enum { KEYS = 64, ROWS = 32 };

struct AttentionSizes {
    long tokens, sequences, kv_heads, group, dim, block_size;   // group: query heads of a KV head
    long q_token, q_head;                                       // strides, in elements
    long k_block, k_slot, k_head, v_block, v_slot, v_head, table_row;
    long window;                                                // 0: none
    float scale, soft_cap;                                      // 0: none
    int threads;
};

template <class T>
struct Attention : AttentionSizes {
    const T *q, *k_cache, *v_cache;
    const int32_t *table, *starts, *lengths;
    T* out;
};

struct Task {
    long sequence, kv_head, row, rows, first_position;   // rows row.. of the sequence; position of its first new token
};

// The memory of a task. dim is padded to whole vectors: `wide`.
struct Space {
    float *q, *k, *v, *scores, *out, *most, *sum;
    Space(Scratch& scratch, long dim, long wide) {
        float* p = (float*)scratch.get((dim * ROWS + KEYS * dim + KEYS * wide + KEYS * ROWS + ROWS * wide + 2 * ROWS) * 4);
        q = p, k = q + dim * ROWS, v = k + KEYS * dim, scores = v + KEYS * wide, out = scores + KEYS * ROWS;
        most = out + ROWS * wide, sum = most + ROWS;
    }
};

// scores [N keys][LANES * W rows] = k [N][dim] times q [dim][32].
template <int N, int LANES>
INLINE void score_keys(const float* q, const float* k, long dim, float* scores) {
    vec sums[N][LANES] = {};
    for (long d = 0; d < dim; d++) {
        vec row[LANES];
        for (int l = 0; l < LANES; l++) row[l] = ((const vec*)(q + d * ROWS))[l];
        for (int n = 0; n < N; n++)
            for (int l = 0; l < LANES; l++) sums[n][l] += k[n * dim + d] * row[l];
    }
    for (int n = 0; n < N; n++)
        for (int l = 0; l < LANES; l++) ((vec*)(scores + n * ROWS))[l] = sums[n][l];
}
template <int LANES>   // vectors of rows
static void score_block(const float* q, const float* k, long dim, long count, float* scores) {
    constexpr int N = W == 16 ? 16 / LANES : most(8 / LANES, 1);   // so many sums fit the registers
    // The last step may run over count: there is room, and what it writes is not used.
    for (long n = 0; n < count; n += N) score_keys<N, LANES>(q, k + n * dim, dim, scores + n * ROWS);
}

// out [N rows][wide] += weights [count][32] (columns of those rows) times v [count][wide], one strip of vectors a time.
template <int N>
static void add_values(const float* weights, const float* v, long count, long wide, float* out) {
    constexpr int STRIP = W == 16 ? 4 : 2;
    for (long c = 0; c < wide; c += STRIP * W) {
        vec sums[N][STRIP];
        for (int r = 0; r < N; r++)
            for (int s = 0; s < STRIP; s++) sums[r][s] = ((const vec*)(out + r * wide + c))[s];
        for (long n = 0; n < count; n++)
            for (int s = 0; s < STRIP; s++) {
                const vec value = ((const vec*)(v + n * wide + c))[s];
                for (int r = 0; r < N; r++) sums[r][s] += weights[n * ROWS + r] * value;
            }
        for (int r = 0; r < N; r++)
            for (int s = 0; s < STRIP; s++) ((vec*)(out + r * wide + c))[s] = sums[r][s];
    }
}

// Running softmax: scores [count][32] of keys first.. become weights, out is rescaled to the new maximum. N: rows that
// are computed, 16 or 32.
template <int N>
static void softmax_block(const AttentionSizes& a, const Task& t, const Space& space, long first, long count, long wide) {
    int32_t newest[N], oldest[N];   // of these keys, a row sees oldest <= n <= newest
    bool hidden = false;
    for (long r = 0; r < N; r++) {
        const long position = t.first_position + (t.row + least(r, t.rows - 1)) / a.group;
        newest[r] = position - first;
        oldest[r] = a.window ? most(position - a.window + 1 - first, 0) : 0;
        hidden |= newest[r] < count - 1 || oldest[r] > 0;
    }
    float peak[N], factor[N];
    for (int r = 0; r < N; r++) peak[r] = space.most[r];
    for (int n = 0; n < count; n++) {
        float* s = space.scores + n * ROWS;
        if (a.soft_cap != 0.0f)
            for (int r = 0; r < N; r++) s[r] = a.soft_cap * (1.0f - 2.0f / (fast_exp(2.0f / a.soft_cap * s[r]) + 1.0f));
        if (hidden)
            for (int r = 0; r < N; r++) s[r] = n <= newest[r] && n >= oldest[r] ? s[r] : -INFINITY;
        for (int r = 0; r < N; r++) peak[r] = peak[r] > s[r] ? peak[r] : s[r];
    }
    for (int r = 0; r < N; r++) {
        // A row that has seen nothing yet has the maximum -inf: 0 stands in for it, since -inf - -inf is NaN.
        const float base = peak[r] == -INFINITY ? 0.0f : peak[r];
        factor[r] = fast_exp(space.most[r] - base);   // exp(-inf) is 0
        space.sum[r] *= factor[r];
        space.most[r] = peak[r];
        peak[r] = base;
    }
    for (int n = 0; n < count; n++) {
        float* s = space.scores + n * ROWS;
        for (int r = 0; r < N; r++) {
            s[r] = fast_exp(s[r] - peak[r]);
            space.sum[r] += s[r];
        }
    }
    for (long r = 0; r < t.rows; r++)
        if (factor[r] != 1.0f)
            for (long d = 0; d < wide; d++) space.out[r * wide + d] *= factor[r];
}

template <class T>
static void gather(const Attention<T>& a, const Task& t, long first, long count, const Space& space, long wide) {
    const int32_t* blocks = a.table + t.sequence * a.table_row;
    for (long n = 0; n < count; n++) {
        const long block = blocks[(first + n) / a.block_size], slot = (first + n) % a.block_size;
        const T* k = a.k_cache + block * a.k_block + slot * a.k_slot + t.kv_head * a.k_head;
        const T* v = a.v_cache + block * a.v_block + slot * a.v_slot + t.kv_head * a.v_head;
        for (long d = 0; d < a.dim; d++) space.k[n * a.dim + d] = to_float(k[d]);
        for (long d = 0; d < a.dim; d++) space.v[n * wide + d] = to_float(v[d]);
    }
}
// Asks for the keys and values of the next block of keys, which are scattered, while this one is worked on.
template <class T>
static void prefetch(const Attention<T>& a, const Task& t, long first, long count) {
    const int32_t* blocks = a.table + t.sequence * a.table_row;
    for (long n = 0; n < count; n++) {
        const long block = blocks[(first + n) / a.block_size], slot = (first + n) % a.block_size;
        const T* k = a.k_cache + block * a.k_block + slot * a.k_slot + t.kv_head * a.k_head;
        const T* v = a.v_cache + block * a.v_block + slot * a.v_slot + t.kv_head * a.v_head;
        for (long d = 0; d < a.dim; d += 64 / (long)sizeof(T)) __builtin_prefetch(k + d), __builtin_prefetch(v + d);
    }
}

template <class T>
static void attend(const Attention<T>& a, const Task& t, const Space& space, long wide) {
    for (long r = 0; r < ROWS; r++) {   // rows past the last repeat it: their scores are finite and not used
        const long row = t.row + least(r, t.rows - 1), token = a.starts[t.sequence] + row / a.group;
        const T* q = a.q + token * a.q_token + (t.kv_head * a.group + row % a.group) * a.q_head;
        for (long d = 0; d < a.dim; d++) space.q[d * ROWS + r] = a.scale * to_float(q[d]);
        space.most[r] = -INFINITY, space.sum[r] = 0.0f;
    }
    memset(space.out, 0, ROWS * wide * sizeof(float));
    const long oldest = a.window ? most(t.first_position + t.row / a.group - a.window + 1, 0) : 0;
    const long end = t.first_position + (t.row + t.rows - 1) / a.group + 1;
    for (long block = oldest / KEYS * KEYS; block < end; block += KEYS) {
        const long first = most(block, oldest), count = least(block + KEYS, end) - first;
        gather(a, t, first, count, space, wide);
        if (block + KEYS < end) prefetch(a, t, block + KEYS, least(KEYS, end - block - KEYS));
        if (t.rows > 16) {
            score_block<32 / W>(space.q, space.k, a.dim, count, space.scores);
            softmax_block<32>(a, t, space, first, count, wide);
        } else {
            score_block<16 / W>(space.q, space.k, a.dim, count, space.scores);
            softmax_block<16>(a, t, space, first, count, wide);
        }
        long r = 0;
        for (; r + 4 <= t.rows; r += 4) add_values<4>(space.scores + r, space.v, count, wide, space.out + r * wide);
        if (t.rows - r == 3) add_values<3>(space.scores + r, space.v, count, wide, space.out + r * wide);
        if (t.rows - r == 2) add_values<2>(space.scores + r, space.v, count, wide, space.out + r * wide);
        if (t.rows - r == 1) add_values<1>(space.scores + r, space.v, count, wide, space.out + r * wide);
    }
    for (long r = 0; r < t.rows; r++) {
        const long row = t.row + r, token = a.starts[t.sequence] + row / a.group;
        T* to = a.out + (token * a.kv_heads * a.group + t.kv_head * a.group + row % a.group) * a.dim;
        const float scale = space.sum[r] > 0.0f ? 1.0f / space.sum[r] : 0.0f;
        for (long d = 0; d < a.dim; d++) store(to + d, space.out[r * wide + d] * scale);
    }
}

template <class T>
static void attention(const Attention<T>& a) {
    static thread_local Scratch plan;
    const long heads = a.kv_heads * a.group, strip = W == 16 ? 4 * W : 2 * W;
    const long wide = ceil_div(a.dim, strip) * strip;
    long* tiles = (long*)plan.get((a.sequences + 1) * sizeof(long));   // row tiles before each sequence
    tiles[0] = 0;
    for (long s = 0; s < a.sequences; s++)
        tiles[s + 1] = tiles[s] + ceil_div((a.starts[s + 1] - a.starts[s]) * a.group, ROWS);
    const long used = a.sequences ? a.starts[a.sequences] : 0;
    memset((void*)(a.out + used * heads * a.dim), 0, (a.tokens - used) * heads * a.dim * sizeof(T));
#pragma omp parallel num_threads(a.threads) if (a.threads > 1)
    {
        static thread_local Scratch scratch;
        const Space space(scratch, a.dim, wide);
        memset(space.v, 0, KEYS * wide * sizeof(float));
        long s = 0;
#pragma omp for schedule(dynamic)
        for (long task = 0; task < tiles[a.sequences] * a.kv_heads; task++) {
            const long tile = task / a.kv_heads;
            while (tiles[s + 1] <= tile) s++;   // a thread's tasks come in order
            const long tokens = a.starts[s + 1] - a.starts[s], row = (tile - tiles[s]) * ROWS;
            attend(a, Task{s, task % a.kv_heads, row, least(ROWS, tokens * a.group - row), a.lengths[s] - tokens},
                   space, wide);
        }
    }
}

EXPORT void phalanx_attention(const AttentionSizes* sizes, const void* q, const void* k_cache, const void* v_cache,
                              const int32_t* table, const int32_t* starts, const int32_t* lengths, void* out,
                              int is_bf16) {
    if (is_bf16)
        attention(Attention<bf16>{*sizes, (const bf16*)q, (const bf16*)k_cache, (const bf16*)v_cache, table, starts,
                                  lengths, (bf16*)out});
    else
        attention(Attention<float>{*sizes, (const float*)q, (const float*)k_cache, (const float*)v_cache, table, starts,
                                   lengths, (float*)out});
}
