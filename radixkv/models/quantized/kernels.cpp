// Multiply float32 rows by weights of 8 or 4 bits, on x86-64 with AVX-512 or with AVX2, FMA and F16C.
//
//   y[rows, outputs] = x[rows, inputs] * weights[outputs, inputs]^T + bias
//
// Weights have scales in groups of 32 inputs, as the types Q8_0, Q4_0 and Q4_1 of ggml. A weight is expanded to the
// float32 number that its group defines, and every sum is made of these numbers in one fixed order: for each row and
// output, inputs in order within segments of 256, then the segments in order, then the bias. So the bits of a row do not
// depend on the number of rows, on the number of threads, or on the instruction set.
//
// Layout: outputs in panels of 64, panels one after the other. A panel has a record for each group of inputs:
//
//   INT8      scales: 64 float16; then for each of 32 inputs a byte (signed) per output
//   INT4      scales; then for each eighth of 8 inputs a word of 32 bits per output, the first input in the lowest bits;
//             a weight is scale * (number - 8)
//   INT4_MIN  scales; minima: 64 float16; then words as above; a weight is scale * number + minimum
//
// products.h is included once per instruction set. The Python side is kernels.py; step.cpp has the rest of a step.

#include <cmath>
#include <initializer_list>

#include "kernels.h"

namespace {

constexpr long GROUP = 32, PANEL = 64;
constexpr long SEGMENT = 8;     // groups
constexpr long CHUNK = 96;      // rows that one unit of work multiplies by one panel
constexpr long MOST_ROWS = 12;  // of one register block
constexpr long WORTH_THREADS = 1 << 18;  // products of two numbers

constexpr long header_bytes(int format) { return 2 * PANEL * (format == INT4_MIN ? 2 : 1); }

constexpr long record_bytes(int format) {
    if (format == FLOAT) return GROUP * PANEL * 4;
    return header_bytes(format) + GROUP * PANEL / (format == INT8 ? 1 : 2);
}

const uint8_t* record_of(const Weights& weights, long output, long group) {
    return weights.data + (output / PANEL * weights.groups + group) * record_bytes((int)weights.format);
}

// `x` is packed: rows in blocks that are multiplied together, and in a block the rows of each input side by side.
struct Job {
    const Weights* weights;
    const float *bias, *x;
    float* y;
    long rows, stride;  // of y
};

long panels_of(const Weights& weights) { return (weights.outputs + PANEL - 1) / PANEL; }

// The rows of the smallest register block for `count` rows, at most `most`.
long block_rows(long count, long most) {
    for (const long rows : {1, 2, 4, 6, 8})
        if (count <= rows && rows < most) return rows;
    return most;
}

// Pack `count` rows of `inputs` numbers in blocks of `most` rows; the last one may be smaller. Absent rows are zeros.
void pack(const float* x, long count, long inputs, long most, float* packed) {
    for (long from = 0; from < count; from += most) {
        const long here = count - from < most ? count - from : most, rows = block_rows(here, most);
        for (long r = 0; r < rows; r++)
            for (long k = 0; k < inputs; k++) packed[k * rows + r] = r < here ? x[(from + r) * inputs + k] : 0.0f;
        packed += rows * inputs;
    }
}

}  // namespace

#define INSTRUCTIONS 512
#define TARGET AVX512
#include "products.h"
#undef TARGET
#undef INSTRUCTIONS

#define INSTRUCTIONS 2
#define TARGET AVX2
#include "products.h"
#undef TARGET
#undef INSTRUCTIONS

// ---- one product

namespace {

using Unit = void (*)(const Job&, long, long);
const long DIRECT[2] = {avx2::DIRECT, avx512::DIRECT};
const Unit UNITS[2][3] = {
    {avx2::unit<INT8>, avx2::unit<INT4>, avx2::unit<INT4_MIN>},
    {avx512::unit<INT8>, avx512::unit<INT4>, avx512::unit<INT4_MIN>},
};

}  // namespace

extern "C" {

// The best instruction set of this CPU: 2 is AVX-512, 1 is AVX2, and 0 neither.
int radixkv_instructions() {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return !avx2 ? 0 : avx512 ? 2 : 1;
}

// For each of `count` weights with equal inputs, y[rows, its outputs] = x[rows, inputs] * weights^T + bias. Their outputs
// lie side by side in the rows of y; a bias may be null. Returns 0, or 1 if there is no memory.
int radixkv_multiply(const Weights* const* weights, const float* const* biases, int64_t count, const float* x, float* y,
                     int64_t rows, int64_t instructions, int64_t threads, Parallel parallel) {
    thread_local Memory memory;
    const long inputs = weights[0]->groups * GROUP, most = DIRECT[instructions - 1];
    if (rows > 1) {
        float* packed = memory.numbers((rows + most) * inputs);
        if (!packed) return 1;
        pack(x, rows, inputs, most, packed);
        x = packed;
    }
    long stride = 0, panels = 0;
    for (long i = 0; i < count; i++) {
        stride += weights[i]->outputs;
        panels += panels_of(*weights[i]);
    }
    const bool worth = rows * stride * inputs >= WORTH_THREADS;
    spread(panels * ((rows + CHUNK - 1) / CHUNK), worth ? threads : 1, parallel, [=](long unit) {
        long panel = unit % panels, first = 0, i = 0;
        for (; panel >= panels_of(*weights[i]); i++) {
            panel -= panels_of(*weights[i]);
            first += weights[i]->outputs;
        }
        const Job job = {weights[i], biases[i], x, y + first, rows, stride};
        UNITS[instructions - 1][weights[i]->format](job, panel, unit / panels * CHUNK);
    });
    memory.release();
    return 0;
}

// Expand the rows `ids` of the weights into found[count, inputs].
__attribute__((target("f16c"))) void radixkv_expand_rows(const Weights* weights, const int64_t* ids, int64_t count,
                                                         float* found) {
    const int format = (int)weights->format;
    for (long row = 0; row < count; row++)
        for (long group = 0; group < weights->groups; group++) {
            const uint8_t* record = record_of(*weights, ids[row], group);
            const long column = ids[row] % PANEL;
            const float scale = _cvtsh_ss(((const uint16_t*)record)[column]);
            const float minimum = format == INT4_MIN ? _cvtsh_ss(((const uint16_t*)record)[PANEL + column]) : 0.0f;
            const uint8_t* codes = record + header_bytes(format);
            for (long k = 0; k < GROUP; k++, found++) {
                if (format == INT8) {
                    *found = scale * (float)(int8_t)codes[k * PANEL + column];
                    continue;
                }
                const int number = codes[(k / 8 * PANEL + column) * 4 + k % 8 / 2] >> 4 * (k % 2) & 15;
                // In double precision the product is exact, so that there is one rounding, as in a fused operation.
                *found = (float)((double)scale * (format == INT4 ? number - 8 : number) + (double)minimum);
            }
        }
}

// ---- storing weights

namespace {

void put_number(uint8_t* codes, long k, long column, int number) {
    uint8_t& byte = codes[(k / 8 * PANEL + column) * 4 + k % 8 / 2];
    byte = k % 2 ? byte | (uint8_t)(number << 4) : (uint8_t)number;
}

}  // namespace

// Store `count` rows from row `first` on, which are blocks of ggml: Q8_0 for INT8, Q4_0 for INT4, Q4_1 for INT4_MIN.
void radixkv_store_blocks(const Weights* weights, const uint8_t* blocks, int64_t first, int64_t count) {
    const int format = (int)weights->format;
    for (long row = first; row < first + count; row++)
        for (long group = 0; group < weights->groups; group++) {
            uint8_t* record = (uint8_t*)record_of(*weights, row, group);
            uint8_t* codes = record + header_bytes(format);
            const long column = row % PANEL;
            memcpy(record + 2 * column, blocks, 2);
            if (format == INT4_MIN) memcpy(record + 2 * (PANEL + column), blocks + 2, 2);
            blocks += format == INT4_MIN ? 4 : 2;
            for (long k = 0; format == INT8 && k < GROUP; k++) codes[k * PANEL + column] = blocks[k];
            for (long eighth = 0; format != INT8 && eighth < 4; eighth++) {
                uint64_t bits;  // a number in each byte; the second half of a group is in the upper four bits
                memcpy(&bits, blocks + 8 * (eighth % 2), 8);
                bits = bits >> 4 * (eighth / 2) & 0x0f0f0f0f0f0f0f0f;
                bits = (bits | bits >> 4) & 0x00ff00ff00ff00ff;
                bits = (bits | bits >> 8) & 0x0000ffff0000ffff;
                const uint32_t word = (uint32_t)(bits | bits >> 16);
                memcpy(codes + 4 * (eighth * PANEL + column), &word, 4);
            }
            blocks += format == INT8 ? GROUP : GROUP / 2;
        }
}

// Quantise `count` rows of float32 to INT8 or INT4_MIN, and store them from row `first` on. A group with a number that
// is not finite becomes NaN, so that damage shows.
__attribute__((target("f16c"))) void radixkv_quantise(const Weights* weights, const float* rows, int64_t first,
                                                      int64_t count) {
    const bool minimum = weights->format == INT4_MIN;
    for (long row = first; row < first + count; row++)
        for (long group = 0; group < weights->groups; group++, rows += GROUP) {
            float low = rows[0], high = rows[0];
            bool finite = true;
            for (long k = 0; k < GROUP; k++) {
                low = std::fmin(low, rows[k]);
                high = std::fmax(high, rows[k]);
                finite = finite && std::isfinite(rows[k]);
            }
            const float largest = std::fmax(-low, high);
            uint8_t* record = (uint8_t*)record_of(*weights, row, group);
            uint16_t* scales = (uint16_t*)record + row % PANEL;
            uint16_t base = minimum ? _cvtss_sh(low, 0) : 0;
            const float zero = _cvtsh_ss(base);
            const float range = minimum ? high - zero : largest, levels = minimum ? 15.0f : 127.0f;
            uint16_t stored = finite ? _cvtss_sh(range > 0 ? range / levels : 0.0f, 0) : 0x7e00;
            if (finite && _cvtsh_ss(stored) * (levels + 0.5f) < range) stored++;  // few bits: the next larger number
            scales[0] = stored;
            if (minimum) scales[PANEL] = base;
            const float scale = _cvtsh_ss(stored);
            for (long k = 0; k < GROUP; k++) {
                const float level = scale > 0 ? std::nearbyint((rows[k] - zero) / scale) : 0.0f;
                const float number = std::fmax(minimum ? 0.0f : -127.0f, std::fmin(levels, level));
                uint8_t* codes = record + header_bytes((int)weights->format);
                if (minimum)
                    put_number(codes, k, row % PANEL, (int)number);
                else
                    codes[k * PANEL + row % PANEL] = (uint8_t)(int8_t)number;
            }
        }
}

}  // extern "C"
