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

enum { TILE = 512, STEP_K = 32 };   // elements of a bf16 tile: 16 rows of 32

// The eight tiles, all 16 rows of 64 bytes: 0..3 sums (2 x 2), 4 and 5 rows of x, 6 and 7 columns of w.
struct TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    TileConfig() { _tile_loadconfig(this); }
    ~TileConfig() { _tile_release(); }
};

// Linux gives a process the tiles on request (ARCH_REQ_XCOMP_PERM of XTILEDATA).
static bool request_amx() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

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
#endif
