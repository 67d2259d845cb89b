// Compute the parts of a step between the products: norms, rotations, activations, and attention of single query rows.
//
// Each row is computed by itself and every sum has one order, which depends on neither the instruction set nor the number
// of threads. rows.h is included once per instruction set. The Python side is norms.py, modules.py and
// models/compiled_attention.py.

#include <cmath>

#include "kernels.h"

namespace {

constexpr long PIECE = 512;           // keys whose weights are computed at a time
constexpr long WIDEST = 512;          // numbers of a key or value
constexpr long HEADS = 4;             // query heads that read a key together
constexpr long CHUNK_ROWS = 16;       // query rows of a sequence that read a piece of keys one after the other
constexpr long MLP_ROWS = 384;        // rows whose inner activations exist at a time
constexpr long WORTH_THREADS = 1 << 18;  // products of two numbers, or the time of as many

enum Activation { SILU, GELU_TANH };

// How the pool stores numbers: as they are, in 16 bits, or as codes of 8 bits of rotated heads, with scales in float16.
enum Stored { FLOAT32, FLOAT16, CODES };
constexpr long STORED_BYTES[] = {4, 2, 1};

// The pool of one layer: keys[kv_heads, slots, key_dim] and values[kv_heads, slots, value_dim], and for codes the scales
// [kv_heads, slots] of both.
struct Layer {
    uint8_t *keys, *values;
    uint16_t *key_scales, *value_scales;
    int64_t kv_heads, key_dim, value_dim, slots, stored;
};

// Query row `rows[i]` reads `tokens[i]` keys from position `start[i]` on. Position p lies in slot p % block_size of block
// `blocks[block_offset[i] + p / block_size - start[i] / block_size]`. The items [chunks[c], chunks[c + 1]), up to CHUNK_ROWS
// of them, have the same keys but for their number, which grows.
struct Items {
    const int32_t *blocks, *block_offset, *start, *tokens;
    const int64_t *rows, *chunks;
    int64_t count, block_size;  // of chunks
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
    bool rotates;         // queries and outputs, if the pool has codes
};

// Multiply a head by the Hadamard matrix, in parts of the largest power of two that divides `dim`, 16 to 128.
AVX2 void hadamard(float* x, long dim) {
    const long most = dim & -dim, size = most < 128 ? most : 128;
    const __m256 fours = _mm256_setr_ps(1, 1, 1, 1, -1, -1, -1, -1), twos = _mm256_setr_ps(1, 1, -1, -1, 1, 1, -1, -1);
    const __m256 ones = _mm256_setr_ps(1, -1, 1, -1, 1, -1, 1, -1), factor = _mm256_set1_ps(1.0f / std::sqrt((float)size));
    for (float* part = x; part < x + dim; part += size) {
        for (long half = size / 2; half >= 8; half /= 2)
            for (long k = 0; k < size; k += (k + 8) % half ? 8 : 8 + half) {
                const __m256 a = _mm256_loadu_ps(part + k), b = _mm256_loadu_ps(part + k + half);
                _mm256_storeu_ps(part + k, _mm256_add_ps(a, b));
                _mm256_storeu_ps(part + k + half, _mm256_sub_ps(a, b));
            }
        for (long k = 0; k < size; k += 8) {
            __m256 v = _mm256_loadu_ps(part + k);
            v = _mm256_fmadd_ps(v, fours, _mm256_permute2f128_ps(v, v, 1));
            v = _mm256_fmadd_ps(v, twos, _mm256_permute_ps(v, 0x4E));
            v = _mm256_fmadd_ps(v, ones, _mm256_permute_ps(v, 0xB1));
            _mm256_storeu_ps(part + k, _mm256_mul_ps(v, factor));
        }
    }
}

// The sums of the lanes of eight vectors.
__attribute__((always_inline)) AVX2 inline __m256 sums_of(const __m256* eight) {
    const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(eight[0], eight[1]), _mm256_hadd_ps(eight[2], eight[3]));
    const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(eight[4], eight[5]), _mm256_hadd_ps(eight[6], eight[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

}  // namespace

#define INSTRUCTIONS 512
#define TARGET AVX512
#include "rows.h"
#undef TARGET
#undef INSTRUCTIONS

#define INSTRUCTIONS 2
#define TARGET AVX2
#include "rows.h"
#undef TARGET
#undef INSTRUCTIONS

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

// Round `dim` numbers to 16 bits, infinity to NaN; `dim` is a multiple of 16.
AVX2 void store_halves(const float* x, uint8_t* at, long dim) {
    const __m128i sizes = _mm_set1_epi16(0x7fff), infinity = _mm_set1_epi16(0x7c00);
    for (long k = 0; k < dim; k += 8) {
        const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(x + k), _MM_FROUND_TO_NEAREST_INT);
        const __m128i infinite = _mm_cmpeq_epi16(_mm_and_si128(halves, sizes), infinity);
        _mm_storeu_si128((__m128i*)(at + 2 * k), _mm_or_si128(halves, infinite));
    }
}

// Rotate a head, and round it to steps of a scale, which is rounded up so that no code exceeds 127. With a NaN or an
// infinity, the scale is one, too. `dim` is a multiple of 16, at most WIDEST.
AVX2 void store_codes(const float* x, uint8_t* at, uint16_t* scale, long dim) {
    alignas(32) float rotated[WIDEST];
    memcpy(rotated, x, 4 * dim);
    hadamard(rotated, dim);
    uint32_t bits[WIDEST], most = 0;  // without their signs, numbers are ordered as their bits are, and NaN is the last
    memcpy(bits, rotated, 4 * dim);
    for (long k = 0; k < dim; k++) {
        const uint32_t here = bits[k] & 0x7fffffffu;
        most = here > most ? here : most;
    }
    float largest;
    memcpy(&largest, &most, 4);
    *scale = (uint16_t)_cvtss_sh(largest / 127.0f, _MM_FROUND_TO_POS_INF);
    const float step = _cvtsh_ss(*scale);
    if (!(step > 0.0f && step < INFINITY)) {
        memset(at, 0, dim);
        return;
    }
    const __m256 steps = _mm256_set1_ps(step);
    for (long k = 0; k < dim; k += 16) {
        const __m256i low = _mm256_cvtps_epi32(_mm256_div_ps(_mm256_load_ps(rotated + k), steps));
        const __m256i high = _mm256_cvtps_epi32(_mm256_div_ps(_mm256_load_ps(rotated + k + 8), steps));
        const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xD8);
        const __m128i codes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        _mm_storeu_si128((__m128i*)(at + k), codes);
    }
}

// Store one head of `dim` numbers in a slot of a part of the pool.
AVX2 void store_head(int64_t stored, const float* x, uint8_t* part, uint16_t* scales, long slot, long dim) {
    uint8_t* at = part + slot * dim * STORED_BYTES[stored];
    if (stored == CODES)
        store_codes(x, at, scales + slot, dim);
    else if (stored == FLOAT16)
        store_halves(x, at, dim);
    else
        memcpy(at, x, 4 * dim);
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
            store_head(layer->stored, keys + row * key_row + head * key_head, layer->keys, layer->key_scales, slot,
                       layer->key_dim);
            store_head(layer->stored, values + row * value_row + head * value_head, layer->values, layer->value_scales,
                       slot, layer->value_dim);
        }
}

// Attention of query rows, each over its own keys. `softcap` is 0 for none, and `lse` may be null. For a pool of
// codes, queries are rotated already and outputs stay so, unless `rotates`.
void radixkv_attend(const Layer* layer, const Items* items, const float* query, int64_t query_row, int64_t query_head,
                    int64_t group, float scale, float softcap, float* output, float* lse, int64_t rotates,
                    int64_t instructions, int64_t threads, Parallel parallel) {
    const Attention job = {layer,   items,  {query, query_row, query_head}, group, scale, softcap, output, lse,
                           rotates && layer->stored == CODES};
    const auto attend = instructions == 2 ? avx512::attend : avx2::attend;
    long tokens = 0;
    for (long i = 0; i < items->chunks[items->count]; i++) tokens += items->tokens[i];
    const bool worth = tokens * layer->kv_heads * group * (layer->key_dim + layer->value_dim) >= WORTH_THREADS;
    spread(items->count * layer->kv_heads, worth ? threads : 1, parallel,
           [&](long unit) { attend(job, unit / layer->kv_heads, unit % layer->kv_heads); });
}

}  // extern "C"
