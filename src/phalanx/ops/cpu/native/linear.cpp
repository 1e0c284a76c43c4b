// y [rows, out] = x [rows, in] times a packed weight, + bias.
//
// A weight [out, in] is packed in panels of 32 output features; inside a panel, input features run slowest:
//   fp32:  [out/32][in'][32]          bf16:  [out/32][in'/2][32][2]   (pairs of input features, as AMX wants them)
// with in' = in rounded up to 32 and zeros where there is nothing. So a panel is read from memory once and in order.
//
// Every output element sums over `in` in an order that depends on neither `rows` nor the thread count: a row's result
// is the same, bit by bit, in whatever batch it stands.
#include "linear_amx.h"

enum { LANES = PANEL / W };   // vectors of a row of a panel

// The kernel for machines without AMX: N rows of x times one panel -> sums [N][32]. Long sums are added up from runs of
// 128: the rounding error of a run grows with its length.
struct PanelRows {   // input features k and k + 1 of a panel as vectors
    vec at[2][LANES];
    PanelRows(const float* w, long k) {
        for (int j = 0; j < LANES; j++) at[0][j] = load(w + k * PANEL + j * W), at[1][j] = load(w + (k + 1) * PANEL + j * W);
    }
    PanelRows(const bf16* w, long k) {
        for (int j = 0; j < LANES; j++) {
            const ivec pairs = ((const ivec*)(w + k * PANEL))[j];
            at[0][j] = (vec)(pairs << 16);
            at[1][j] = (vec)(pairs & (int32_t)0xffff0000);
        }
    }
};
template <int N, class Wt>
static void multiply_panel(const float* x, long stride, long in, const Wt* w, float* c) {
    vec total[N][LANES] = {};
    for (long k = 0; k < in;) {
        vec sums[N][LANES] = {};
        for (const long end = least(in, k + 128); k < end; k += 2) {
            const PanelRows rows(w, k);
            for (int r = 0; r < N; r++)
                for (int j = 0; j < LANES; j++) sums[r][j] += x[r * stride + k] * rows.at[0][j];
            if (k + 1 < end)
                for (int r = 0; r < N; r++)
                    for (int j = 0; j < LANES; j++) sums[r][j] += x[r * stride + k + 1] * rows.at[1][j];
        }
        for (int r = 0; r < N; r++)
            for (int j = 0; j < LANES; j++) total[r][j] += sums[r][j];
    }
    memcpy(c, total, sizeof total);
}

static const float* as_floats(const float* x, long*, long, long, Scratch&) { return x; }
static const float* as_floats(const bf16* x, long* stride, long rows, long in, Scratch& scratch) {
    float* copy = (float*)scratch.get(rows * in * sizeof(float));
    for (long r = 0; r < rows; r++)
        for (long k = 0; k < in; k++) copy[r * in + k] = to_float(x[r * *stride + k]);
    *stride = in;
    return copy;
}

template <class X, class Wt>
static void linear_vector(const Linear<X, Wt>& call) {
    static thread_local Scratch scratch;
    constexpr int MANY = W == 16 ? 12 : 3, FEW = W == 16 ? 4 : 1;   // rows whose sums fill the registers
    long stride = call.x_stride;
    const float* x = as_floats(call.x, &stride, call.rows, call.in, scratch);
#pragma omp parallel for num_threads(call.threads) if (call.threads > 1)
    for (long p = 0; p < call.panels(); p++) {
        alignas(64) float sums[MANY * PANEL];
        for (long r = 0, n; r < call.rows; r += n) {
            const long left = call.rows - r;
            n = left >= MANY ? MANY : left >= FEW ? FEW : 1;
            const float* rows = x + r * stride;
            if (n == MANY) multiply_panel<MANY>(rows, stride, call.in, call.panel(p), sums);
            else if (n == FEW) multiply_panel<FEW>(rows, stride, call.in, call.panel(p), sums);
            else multiply_panel<1>(rows, stride, call.in, call.panel(p), sums);
            call.finish(sums, p, r, n);
        }
    }
}

template <int XP, int WP, class X, class Wt>
static void run(const Linear<X, Wt>& call, [[maybe_unused]] int amx) {
#ifdef HAVE_AMX
    if (amx) return linear_amx<XP, WP>(call);
#endif
    linear_vector(call);
}

// Whether this process may use AMX; to be asked once before calls with amx = 1.
EXPORT int phalanx_request_amx() {
#ifdef HAVE_AMX
    return request_amx();
#else
    return 0;
#endif
}

// x, bias and y are bf16 if x_bf16, else fp32; the weight is bf16 if w_bf16 (then x may be either). x has rows of stride
// x_stride, y is contiguous.
EXPORT void phalanx_linear(const void* x, long x_stride, long rows, long in, long out, const void* weight,
                           const void* bias, void* y, int x_bf16, int w_bf16, int amx, int threads) {
    if (x_bf16)
        run<1, 1>(Linear<bf16, bf16>{(const bf16*)x, x_stride, rows, in, out, (const bf16*)weight, (const bf16*)bias,
                                     (bf16*)y, threads}, amx);
    else if (w_bf16)
        run<3, 1>(Linear<float, bf16>{(const float*)x, x_stride, rows, in, out, (const bf16*)weight, (const float*)bias,
                                      (float*)y, threads}, amx);
    else
        run<3, 3>(Linear<float, float>{(const float*)x, x_stride, rows, in, out, (const float*)weight,
                                       (const float*)bias, (float*)y, threads}, amx);
}

// from [panels * 32, columns] in 4-byte elements (floats, or pairs of bf16) -> to [panels][columns][32].
EXPORT void phalanx_pack(const uint32_t* from, long stride, long rows, long columns, uint32_t* to, long padded,
                         int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long p = 0; p < ceil_div(rows, PANEL); p++)
        for (long k = 0; k < padded; k++)
            for (long j = 0; j < PANEL; j++) {
                const bool inside = k < columns && p * PANEL + j < rows;
                to[(p * padded + k) * PANEL + j] = inside ? from[(p * PANEL + j) * stride + k] : 0;
            }
}
