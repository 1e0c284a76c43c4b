// The small steps between the products, each in one pass: rope with the cache write, RMSNorm with the residual
// addition, gated activations. Loops are plain; the compiler vectorises them.
#include "common.h"

// from [dim] rotated to [dim]; cosine and sine [half]. Pairs are (i, i + half), or (2i, 2i + 1) if interleaved.
template <class T>
INLINE void rotate(const T* from, const float* cosine, const float* sine, long half, long dim, bool interleaved, T* to) {
    if (interleaved)
        for (long i = 0; i < half; i++) {
            const float a = to_float(from[2 * i]), b = to_float(from[2 * i + 1]);
            store(to + 2 * i, a * cosine[i] - b * sine[i]);
            store(to + 2 * i + 1, b * cosine[i] + a * sine[i]);
        }
    else
        for (long i = 0; i < half; i++) {
            const float a = to_float(from[i]), b = to_float(from[i + half]);
            store(to + i, a * cosine[i] - b * sine[i]);
            store(to + i + half, b * cosine[i] + a * sine[i]);
        }
    memcpy((void*)(to + 2 * half), from + 2 * half, (dim - 2 * half) * sizeof(T));
}

struct RopeSizes {
    long tokens, heads, kv_heads, dim, half, block_size;   // half: rotated pairs of a head
    long q_token, q_head, k_token, k_head, v_token, v_head, rope_token;   // strides, in elements
    long kc_block, kc_slot, kc_head, vc_block, vc_slot, vc_head;
    int interleaved, threads;
};

template <class T>
static void rope_write_kv(const RopeSizes& a, const T* q, const T* k, const T* v, const float* cosine,
                          const float* sine, const int64_t* slots, T* k_cache, T* v_cache, T* out) {
#pragma omp parallel for num_threads(a.threads) if (a.threads > 1)
    for (long t = 0; t < a.tokens; t++) {
        const float *c = cosine + t * a.rope_token, *s = sine + t * a.rope_token;
        for (long h = 0; h < a.heads; h++)
            rotate(q + t * a.q_token + h * a.q_head, c, s, a.half, a.dim, a.interleaved, out + (t * a.heads + h) * a.dim);
        const long block = slots[t] / a.block_size, slot = slots[t] % a.block_size;
        for (long h = 0; h < a.kv_heads; h++) {
            T* to = k_cache + block * a.kc_block + slot * a.kc_slot + h * a.kc_head;
            rotate(k + t * a.k_token + h * a.k_head, c, s, a.half, a.dim, a.interleaved, to);
            memcpy((void*)(v_cache + block * a.vc_block + slot * a.vc_slot + h * a.vc_head),
                   v + t * a.v_token + h * a.v_head, a.dim * sizeof(T));
        }
    }
}

EXPORT void phalanx_rope_write_kv(const RopeSizes* sizes, const void* q, const void* k, const void* v,
                                  const float* cosine, const float* sine, const int64_t* slots, void* k_cache,
                                  void* v_cache, void* out, int is_bf16) {
    if (is_bf16)
        rope_write_kv(*sizes, (const bf16*)q, (const bf16*)k, (const bf16*)v, cosine, sine, slots, (bf16*)k_cache,
                      (bf16*)v_cache, (bf16*)out);
    else
        rope_write_kv(*sizes, (const float*)q, (const float*)k, (const float*)v, cosine, sine, slots, (float*)k_cache,
                      (float*)v_cache, (float*)out);
}

// Rows of x, at (row / inner) * outer_stride + (row % inner) * inner_stride; residual, sums and out are contiguous.
// With a residual, sums = x + residual is what is normed.
template <class T, class Wt>
static void rms_norm(const T* x, long outer_stride, long inner_stride, long inner, const T* residual, const Wt* weight,
                     float eps, long rows, long size, T* sums, T* out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long r = 0; r < rows; r++) {
        const T* from = x + r / inner * outer_stride + r % inner * inner_stride;
        if (residual) {
            for (long i = 0; i < size; i++)
                store(sums + r * size + i, to_float(from[i]) + to_float(residual[r * size + i]));
            from = sums + r * size;
        }
        float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
        for (long i = 0; i < size; i++) squares += to_float(from[i]) * to_float(from[i]);
        const float scale = 1.0f / sqrtf(squares / size + eps);
        for (long i = 0; i < size; i++) store(out + r * size + i, to_float(from[i]) * scale * to_float(weight[i]));
    }
}

EXPORT void phalanx_rms_norm(const void* x, long outer_stride, long inner_stride, long inner, const void* residual,
                             const void* weight, double eps, long rows, long size, void* sums, void* out, int is_bf16,
                             int weight_bf16, int threads) {
    if (is_bf16 && weight_bf16)
        rms_norm((const bf16*)x, outer_stride, inner_stride, inner, (const bf16*)residual, (const bf16*)weight,
                 (float)eps, rows, size, (bf16*)sums, (bf16*)out, threads);
    else if (is_bf16)
        rms_norm((const bf16*)x, outer_stride, inner_stride, inner, (const bf16*)residual, (const float*)weight,
                 (float)eps, rows, size, (bf16*)sums, (bf16*)out, threads);
    else
        rms_norm((const float*)x, outer_stride, inner_stride, inner, (const float*)residual, (const float*)weight,
                 (float)eps, rows, size, (float*)sums, (float*)out, threads);
}

// x * sigmoid(x * (a + b x^2)): silu, quick gelu, and the tanh form of gelu, since (1 + tanh u) / 2 = sigmoid(2 u).
INLINE vec activated(vec x, float a, float b) {
    vec h = x < -1e4f ? vec{} - 1e4f : x;
    h = h > 1e4f ? vec{} + 1e4f : h;   // 0 * inf shall not occur
    return x / (1.0f + fast_exp(-h * (a + b * h * h)));
}

// x [rows, 2 size] = gate | up, rows of stride `stride` -> activated(gate) * up; or with gated = 0 no up, x [rows, size].
template <class T>
static void activate(const T* x, long stride, long rows, long size, int gated, float a, float b, T* out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long r = 0; r < rows; r++) {
        const T *gate = x + r * stride, *up = gate + size;
        T* to = out + r * size;
        long i = 0;
        for (; i + W <= size; i += W) store(to + i, activated(load(gate + i), a, b) * (gated ? load(up + i) : vec{} + 1.0f));
        for (; i < size; i++)
            store(to + i, activated(vec{} + to_float(gate[i]), a, b)[0] * (gated ? to_float(up[i]) : 1.0f));
    }
}

EXPORT void phalanx_activate(const void* x, long stride, long rows, long size, int gated, double a, double b, void* out,
                             int is_bf16, int threads) {
    if (is_bf16) activate((const bf16*)x, stride, rows, size, gated, (float)a, (float)b, (bf16*)out, threads);
    else activate((const float*)x, stride, rows, size, gated, (float)a, (float)b, (float*)out, threads);
}
