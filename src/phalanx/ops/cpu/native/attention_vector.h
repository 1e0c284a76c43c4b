// Attention in vectors, in fp32 whatever the dtype of the cache.
#pragma once
#include "attention.h"

// scores [N keys][LANES * W rows] = k (N rows of dim) times q [dim][32].
template <int N, int LANES>
INLINE void score_keys(const float* q, const float* const* k, long dim, float* scores) {
    vec sums[N][LANES] = {};
    for (long d = 0; d < dim; d++) {
        vec row[LANES];
        for (int l = 0; l < LANES; l++) row[l] = load(q + d * ROWS + l * W);
        for (int n = 0; n < N; n++)
            for (int l = 0; l < LANES; l++) sums[n][l] += k[n][d] * row[l];
    }
    for (int n = 0; n < N; n++)
        for (int l = 0; l < LANES; l++) store(scores + n * ROWS + l * W, sums[n][l]);
}
template <int LANES>   // vectors of rows
static void score_block(const float* q, const float* const* k, long dim, long count, float* scores) {
    constexpr int N = W == 16 ? 8 : most(8 / LANES, 1);   // so many sums and pointers fit the registers
    for (long n = 0; n < count; n += N) {
        const float* keys[N];   // the last step may run over count: what it writes there is not used
        for (int i = 0; i < N; i++) keys[i] = k[least(n + i, count - 1)];
        score_keys<N, LANES>(q, keys, dim, scores + n * ROWS);
    }
}

// out [N rows][wide] += weights [count][32] (columns of those rows) times v (count rows), a strip of vectors at a time.
template <int N>
static void add_weighted(const float* weights, const float* const* v, long count, long wide, float* out) {
    constexpr int STRIP = W == 16 ? 4 : 2;
    for (long c = 0; c < wide; c += STRIP * W) {
        vec sums[N][STRIP];
        for (int r = 0; r < N; r++)
            for (int s = 0; s < STRIP; s++) sums[r][s] = load(out + r * wide + c + s * W);
        for (long n = 0; n < count; n++)
            for (int s = 0; s < STRIP; s++) {
                const vec value = load(v[n] + c + s * W);
                for (int r = 0; r < N; r++) sums[r][s] += weights[n * ROWS + r] * value;
            }
        for (int r = 0; r < N; r++)
            for (int s = 0; s < STRIP; s++) store(out + r * wide + c + s * W, sums[r][s]);
    }
}

// Rows of floats: those of an fp32 cache itself if they are whole strips of vectors, else copies.
INLINE const float* as_floats(const float* from, long dim, long wide, float* copy) {
    return dim == wide ? from : (const float*)memcpy(copy, from, dim * sizeof(float));
}
INLINE const float* as_floats(const bf16* from, long dim, long, float* copy) {
    long i = 0;
    for (; i + W <= dim; i += W) store(copy + i, load(from + i));
    for (; i < dim; i++) copy[i] = to_float(from[i]);
    return copy;
}

template <class T>
struct VectorSpace : HeadSpace {
    struct Setup {};   // of a thread: none
    float *q, *copies;   // [dim][32], [2][64][wide] with zeros behind dim
    const float *k[KEYS], *v[KEYS];
    static long floats(long dim) { return own_floats(dim) + dim * ROWS + 2 * KEYS * padded(dim); }
    VectorSpace(long dim, float* shared, float* own) : HeadSpace(dim, shared, own) {
        q = own + own_floats(dim), copies = q + dim * ROWS;
    }
    void set_queries(const T* const* from, long rows) {
        for (long d = 0; d < dim; d++)
            for (long r = 0; r < rows; r++) q[d * ROWS + r] = to_float(from[r][d]);
    }
    void set_key(long n, const T* key, const T* value) {
        k[n] = as_floats(key, dim, wide, copies + n * wide);
        v[n] = as_floats(value, dim, wide, copies + (KEYS + n) * wide);
    }
    void set_pair(long n, const T* k0, const T* v0, const T* k1, const T* v1) {
        set_key(n, k0, v0);
        if (k1) set_key(n + 1, k1, v1);
    }
    void score(long count, long rows) {
        if (rows > 16) score_block<32 / W>(q, k, dim, count, scores);
        else score_block<16 / W>(q, k, dim, count, scores);
    }
    void add_values(long count, long rows) {
        for (long r = 0; r < rows; r += 4) {
            const float* weights = scores + r;
            float* to = out + r * wide;
            if (rows - r >= 4) add_weighted<4>(weights, v, count, wide, to);
            else if (rows - r == 3) add_weighted<3>(weights, v, count, wide, to);
            else if (rows - r == 2) add_weighted<2>(weights, v, count, wide, to);
            else add_weighted<1>(weights, v, count, wide, to);
        }
    }
};
