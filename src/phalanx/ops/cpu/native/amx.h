// Products on AMX tiles: bf16 directly, and fp32 as sums of bf16 parts at fp32 accuracy.
//
// A float (24 significant bits) is exactly the sum of three bf16 (8 bits each): x = x1 + x2 + x3, each about 2^-8 of the
// one before. Of the nine partial products of x and w, those below 2^-24 of the whole are left out: six remain. Products
// of bf16 are exact in fp32, in which the tiles sum. The error is below that of an fp32 product whose sum runs over
// single products, at more than twice the speed of the vector units. Infinite inputs give NaN.
#pragma once
#include "common.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define HAVE_AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

// A product takes rows x and columns w in steps of 32 of their common dimension. x: [row tile][step][part][16][32];
// w: [step][part][16 pairs][32 columns][2], two tiles side by side.
enum { STEP_K = 32, TILE = 16 * STEP_K, W_PART = 32 * STEP_K };   // elements

// The eight tiles, all 16 rows of 64 bytes: 0..3 sums (2 x 2), 4 and 5 rows of x, 6 and 7 columns of w.
struct TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    TileConfig() { _tile_loadconfig(this); }
    ~TileConfig() { _tile_release(); }
};

// Linux gives a process the tiles on request (ARCH_REQ_XCOMP_PERM of XTILEDATA).
[[maybe_unused]] static bool request_amx() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

INLINE __m512i upper(__m512i v) { return _mm512_and_si512(v, _mm512_set1_epi32(0xffff0000)); }
INLINE __m512 rounded_part(__m512 v) {
    return (__m512)upper(_mm512_add_epi32((__m512i)v, _mm512_set1_epi32(0x8000)));
}
INLINE __m512 cut_part(__m512 v) { return (__m512)upper((__m512i)v); }
INLINE __m512i join_pairs(__m512 even, __m512 odd) {   // both with a zero lower half
    return _mm512_or_si512(_mm512_srli_epi32((__m512i)even, 16), (__m512i)odd);
}

// Three parts of a and b, each part handed to put(index, a's, b's). The first is rounded, so that the others have either
// sign and what is left out has no bias; the rest then fits 16 bits, so that cutting it in two is exact.
template <class Put>
INLINE void split(__m512 a, __m512 b, Put put) {
    __m512 pa = rounded_part(a), pb = rounded_part(b);
    put(0, pa, pb);
    a -= pa, b -= pb;
    pa = cut_part(a), pb = cut_part(b);
    put(1, pa, pb);
    put(2, a - pa, b - pb);
}

// The sums of 32 rows by 32 columns, tiles 0..3, in memory as rows `stride` floats apart.
INLINE void clear_sums() {   // these intrinsics are macros of one statement each
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}
INLINE void load_sums(const float* c, long stride) {
    _tile_loadd(0, c, 4 * stride);
    _tile_loadd(1, c + 16, 4 * stride);
    _tile_loadd(2, c + 16 * stride, 4 * stride);
    _tile_loadd(3, c + 16 * stride + 16, 4 * stride);
}
INLINE void store_sums(float* c, long stride) {
    _tile_stored(0, c, 4 * stride);
    _tile_stored(1, c + 16, 4 * stride);
    _tile_stored(2, c + 16 * stride, 4 * stride);
    _tile_stored(3, c + 16 * stride + 16, 4 * stride);
}

// Adds one step to the sums: the small products first. `between` runs after each tile product, so that vector work
// overlaps with the tiles', which have a unit of their own.
template <int XP, int WP, bool TWO, class Between>
INLINE void multiply_step(const bf16* x, long next_rows, const bf16* w, Between between) {
    auto load_x = [=](int part) {
        _tile_loadd(4, x + part * TILE, 64);
        if (TWO) _tile_loadd(5, x + next_rows + part * TILE, 64);
    };
    auto load_w = [=](int part) {
        _tile_loadd(6, w + part * W_PART, 128);
        _tile_loadd(7, w + part * W_PART + 32, 128);
    };
    auto multiply = [&] {
        _tile_dpbf16ps(0, 4, 6);
        between();
        _tile_dpbf16ps(1, 4, 7);
        between();
        if (TWO) {
            _tile_dpbf16ps(2, 5, 6);
            between();
            _tile_dpbf16ps(3, 5, 7);
            between();
        }
    };
    load_w(0);
    if (XP == 3) load_x(2), multiply(), load_x(1), multiply();
    if (WP == 3) load_w(1), multiply(), load_x(0), multiply(), load_w(2), multiply(), load_w(0);
    else load_x(0);
    multiply();
}

// w holds parts already (a bf16 panel, or a split one); of what comes `ahead` elements further on, one line in four is
// asked for, and the hardware brings its neighbours.
template <int XP, int WP, bool TWO>
static void multiply_parts(const bf16* x, long next_rows, const bf16* w, long steps, long ahead = 0) {
    for (long s = 0; s < steps; s++, x += XP * TILE, w += WP * W_PART) {
        for (long i = 0; ahead && i < W_PART; i += 128) _mm_prefetch((const char*)(w + ahead + i), _MM_HINT_T1);
        multiply_step<XP, WP, TWO>(x, next_rows, w, [] {});
    }
}
#endif
