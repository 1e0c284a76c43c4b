// Attention of bf16 on AMX tiles. Scores come out as [key][row], so that the softmax runs down vectors of rows; to weigh
// the values, pairs of keys are rounded to bf16 and turned over into [row][key].
#pragma once
#include "amx.h"
#include "attention.h"

#ifdef HAVE_AMX
// 16 rows of 16 four-byte elements, turned over.
INLINE void transpose(__m512i (&x)[16]) {
    __m512i y[16];
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
            x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {   // 128-bit quarters
            y[i + j] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0x88);
            y[i + j + 4] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0xdd);
        }
    for (int j = 0; j < 8; j++) {
        x[j] = _mm512_shuffle_i32x4(y[j], y[j + 8], 0x88);
        x[j + 8] = _mm512_shuffle_i32x4(y[j], y[j + 8], 0xdd);
    }
}

struct TileSpace : HeadSpace {
    using Setup = TileConfig;
    enum { STEPS = KEYS / STEP_K };
    long steps;                       // of dim
    bf16 *q, *k, *v, *weights;        // [step][16 pairs][32 rows][2], [4 key tiles][step][16][32],
                                      // [chunk of 32][2 steps][16 pairs][32][2], [2 row tiles][2 steps][16][32]
    static long floats(long dim) { return own_floats(dim) + (padded(dim) * (ROWS + 2 * KEYS) + ROWS * KEYS) / 2; }
    TileSpace(long dim, float* shared, float* own) : HeadSpace(dim, shared, own), steps(ceil_div(dim, STEP_K)) {
        q = (bf16*)(own + own_floats(dim)), k = q + wide * ROWS, v = k + wide * KEYS, weights = v + wide * KEYS;
    }
    static __m512i part(const bf16* from, long left) {   // 32 elements, zeros behind the last
        return _mm512_maskz_loadu_epi16(left >= 32 ? ~0u : (1u << left) - 1, from);
    }
    void set_queries(const bf16* const* from, long rows) {
        for (long t = 0; t < rows; t += 16)
            for (long s = 0; s < steps; s++) {
                __m512i x[16];
                for (long r = 0; r < 16; r++)
                    x[r] = t + r < rows ? part(from[t + r] + s * 32, dim - s * 32) : _mm512_setzero_si512();
                transpose(x);
                for (long i = 0; i < 16; i++) _mm512_storeu_si512(q + s * W_PART + i * 64 + 2 * t, x[i]);
            }
    }
    void set_pair(long n, const bf16* k0, const bf16* v0, const bf16* k1, const bf16* v1) {
        static constexpr uint16_t order[64] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                               8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47,
                                               16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
                                               24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
        const __m512i low = _mm512_loadu_si512(order), high = _mm512_loadu_si512(order + 32);
        const long steps = this->steps, dim = this->dim;   // the compiler cannot know that what is stored is not these
        for (long s = 0; s < steps; s++) {
            const long left = dim - s * 32;
            bf16* tile = k + (n / 16 * steps + s) * TILE + n % 16 * 32;
            _mm512_storeu_si512(tile, part(k0 + s * 32, left));
            const __m512i a = part(v0 + s * 32, left);
            __m512i b = _mm512_setzero_si512();
            if (k1) {
                _mm512_storeu_si512(tile + 32, part(k1 + s * 32, left));
                b = part(v1 + s * 32, left);
            }
            bf16* pair = v + s * STEPS * W_PART + n / 2 * 64;
            _mm512_storeu_si512(pair, _mm512_permutex2var_epi16(a, low, b));
            _mm512_storeu_si512(pair + 32, _mm512_permutex2var_epi16(a, high, b));
        }
    }
    void score(long count, long) {
        for (long n = 0; n < count; n += 32) {
            clear_sums();
            multiply_parts<1, 1, true>(k + n / 16 * steps * TILE, steps * TILE, q, steps);
            store_sums(scores + n * ROWS, ROWS);
        }
    }
    void add_values(long count, long rows) {
        const long used = ceil_div(count, STEP_K), tiles = ceil_div(rows, 16);
        for (long n = count; n < used * STEP_K; n++) {   // behind the last key, weights and values are 0
            for (long r = 0; r < ROWS; r++) scores[n * ROWS + r] = 0.0f;
            for (long s = 0; s < steps; s++)
                if (n % 2 == 0) memset((void*)(v + s * STEPS * W_PART + n / 2 * 64), 0, 128);
        }
        for (long t = 0; t < tiles; t++)
            for (long s = 0; s < used; s++) {
                __m512i x[16];
                for (int i = 0; i < 16; i++) {
                    const float* pair = scores + (s * STEP_K + 2 * i) * ROWS + t * 16;
                    x[i] = join_pairs(rounded_part(load(pair)), rounded_part(load(pair + ROWS)));
                }
                transpose(x);
                for (int r = 0; r < 16; r++) _mm512_storeu_si512(weights + (t * STEPS + s) * TILE + r * 32, x[r]);
            }
        for (long c = 0; c < steps; c++) {
            float* to = out + c * 32;
            load_sums(to, wide);
            if (tiles == 2) multiply_parts<1, 1, true>(weights, STEPS * TILE, v + c * STEPS * W_PART, used);
            else multiply_parts<1, 1, false>(weights, 0, v + c * STEPS * W_PART, used);
            store_sums(to, wide);
        }
    }
};
#endif
