// The linear kernel on AMX tiles, for fp32 x fp32, fp32 x bf16 and bf16 x bf16. Numbers of parts: of x XP, of w WP.
#pragma once
#include "amx.h"
#include "linear.h"

#include <type_traits>

#ifdef HAVE_AMX
enum {
    ROWS_BYTES = 5 << 18,          // x parts of a block of rows: they stay in the L2 cache while panels pass
    DEPTH = 768,                   // input features that are summed in tiles; longer sums are added up from such runs
    AHEAD = 8192,                  // prefetch distance in bytes
};

// x rows as tiles, zero where there is nothing: [row tile][step][part][16][32].
static void pack_rows(const float* x, long stride, long rows, long in, bf16* to) {
    for (long r = 0; r < 16; r++)
        for (long k = 0; k < in; k += STEP_K) {
            long count = r < rows ? least(in - k, STEP_K) : 0;
            __mmask16 low = count >= 16 ? 0xffff : (1 << count) - 1;
            __mmask16 high = count >= 32 ? 0xffff : count > 16 ? (1 << (count - 16)) - 1 : 0;
            const float* from = x + r * stride + k;
            bf16* tile = to + k / STEP_K * 3 * TILE + r * STEP_K;
            split(_mm512_maskz_loadu_ps(low, from), _mm512_maskz_loadu_ps(high, from + 16),
                  [=](int part, __m512 a, __m512 b) {
                      _mm512_storeu_si512(tile + part * TILE, (__m512i)_mm512_cvtne2ps_pbh(b, a));
                  });
        }
}
static void pack_rows(const bf16* x, long stride, long rows, long in, bf16* to) {
    for (long r = 0; r < 16; r++)
        for (long k = 0; k < in; k += STEP_K) {
            long count = r < rows ? least(in - k, STEP_K) : 0;
            __mmask32 mask = count == 32 ? ~0u : (1u << count) - 1;
            __m512i values = _mm512_maskz_loadu_epi16(mask, x + r * stride + k);
            _mm512_storeu_si512(to + k / STEP_K * TILE + r * STEP_K, values);
        }
}

// Two rows of a packed fp32 panel become one row of the tiles of each part.
INLINE void split_pair(const float* from, bf16* to) {
    for (int h = 0; h < 2; h++)
        split(_mm512_loadu_ps(from + 16 * h), _mm512_loadu_ps(from + PANEL + 16 * h),
              [=](int part, __m512 even, __m512 odd) {
                  _mm512_store_si512(to + part * W_PART + 32 * h, join_pairs(even, odd));
              });
    _mm_prefetch((const char*)from + AHEAD, _MM_HINT_T1);
}
INLINE void split_step(const float* from, bf16* to) {
    for (int i = 0; i < W_PART; i += 2 * PANEL) split_pair(from + i, to + i);
}

INLINE void add_sums(float* c) {
    alignas(64) float more[32 * PANEL];
    store_sums(more, PANEL);
    for (int i = 0; i < 32 * PANEL; i++) c[i] += more[i];
}

// Splits an fp32 panel while it multiplies, a step ahead: step s of `from` goes to parts(s). parts(0) is there; the step
// after the last is split from `after`.
template <bool TWO, class Parts>
static void multiply_splitting(const bf16* x, long next_rows, const float* from, const float* after, long steps,
                               Parts parts) {
    for (long s = 0; s < steps; s++, x += 3 * TILE) {
        const float* next = s + 1 < steps ? from + (s + 1) * W_PART : after;
        bf16* to = parts(s + 1);
        int pair = 0;
        multiply_step<3, 3, TWO>(x, next_rows, parts(s), [&] {
            for (int i = 0; i < (TWO ? 1 : 2); i++)
                if (pair < STEP_K / 2) split_pair(next + pair * 2 * PANEL, to + pair * 2 * PANEL), pair++;
        });
    }
}

template <int XP, int WP, class X, class Wt>
static void linear_amx(const Linear<X, Wt>& call) {
    static thread_local Scratch x_scratch;
    const long steps = call.padded_in() / STEP_K, row_tile = steps * XP * TILE;   // elements of 16 rows
    const long fit = most(32, ROWS_BYTES / (call.padded_in() * XP * 2) / 32 * 32);
    const long block = ceil_div(ceil_div(call.rows, ceil_div(call.rows, fit)), 32) * 32;
    bf16* const x_parts = (bf16*)x_scratch.get(block * call.padded_in() * XP * 2);

#pragma omp parallel num_threads(call.threads) if (call.threads > 1)
    for (long first = 0; first < call.rows; first += block) {
        const long rows = least(block, call.rows - first);
#pragma omp for
        for (long t = 0; t < ceil_div(rows, 16); t++)
            pack_rows(call.x + (first + t * 16) * call.x_stride, call.x_stride, rows - t * 16, call.in,
                      x_parts + t * row_tile);

        // Parts of a panel: if they serve one pair of row tiles only, two steps of them take turns in the L1 cache.
        static thread_local Scratch scratch;
        const bool once = rows <= 32;
        float* const sums = (float*)scratch.get(block * PANEL * 4 + (DEPTH / STEP_K + 1) * 3 * W_PART * 2);
        bf16* const w_parts = (bf16*)(sums + block * PANEL);
        const TileConfig tiles;
        long done = 0, expected = -1;   // steps split so far, and the panel whose first step is split already
#pragma omp for schedule(static)
        for (long p = 0; p < call.panels(); p++) {
            for (long d = 0; d < steps; d += DEPTH / STEP_K) {
                const long count = least(DEPTH / STEP_K, steps - d);
                const Wt* w = call.panel(p) + d * W_PART;
                const bool last = d + count == steps && p + 1 == call.panels();
                auto parts = [=](long s) { return w_parts + (once ? (done + s) % 2 : s) * 3 * W_PART; };
                for (long r = 0; r < rows; r += 32) {
                    const bf16* x = x_parts + r / 16 * row_tile + d * XP * TILE;
                    auto multiply = [&](auto two) {
                        if constexpr (WP == 1)
                            multiply_parts<XP, WP, two>(x, row_tile, w, count, r ? 0 : AHEAD / sizeof(bf16));
                        else if (r)
                            multiply_parts<XP, WP, two>(x, row_tile, w_parts, count);
                        else
                            multiply_splitting<two>(x, row_tile, w, once && !last ? w + count * W_PART : w, count, parts);
                    };
                    if constexpr (WP == 3)
                        if (!r && !(once && expected == p)) split_step(w, parts(0));
                    clear_sums();
                    if (rows - r > 16) multiply(std::true_type());
                    else multiply(std::false_type());
                    if (d == 0) store_sums(sums + r * PANEL, PANEL);
                    else add_sums(sums + r * PANEL);
                    if (d + count == steps) call.finish(sums + r * PANEL, p, first + r, least(32, rows - r));
                }
                done += count, expected = d + count == steps ? p + 1 : p;
            }
        }
    }
}
#endif
