// Compute the parts of a step between the products: norms, rotations, activations, and attention of single query rows.
//
// Each row is computed by itself and every sum has one order, which depends on neither the instruction set nor the number
// of threads. This file includes itself once per instruction set. The Python side is norms.py, modules.py and
// models/compiled_attention.py.

#ifndef INSTRUCTIONS

#include <cmath>

#include "kernels.h"

namespace {

constexpr long PIECE = 512;           // keys whose weights are computed at a time
constexpr long WIDEST = 512;          // numbers of a key or value
constexpr long HEADS = 4;             // query heads that read a key together
constexpr long MLP_ROWS = 384;        // rows whose inner activations exist at a time
constexpr long WORTH_THREADS = 1 << 18;  // products of two numbers, or the time of as many

enum Activation { SILU, GELU_TANH };

// The pool of one layer: keys[kv_heads, slots, key_dim] and values[kv_heads, slots, value_dim].
struct Layer {
    float *keys, *values;
    int64_t kv_heads, key_dim, value_dim, slots;
};

// Query row `rows[i]` reads `tokens[i]` keys from position `start[i]` on. Position p lies in slot p % block_size of block
// `blocks[block_offset[i] + p / block_size - start[i] / block_size]`.
struct Items {
    const int32_t *blocks, *block_offset, *start, *tokens;
    const int64_t* rows;
    int64_t count, block_size;
};

// Rows of `heads` vectors; a stride is a number of float32.
struct Strided {
    const float* at;
    int64_t row, head;
};

struct Attention {
    const Layer* layer;
    const Items* items;
    Strided query;
    long group;  // query heads of a kv head
    float scale, softcap;
    float *output, *lse;  // [items, kv_heads, group, value_dim], and without the last or null
};

// The sums of the lanes of eight vectors.
__attribute__((always_inline)) AVX2 inline __m256 sums_of(const __m256* eight) {
    const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(eight[0], eight[1]), _mm256_hadd_ps(eight[2], eight[3]));
    const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(eight[4], eight[5]), _mm256_hadd_ps(eight[6], eight[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

}  // namespace

#define INSTRUCTIONS 512
#define TARGET AVX512
#include "step.cpp"
#undef TARGET
#undef INSTRUCTIONS

#define INSTRUCTIONS 2
#define TARGET AVX2
#include "step.cpp"

namespace {

// Normalise the rows x[rows, width] to y. Sums have one order.
AVX2 void rms_norm(const float* x, const float* weight, float* y, long rows, long width, float epsilon) {
    for (long row = 0; row < rows; row++, x += width, y += width) {
        constexpr long PARTS = 32;
        float parts[PARTS] = {}, sum = 0.0f;
        long k = 0;
        for (; k + PARTS <= width; k += PARTS)
            for (long p = 0; p < PARTS; p++) parts[p] += x[k + p] * x[k + p];
        for (; k < width; k++) parts[k % PARTS] += x[k] * x[k];
        for (long p = 0; p < PARTS; p++) sum += parts[p];
        const float factor = 1.0f / std::sqrt(sum / (float)width + epsilon);
        for (k = 0; k < width; k++) y[k] = weight[k] * (x[k] * factor);
    }
}

// Rotate the first `width` of the numbers at `x`: number k and number k + width / 2 are a pair.
AVX2 void rotate(float* x, const float* cosines, const float* sines, long width) {
    const long half = width / 2;
    for (long k = 0; k < half; k++) {
        const float a = x[k], b = x[k + half];
        x[k] = a * cosines[k] + -b * sines[k];
        x[k + half] = b * cosines[k + half] + a * sines[k + half];
    }
}

}  // namespace

extern "C" {

// y[rows, width] = weight * (x / sqrt(mean of the squares of a row + epsilon)).
void radixkv_rms_norm(const float* x, const float* weight, float* y, int64_t rows, int64_t width, float epsilon) {
    rms_norm(x, weight, y, rows, width, epsilon);
}

// y[rows, outputs] = down(activation(gate(x)) * up(x)); `weights` and `biases` are those of gate, up and down. Returns 0,
// or 1 if there is no memory.
int radixkv_mlp(const Weights* const* weights, const float* const* biases, const float* x, float* y, int64_t rows,
                int64_t activation, int64_t instructions, int64_t threads, Parallel parallel) {
    thread_local Memory memory;
    const long inner = weights[0]->outputs, inputs = weights[0]->groups * 32, outputs = weights[2]->outputs;
    float* both = memory.numbers((rows < MLP_ROWS ? rows : MLP_ROWS) * inner * 3);
    if (!both && rows > 0) return 1;
    const auto activate = instructions == 2 ? avx512::activate : avx2::activate;
    int failed = 0;
    for (long from = 0; from < rows && !failed; from += MLP_ROWS) {
        const long here = rows - from < MLP_ROWS ? rows - from : MLP_ROWS;
        float* active = both + here * inner * 2;
        failed = radixkv_multiply(weights, biases, 2, x + from * inputs, both, here, instructions, threads, parallel);
        const bool worth = here * inner * 32 >= WORTH_THREADS;
        spread(here, worth ? threads : 1, parallel, [=](long row) {
            activate(both + row * inner * 2, active + row * inner, inner, (Activation)activation);
        });
        if (!failed)
            failed = radixkv_multiply(weights + 2, biases + 2, 1, active, y + from * outputs, here, instructions, threads,
                                      parallel);
    }
    memory.release();
    return failed;
}

// Normalise and rotate `heads` vectors of `dim` numbers in each of `rows` rows, in place: a row's numbers begin at
// x + row * stride. `factors` (of the norm) may be null, and so may `cosines` and `sines` [rows, rotated].
void radixkv_rotate(float* x, int64_t rows, int64_t stride, int64_t heads, int64_t dim, const float* factors,
                    float epsilon, const float* cosines, const float* sines, int64_t rotated, int64_t threads,
                    Parallel parallel) {
    const bool worth = rows * heads * dim * 16 >= WORTH_THREADS;
    spread(rows, worth ? threads : 1, parallel, [=](long row) {
        float* at = x + row * stride;
        if (factors) rms_norm(at, factors, at, heads, dim, epsilon);
        if (cosines)
            for (long head = 0; head < heads; head++)
                rotate(at + head * dim, cosines + row * rotated, sines + row * rotated, rotated);
    });
}

// Store keys and values of `rows` tokens in `slots`.
void radixkv_store(const Layer* layer, const int64_t* slots, int64_t rows, const float* keys, int64_t key_row,
                   int64_t key_head, const float* values, int64_t value_row, int64_t value_head) {
    for (long head = 0; head < layer->kv_heads; head++)
        for (long row = 0; row < rows; row++) {
            const long slot = head * layer->slots + slots[row];
            memcpy(layer->keys + slot * layer->key_dim, keys + row * key_row + head * key_head, 4 * layer->key_dim);
            memcpy(layer->values + slot * layer->value_dim, values + row * value_row + head * value_head,
                   4 * layer->value_dim);
        }
}

// Attention of single query rows, each over its own keys. `softcap` is 0 for none, and `lse` may be null.
void radixkv_attend(const Layer* layer, const Items* items, const float* query, int64_t query_row, int64_t query_head,
                    int64_t group, float scale, float softcap, float* output, float* lse, int64_t instructions,
                    int64_t threads, Parallel parallel) {
    const Attention job = {layer, items, {query, query_row, query_head}, group, scale, softcap, output, lse};
    const auto attend = instructions == 2 ? avx512::attend : avx2::attend;
    long tokens = 0;
    for (long i = 0; i < items->count; i++) tokens += items->tokens[i];
    const bool worth = tokens * layer->kv_heads * group * (layer->key_dim + layer->value_dim) >= WORTH_THREADS;
    spread(items->count * layer->kv_heads, worth ? threads : 1, parallel,
           [&](long unit) { attend(job, unit / layer->kv_heads, unit % layer->kv_heads); });
}

}  // extern "C"

#else  // ---- by one instruction set

namespace {

#include "instructions.h"

constexpr int PARTS = 16 / LANES;  // vectors of 16 lanes

// e to the power of x, with a relative error of 1e-7. Numbers beyond the exponents of float32 are cut to them.
INLINE Floats exponential(Floats x) {
    x = lower(all(88.0f), higher(all(-87.0f), x));
    const Floats n = nearest(times(x, all(1.44269504f)));
    const Floats r = fused(n, all(2.12194440e-4f), fused(n, all(-0.693359375f), x));
    Floats p = fused(all(1.9875691500e-4f), r, all(1.3981999507e-3f));
    p = fused(p, r, all(8.3334519073e-3f));
    p = fused(p, r, all(4.1665795894e-2f));
    p = fused(p, r, all(1.6666665459e-1f));
    p = fused(p, r, all(5.0000001201e-1f));
    p = fused(times(p, r), r, add(r, all(1.0f)));
    return times(p, power_of_two(n));
}

INLINE Floats sigmoid(Floats x) { return divided(all(1.0f), add(all(1.0f), exponential(times(x, all(-1.0f))))); }

// y = activation(gate) * up, for one row that has `width` numbers of gate and then as many of up.
TARGET void activate(const float* row, float* y, long width, Activation activation) {
    alignas(64) float last[3][LANES] = {};
    for (long k = 0; k < width; k += LANES) {
        const bool whole = k + LANES <= width;
        if (!whole) {
            memcpy(last[0], row + k, 4 * (width - k));
            memcpy(last[1], row + width + k, 4 * (width - k));
        }
        const Floats gate = load(whole ? row + k : last[0]), up = load(whole ? row + width + k : last[1]);
        Floats at = gate;
        if (activation == GELU_TANH) {
            const Floats cubed = times(times(gate, gate), gate);
            at = times(all(1.59576912f), fused(cubed, all(0.044715f), gate));
        }
        store(whole ? y + k : last[2], times(times(gate, sigmoid(at)), up));
        if (!whole) memcpy(y + k, last[2], 4 * (width - k));
    }
}

// The products of G query rows q[G, key_dim] and the keys in `count` slots, in scores[G, PIECE]; up to 7 more are written.
// The values in these slots are fetched meanwhile: they are the next to be read.
template <int G>
TARGET void score(const float* q, const Layer& layer, const float* keys, const float* values, const int32_t* slots,
                  long count, float* scores) {
    const long dim = layer.key_dim, value_dim = layer.value_dim;
    for (long t = 0; t < count; t += 8) {
        __m256 sums[G][8];
        for (long j = 0; j < 8; j++) {
            const float* key = keys + (long)slots[t + j < count ? t + j : count - 1] * dim;
            if (t + j < count)
                for (long k = 0; k < value_dim; k += 16)
                    _mm_prefetch((const char*)(values + (long)slots[t + j] * value_dim + k), _MM_HINT_T1);
            Floats sum[G][PARTS];
            for (int g = 0; g < G; g++)
                for (int p = 0; p < PARTS; p++) sum[g][p] = zeros();
            for (long k = 0; k < dim; k += 16)
                for (int p = 0; p < PARTS; p++) {
                    const Floats numbers = load(key + k + p * LANES);
                    for (int g = 0; g < G; g++)
                        sum[g][p] = fused(numbers, load(q + g * dim + k + p * LANES), sum[g][p]);
                }
            for (int g = 0; g < G; g++) sums[g][j] = eighths(sum[g]);
        }
        for (int g = 0; g < G; g++) _mm256_storeu_ps(scores + g * PIECE + t, sums_of(sums[g]));
    }
}

// Turn scores[count] into weights, and numbers up to a multiple of 16 into zeros; return the highest score, and the sum of the weights.
TARGET float weigh(float* scores, long count, float softcap, float* total) {
    if (softcap > 0.0f)
        for (long t = 0; t < count; t++) scores[t] = softcap * std::tanh(scores[t] / softcap);
    const long end = (count + 15) / 16 * 16;
    for (long t = count; t < end; t++) scores[t] = -INFINITY;
    Floats most = all(-INFINITY), sum[PARTS];
    for (long t = 0; t < end; t += LANES) most = higher(load(scores + t), most);  // without NaN, which the sum gets
    alignas(64) float lanes[LANES];
    store(lanes, most);
    float highest = lanes[0];
    for (int i = 1; i < LANES; i++) highest = lanes[i] > highest ? lanes[i] : highest;
    for (long t = 0; t < end; t += LANES) store(scores + t, exponential(add(load(scores + t), all(-highest))));
    for (long t = count; t < end; t++) scores[t] = 0.0f;
    for (int p = 0; p < PARTS; p++) {
        sum[p] = zeros();
        for (long t = p * LANES; t < end; t += 16) sum[p] = add(sum[p], load(scores + t));
    }
    __m256 eight[8] = {eighths(sum)};
    for (int i = 1; i < 8; i++) eight[i] = _mm256_setzero_ps();
    *total = _mm256_cvtss_f32(sums_of(eight));
    return highest;
}

// The sums of the values in `count` slots by weights[G, PIECE], in columns [column, column + C * LANES) of found[G, WIDEST].
template <int G, int C>
TARGET void sum_values(const float* weights, const float* values, const int32_t* slots, long count, long dim, long column,
                       float* found) {
    Floats sum[G][C];
    for (int g = 0; g < G; g++)
        for (int c = 0; c < C; c++) sum[g][c] = zeros();
    for (long t = 0; t < count; t++) {
        const float* at = values + (long)slots[t] * dim + column;
        for (int c = 0; c < C; c++) {
            const Floats numbers = load(at + c * LANES);
            for (int g = 0; g < G; g++) sum[g][c] = fused(all(weights[g * PIECE + t]), numbers, sum[g][c]);
        }
    }
    for (int g = 0; g < G; g++)
        for (int c = 0; c < C; c++) store(found + g * WIDEST + column + c * LANES, sum[g][c]);
}

// Attention of G query heads from `head` on of one item.
template <int G>
TARGET void attend_heads(const Attention& job, long item, long kv_head, long head) {
    alignas(64) float q[G * WIDEST], scores[G * PIECE + 16], piece[G * WIDEST], sum[G * WIDEST];
    int32_t slots[PIECE];
    const Layer& layer = *job.layer;
    const Items& items = *job.items;
    const long key_dim = layer.key_dim, dim = layer.value_dim, size = items.block_size;
    const float *keys = layer.keys + kv_head * layer.slots * key_dim, *values = layer.values + kv_head * layer.slots * dim;
    const float* from = job.query.at + items.rows[item] * job.query.row + (kv_head * job.group + head) * job.query.head;
    for (int g = 0; g < G; g++)
        for (long k = 0; k < key_dim; k++) q[g * key_dim + k] = from[g * job.query.head + k] * job.scale;
    const int32_t* blocks = items.blocks + items.block_offset[item];
    const long skip = items.start[item] % size, end = skip + items.tokens[item];
    float highest[G] = {}, total[G] = {};
    for (long first = skip; first < end; first += PIECE) {
        const long count = end - first < PIECE ? end - first : PIECE;
        for (long t = 0, block = first / size, slot = first % size; t < count; t++) {
            slots[t] = (int32_t)(blocks[block] * size + slot);
            if (++slot == size) slot = 0, block++;
        }
        score<G>(q, layer, keys, values, slots, count, scores);
        float here[G], weight[G];
        for (int g = 0; g < G; g++) here[g] = weigh(scores + g * PIECE, count, job.softcap, weight + g);
        long column = 0;
        for (; column + 4 * 16 <= dim && LANES == 16; column += 4 * 16)
            sum_values<G, 4>(scores, values, slots, count, dim, column, piece);
        for (; column < dim; column += 16) sum_values<G, PARTS>(scores, values, slots, count, dim, column, piece);
        for (int g = 0; g < G; g++) {
            const bool only = first == skip;
            const float top = only || here[g] > highest[g] ? here[g] : highest[g];
            const float old = only ? 0.0f : std::exp(highest[g] - top), added = std::exp(here[g] - top);
            for (long k = 0; k < dim; k++) {
                const float before = only ? 0.0f : sum[g * WIDEST + k] * old;
                sum[g * WIDEST + k] = before + piece[g * WIDEST + k] * added;
            }
            total[g] = total[g] * old + weight[g] * added;
            highest[g] = top;
        }
    }
    for (int g = 0; g < G; g++) {
        const long place = (item * layer.kv_heads + kv_head) * job.group + head + g;
        for (long k = 0; k < dim; k++) job.output[place * dim + k] = sum[g * WIDEST + k] / total[g];
        if (job.lse) job.lse[place] = highest[g] + std::log(total[g]);
    }
}

// Attention of one item's query heads that share a kv head.
TARGET void attend(const Attention& job, long item, long kv_head) {
    for (long head = 0; head < job.group; head += HEADS) switch (job.group - head) {
            case 1: attend_heads<1>(job, item, kv_head, head); break;
            case 2: attend_heads<2>(job, item, kv_head, head); break;
            case 3: attend_heads<3>(job, item, kv_head, head); break;
            default: attend_heads<4>(job, item, kv_head, head);
        }
}

}  // namespace avx512 or avx2

}  // namespace

#endif
