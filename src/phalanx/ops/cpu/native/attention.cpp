// Causal attention over a blocked KV cache, for ragged batches of prompts, chunks and decode steps in one call.
//
// A task is one sequence, up to 32 rows, a row being (new token, query head of a KV head), and one KV head or all: so a
// key that is read once serves all query heads of its group. Keys come in blocks of 64 that begin at multiples of 64,
// and each row keeps a running maximum and sum (online softmax). A row's result depends on its own query and context
// only, not on the rows, heads or sequences beside it.
#include "attention_amx.h"
#include "attention_vector.h"

template <class T>
struct Attention : AttentionSizes {
    const T *q, *k_cache, *v_cache;
    const int32_t *table, *starts, *lengths;
    T* out;
};

struct Task {
    long sequence, first_head, heads, row, rows, first_position;   // first_position: of the sequence's first new token
};

template <class T>
struct Cached {   // the key and value of a position, of the first head of a task
    const T *k, *v;
    Cached(const Attention<T>& a, const Task& t, long position) {
        const long block = a.table[t.sequence * a.table_row + position / a.block_size], slot = position % a.block_size;
        k = a.k_cache + block * a.k_block + slot * a.k_slot + t.first_head * a.k_head;
        v = a.v_cache + block * a.v_block + slot * a.v_slot + t.first_head * a.v_head;
    }
};

// Running softmax over the first LANES vectors of rows: scores of the keys first.. become weights, what was summed so
// far is rescaled to the new maximum. A row at `position` sees the keys position - window < j <= position.
template <int LANES>
static void softmax_block(const AttentionSizes& a, const int32_t* position, long first, long count, long rows,
                          const HeadSpace& space) {
    const bool all = first + count - 1 <= position[0] && (!a.window || first > position[rows - 1] - a.window);
    const bool capped = a.soft_cap != 0.0f;
    const float scale = capped ? 1.0f : a.scale;   // capped scores are scaled already
    float *const peaks = space.peak, *const sums = space.sum;
    float factors[ROWS];
    for (int l = 0; l < LANES; l++) {
        float* const scores = space.scores + l * W;
        const ivec at = *(const ivec*)(position + l * W) - (int32_t)first;
        const vec old = load(peaks + l * W);
        vec peak = old;
        for (int n = 0; n < count; n++) {
            vec s = load(scores + n * ROWS);
            if (capped) s = a.soft_cap - 2.0f * a.soft_cap / (fast_exp(2.0f * a.scale / a.soft_cap * s) + 1.0f);
            if (!all) s = (at >= n) & (a.window ? at - (int32_t)a.window < n : ivec{} - 1) ? s : vec{} - INFINITY;
            if (!all || capped) store(scores + n * ROWS, s);
            peak = peak > s ? peak : s;
        }
        // A row that has seen nothing yet has the maximum -inf: 0 stands in for it, since -inf - -inf is NaN.
        const vec base = peak == -INFINITY ? vec{} : peak * scale;
        const vec factor = peak == old ? vec{} + 1.0f : fast_exp(old * scale - base);   // exactly 1 where nothing changed
        vec sum = load(sums + l * W) * factor;
        for (int n = 0; n < count; n++) {
            const vec weight = fast_exp(load(scores + n * ROWS) * scale - base);
            store(scores + n * ROWS, weight);
            sum += weight;
        }
        store(peaks + l * W, peak);
        store(sums + l * W, sum);
        store(factors + l * W, factor);
    }
    for (long r = 0; r < rows; r++)
        if (factors[r] != 1.0f)
            for (float* o = space.out + r * space.wide; o < space.out + (r + 1) * space.wide; o += W) store(o, load(o) * factors[r]);
}

template <class T, class Space>
static void attend(const Attention<T>& a, const Task& t, Space* spaces) {
    auto token = [&](long r) { return a.starts[t.sequence] + (t.row + r) / a.group; };
    auto head = [&](long h, long r) { return (t.first_head + h) * a.group + (t.row + r) % a.group; };
    int32_t position[ROWS];   // rows past the last are computed with whatever is there, and not used
    for (long r = 0; r < ROWS; r++) position[r] = t.first_position + (t.row + least(r, t.rows - 1)) / a.group;
    for (long h = 0; h < t.heads; h++) {
        spaces[h].clear();
        const T* queries[ROWS];
        for (long r = 0; r < t.rows; r++) queries[r] = a.q + token(r) * a.q_token + head(h, r) * a.q_head;
        spaces[h].set_queries(queries, t.rows);
    }
    const long oldest = a.window ? most(position[0] - a.window + 1, 0) : 0, end = position[ROWS - 1] + 1;
    for (long block = oldest / KEYS * KEYS; block < end; block += KEYS) {
        const long count = least(KEYS, end - block);
        for (long n = 0; n < count; n += 2) {   // all heads of a position lie together in memory
            const bool pair = n + 1 < count;
            // No row sees what is before the oldest: the oldest stands in for it, so that blocks do not shift.
            const Cached<T> one(a, t, most(block + n, oldest)), two(a, t, most(block + n + pair, oldest));
            for (long h = 0; h < t.heads; h++)
                spaces[h].set_pair(n, one.k + h * a.k_head, one.v + h * a.v_head,
                                   pair ? two.k + h * a.k_head : nullptr, pair ? two.v + h * a.v_head : nullptr);
        }
        for (long h = 0; h < t.heads; h++) {
            spaces[h].score(count, t.rows);
            if (t.rows > 16) softmax_block<32 / W>(a, position, block, count, t.rows, spaces[h]);
            else softmax_block<16 / W>(a, position, block, count, t.rows, spaces[h]);
            spaces[h].add_values(count, t.rows);
        }
    }
    for (long h = 0; h < t.heads; h++)
        for (long r = 0; r < t.rows; r++) {
            T* to = a.out + (token(r) * a.kv_heads * a.group + head(h, r)) * a.dim;
            const float sum = spaces[h].sum[r], scale = sum > 0.0f ? 1.0f / sum : 0.0f;
            for (long d = 0; d < a.dim; d++) store(to + d, spaces[h].out[r * spaces[h].wide + d] * scale);
        }
}

template <class Space, class T>
static void attention(const Attention<T>& a) {
    static thread_local Scratch plan;
    long* tiles = (long*)plan.get((a.sequences + 1) * sizeof(long));   // row tiles before each sequence
    tiles[0] = 0;
    for (long s = 0; s < a.sequences; s++)
        tiles[s + 1] = tiles[s] + ceil_div((a.starts[s + 1] - a.starts[s]) * a.group, ROWS);
    const long used = a.starts[a.sequences], row_size = a.kv_heads * a.group * a.dim;
    memset((void*)(a.out + used * row_size), 0, (a.tokens - used) * row_size * sizeof(T));
    // All heads in one task read the cache in order; with few tasks for the threads, a head each.
    const long heads = tiles[a.sequences] >= 4 * a.threads ? a.kv_heads : 1, parts = a.kv_heads / heads;
#pragma omp parallel num_threads(a.threads) if (a.threads > 1)
    {
        static thread_local Scratch scratch, memory;
        const long floats = Space::floats(a.dim), all = HeadSpace::shared_floats() + heads * floats;
        float* const shared = (float*)memory.get(all * sizeof(float));
        if (a.dim % 64) memset(shared, 0, all * sizeof(float));   // what lies behind dim is 0 and stays so
        Space* const spaces = (Space*)scratch.get(heads * sizeof(Space));
        for (long h = 0; h < heads; h++)
            spaces[h] = Space(a.dim, shared, shared + HeadSpace::shared_floats() + h * floats);
        [[maybe_unused]] const typename Space::Setup setup;
        long s = 0;
#pragma omp for schedule(monotonic : dynamic)
        for (long task = 0; task < tiles[a.sequences] * parts; task++) {
            const long tile = task / parts;
            while (tiles[s + 1] <= tile) s++;   // a thread's tasks come in order
            const long tokens = a.starts[s + 1] - a.starts[s], row = (tile - tiles[s]) * ROWS;
            attend(a, Task{s, task % parts, heads, row, least(ROWS, tokens * a.group - row), a.lengths[s] - tokens}, spaces);
        }
    }
}

// starts: of each sequence's rows in q, and their end; lengths: of the contexts; q, caches and out are bf16 or fp32.
EXPORT void phalanx_attention(const AttentionSizes* sizes, const void* q, const void* k_cache, const void* v_cache,
                              const int32_t* table, const int32_t* starts, const int32_t* lengths, void* out,
                              int is_bf16, [[maybe_unused]] int amx) {
    if (!is_bf16)
        return attention<VectorSpace<float>>(Attention<float>{
            *sizes, (const float*)q, (const float*)k_cache, (const float*)v_cache, table, starts, lengths, (float*)out});
    const Attention<bf16> call{*sizes, (const bf16*)q, (const bf16*)k_cache, (const bf16*)v_cache, table, starts,
                               lengths, (bf16*)out};
#ifdef HAVE_AMX
    if (amx) return attention<TileSpace>(call);
#endif
    attention<VectorSpace<bf16>>(call);
}
