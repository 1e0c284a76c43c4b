// What the linear kernels share: the call, the panels, and how sums become outputs.
#pragma once
#include "common.h"

enum { PANEL = 32, PAD_IN = 32 };   // output features of a panel; input features are padded to a multiple

template <class X, class Wt>
struct Linear {
    const X* x;
    long x_stride, rows, in, out;
    const Wt* weight;
    const X* bias;   // or null
    X* y;
    int threads;

    long padded_in() const { return ceil_div(in, PAD_IN) * PAD_IN; }
    long panels() const { return ceil_div(out, PANEL); }
    const Wt* panel(long p) const { return weight + p * padded_in() * PANEL; }

    // sums [count][32], fp32, are rows first.. of columns of panel p: add the bias, convert, write.
    void finish(const float* sums, long p, long first, long count) const {
        const long columns = least(PANEL, out - p * PANEL);
        float shift[PANEL] = {};
        for (long j = 0; bias && j < columns; j++) shift[j] = to_float(bias[p * PANEL + j]);
        X* to = y + first * out + p * PANEL;
        for (long r = 0; r < count; r++, to += out, sums += PANEL) {
            X row[PANEL];
            X* const whole = columns == PANEL ? to : row;
            for (long j = 0; j < PANEL; j += W) store(whole + j, load(sums + j) + load(shift + j));
            if (whole == row) memcpy((void*)to, row, columns * sizeof(X));
        }
    }
};
