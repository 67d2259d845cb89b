// Products of packed rows and one panel of weights, by one instruction set: kernels.cpp includes this file for each.

namespace {

#include "instructions.h"

// The sums of R packed rows and C vectors of outputs, from `column` of a panel on, over `groups` records.
template <int FORMAT, int R, int C>
__attribute__((noinline)) TARGET void block(const uint8_t* record, long groups, long column, const float* x, float* sums, bool first) {
    Floats sum[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) sum[r][c] = zeros();
    for (long group = 0; group < groups; group++, record += record_bytes(FORMAT)) {
        Floats scale[C], minimum[C];
        for (int c = 0; c < C; c++) {
            const uint8_t* at = record + 2 * (column + c * LANES);
            scale[c] = FORMAT == FLOAT ? zeros() : halves(at);
            minimum[c] = FORMAT == INT4_MIN ? halves(at + 2 * PANEL) : zeros();
        }
        const uint8_t* codes = record + header_bytes(FORMAT);
        if (FORMAT == FLOAT || FORMAT == INT8) {
#pragma GCC unroll 2
            for (long k = 0; k < GROUP; k++) {
                Floats weight[C];
                for (int c = 0; c < C; c++) {
                    const long at = k * PANEL + column + c * LANES;
                    weight[c] = FORMAT == FLOAT ? load((const float*)record + at) : times(bytes(codes + at), scale[c]);
                }
                for (int r = 0; r < R; r++) {
                    const Floats number = all(x[k * R + r]);
                    for (int c = 0; c < C; c++) sum[r][c] = fused(weight[c], number, sum[r][c]);
                }
            }
        } else {
            for (long eighth = 0; eighth < GROUP; eighth += 8) {
                Words word[C];
                for (int c = 0; c < C; c++) word[c] = words(codes + (eighth / 8 * PANEL + column + c * LANES) * 4);
#pragma GCC unroll 8
                for (long k = 0; k < 8; k++) {
                    Floats weight[C];
                    for (int c = 0; c < C; c++) {
                        const Floats number = numbers<FORMAT>(word[c]);
                        weight[c] = FORMAT == INT4 ? times(number, scale[c]) : fused(number, scale[c], minimum[c]);
                        word[c] = next(word[c]);
                    }
                    for (int r = 0; r < R; r++) {
                        const Floats number = all(x[(eighth + k) * R + r]);
                        for (int c = 0; c < C; c++) sum[r][c] = fused(weight[c], number, sum[r][c]);
                    }
                }
            }
        }
        x += GROUP * R;
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) {
            float* at = sums + r * PANEL + column + c * LANES;
            store(at, first ? sum[r][c] : add(load(at), sum[r][c]));
        }
}

template <int FORMAT, int R, int C>
TARGET void columns(const uint8_t* record, long groups, const float* x, float* sums, bool first) {
    for (long column = 0; column < PANEL; column += C * LANES)
        block<FORMAT, R, C>(record, groups, column, x, sums, first);
}

// The sums of a block of rows and all outputs of a panel.
template <int FORMAT>
TARGET void few_rows(const uint8_t* record, long groups, const float* x, long rows, float* sums, bool first) {
    if (rows == 1) return columns<FORMAT, 1, 4>(record, groups, x, sums, first);
    if (rows == 2) return columns<FORMAT, 2, 4>(record, groups, x, sums, first);
#if INSTRUCTIONS == 512
    if (rows == 4) return columns<FORMAT, 4, 4>(record, groups, x, sums, first);
    if (rows == 6) return columns<FORMAT, 6, 4>(record, groups, x, sums, first);
    if (rows == 8) return columns<FORMAT, 8, 2>(record, groups, x, sums, first);
    columns<FORMAT, 12, 2>(record, groups, x, sums, first);
#else
    if (rows == 4) return columns<FORMAT, 4, 2>(record, groups, x, sums, first);
    columns<FORMAT, 6, 2>(record, groups, x, sums, first);
#endif
}

// Expand a panel's weights of `groups` records.
template <int FORMAT>
TARGET void expand(const uint8_t* record, long groups, float* found) {
    for (long group = 0; group < groups; group++, record += record_bytes(FORMAT), found += GROUP * PANEL)
        for (long column = 0; column < PANEL; column += LANES) {
            const Floats scale = halves(record + 2 * column);
            const Floats minimum = FORMAT == INT4_MIN ? halves(record + 2 * (PANEL + column)) : zeros();
            const uint8_t* codes = record + header_bytes(FORMAT);
            for (long k = 0; k < GROUP; k += 8) {
                Words word = FORMAT == INT8 ? Words() : words(codes + (k / 8 * PANEL + column) * 4);
                for (long j = k; j < k + 8; j++) {
                    float* at = found + j * PANEL + column;
                    if (FORMAT == INT8)
                        store(at, times(bytes(codes + j * PANEL + column), scale));
                    else if (FORMAT == INT4)
                        store(at, times(numbers<FORMAT>(word), scale));
                    else
                        store(at, fused(numbers<FORMAT>(word), scale, minimum));
                    word = next(word);
                }
            }
        }
}

// A unit of work: the outputs of one panel, for up to CHUNK rows from `from` on.
template <int FORMAT>
TARGET void unit(const Job& job, long panel, long from) {
    alignas(64) float sums[(CHUNK + MOST_ROWS) * PANEL];
    alignas(64) float expanded[SEGMENT * GROUP * PANEL];
    const Weights& weights = *job.weights;
    const long rows = job.rows - from < CHUNK ? job.rows - from : CHUNK, inputs = weights.groups * GROUP;
    for (long group = 0; group < weights.groups; group += SEGMENT) {
        const long groups = weights.groups - group < SEGMENT ? weights.groups - group : SEGMENT;
        const uint8_t* record = record_of(weights, panel * PANEL, group);
        if (rows > DIRECT) expand<FORMAT>(record, groups, expanded);
        for (long row = 0; row < rows; row += DIRECT) {
            const long here = block_rows(rows - row, DIRECT);
            const float* x = job.x + (from + row) * inputs + group * GROUP * here;
            if (rows > DIRECT)
                few_rows<FLOAT>((const uint8_t*)expanded, groups, x, here, sums + row * PANEL, group == 0);
            else
                few_rows<FORMAT>(record, groups, x, here, sums, group == 0);
        }
    }
    const long first = panel * PANEL, count = weights.outputs - first < PANEL ? weights.outputs - first : PANEL;
    for (long row = 0; row < rows; row++) {
        float* y = job.y + (from + row) * job.stride + first;
        memcpy(y, sums + row * PANEL, count * sizeof(float));
        if (job.bias)
            for (long c = 0; c < count; c++) y[c] += job.bias[first + c];
    }
}

}  // namespace avx512 or avx2

}  // namespace
