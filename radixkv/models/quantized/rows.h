// Activations and attention of single rows, by one instruction set: step.cpp includes this file for each.

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

// LANES numbers from `index` on of a part of the pool.
template <int STORED>
INLINE Floats stored_at(const uint8_t* part, long index) {
    if (STORED == CODES) return bytes(part + index);
    if (STORED == FLOAT16) return halves(part + 2 * index);
    return load((const float*)part + index);
}

// Multiply numbers[G, PIECE], `count` of each row, by the scales of these slots.
template <int G>
TARGET void scale_by(float* numbers, const uint16_t* scales, const int32_t* slots, long count) {
    uint16_t found[PIECE];
    for (long t = 0; t < count; t++) found[t] = scales[slots[t]];
    for (long t = count; t % LANES; t++) found[t] = 0;
    for (long t = 0; t < count; t += LANES) {
        const Floats factors = halves((const uint8_t*)(found + t));
        for (int g = 0; g < G; g++) {
            float* at = numbers + g * PIECE + t;
            store(at, times(load(at), factors));
        }
    }
}

// The products of G query rows q[G, key_dim] and the keys in `count` slots, in scores[G, PIECE]; up to 7 more are written.
// The values in these slots are fetched meanwhile: they are the next to be read.
template <int G, int STORED>
TARGET void score(const float* q, const Layer& layer, const uint8_t* keys, const uint8_t* values, const int32_t* slots,
                  long count, float* scores) {
    const long dim = layer.key_dim, value_bytes = layer.value_dim * STORED_BYTES[STORED];
    for (long t = 0; t < count; t += 8) {
        __m256 sums[G][8];
        for (long j = 0; j < 8; j++) {
            const long key = (long)slots[t + j < count ? t + j : count - 1] * dim;
            if (t + j < count)
                for (long k = 0; k < value_bytes; k += 64)
                    _mm_prefetch((const char*)(values + (long)slots[t + j] * value_bytes + k), _MM_HINT_T1);
            Floats sum[G][PARTS];
            for (int g = 0; g < G; g++)
                for (int p = 0; p < PARTS; p++) sum[g][p] = zeros();
            for (long k = 0; k < dim; k += 16)
                for (int p = 0; p < PARTS; p++) {
                    const Floats numbers = stored_at<STORED>(keys, key + k + p * LANES);
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
template <int G, int C, int STORED>
TARGET void sum_values(const float* weights, const uint8_t* values, const int32_t* slots, long count, long dim,
                       long column, float* found) {
    Floats sum[G][C];
    for (int g = 0; g < G; g++)
        for (int c = 0; c < C; c++) sum[g][c] = zeros();
    for (long t = 0; t < count; t++) {
        const long at = (long)slots[t] * dim + column;
        for (int c = 0; c < C; c++) {
            const Floats numbers = stored_at<STORED>(values, at + c * LANES);
            for (int g = 0; g < G; g++) sum[g][c] = fused(all(weights[g * PIECE + t]), numbers, sum[g][c]);
        }
    }
    for (int g = 0; g < G; g++)
        for (int c = 0; c < C; c++) store(found + g * WIDEST + column + c * LANES, sum[g][c]);
}

// Attention of G query heads q[G, key_dim] over the keys in `count` slots, added to sum[G, WIDEST], their highest scores and
// the totals of their weights; `only` says that these are the first.
template <int G, int STORED>
TARGET void attend_piece(const Attention& job, long before, const uint8_t* keys, const uint8_t* values,
                         const int32_t* slots, long count, bool only, float* scores, float* piece, const float* q,
                         float* sum, float* highest, float* total) {
    const Layer& layer = *job.layer;
    const long dim = layer.value_dim;
    score<G, STORED>(q, layer, keys, values, slots, count, scores);
    if (STORED == CODES) scale_by<G>(scores, layer.key_scales + before, slots, count);
    float here[G], weight[G];
    for (int g = 0; g < G; g++) here[g] = weigh(scores + g * PIECE, count, job.softcap, weight + g);
    if (STORED == CODES) scale_by<G>(scores, layer.value_scales + before, slots, count);
    long column = 0;
    for (; column + 4 * 16 <= dim && LANES == 16; column += 4 * 16)
        sum_values<G, 4, STORED>(scores, values, slots, count, dim, column, piece);
    for (; column < dim; column += 16)
        sum_values<G, PARTS, STORED>(scores, values, slots, count, dim, column, piece);
    for (int g = 0; g < G; g++) {
        const float top = only || here[g] > highest[g] ? here[g] : highest[g];
        const float old = only ? 0.0f : std::exp(highest[g] - top), added = std::exp(here[g] - top);
        for (long k = 0; k < dim; k++) {
            const float past = only ? 0.0f : sum[g * WIDEST + k] * old;
            sum[g * WIDEST + k] = past + piece[g * WIDEST + k] * added;
        }
        total[g] = total[g] * old + weight[g] * added;
        highest[g] = top;
    }
}

// Attention of G query heads from `head` on of the items of a chunk. Each piece of keys is read from memory once, and each
// item is computed as if it were alone.
template <int G, int STORED>
TARGET void attend_heads(const Attention& job, long chunk, long kv_head, long head) {
    alignas(64) float queries[CHUNK_ROWS * G * WIDEST], sums[CHUNK_ROWS * G * WIDEST];
    alignas(64) float scores[G * PIECE + 16], piece[G * WIDEST];
    float highests[CHUNK_ROWS][G], totals[CHUNK_ROWS][G];
    int32_t slots[PIECE];
    const Layer& layer = *job.layer;
    const Items& items = *job.items;
    const long key_dim = layer.key_dim, dim = layer.value_dim, size = items.block_size;
    const long before = kv_head * layer.slots, top = items.chunks[chunk], count = items.chunks[chunk + 1] - top;
    const uint8_t *keys = layer.keys + before * key_dim * STORED_BYTES[STORED],
                  *values = layer.values + before * dim * STORED_BYTES[STORED];
    for (long row = 0; row < count; row++) {
        const Strided& query = job.query;
        const float* from = query.at + items.rows[top + row] * query.row + (kv_head * job.group + head) * query.head;
        float* q = queries + row * G * WIDEST;
        for (int g = 0; g < G; g++)
            for (long k = 0; k < key_dim; k++) q[g * key_dim + k] = from[g * query.head + k] * job.scale;
        if (job.rotates)
            for (int g = 0; g < G; g++) hadamard(q + g * key_dim, key_dim);
        for (int g = 0; g < G; g++) highests[row][g] = totals[row][g] = 0.0f;
    }
    const int32_t* blocks = items.blocks + items.block_offset[top];
    const long skip = items.start[top] % size, last = skip + items.tokens[top + count - 1];
    for (long first = skip; first < last; first += PIECE) {
        const long most = last - first < PIECE ? last - first : PIECE;
        for (long t = 0, block = first / size, slot = first % size; t < most; t++) {
            slots[t] = (int32_t)(blocks[block] * size + slot);
            if (++slot == size) slot = 0, block++;
        }
        for (long row = 0; row < count; row++) {
            const long left = skip + items.tokens[top + row] - first;
            if (left > 0)
                attend_piece<G, STORED>(job, before, keys, values, slots, left < most ? left : most, first == skip, scores,
                                        piece, queries + row * G * WIDEST, sums + row * G * WIDEST, highests[row],
                                        totals[row]);
        }
    }
    for (long row = 0; row < count; row++)
        for (int g = 0; g < G; g++) {
            const long place = ((top + row) * layer.kv_heads + kv_head) * job.group + head + g;
            const float* sum = sums + (row * G + g) * WIDEST;
            for (long k = 0; k < dim; k++) job.output[place * dim + k] = sum[k] / totals[row][g];
            if (job.rotates) hadamard(job.output + place * dim, dim);
            if (job.lse) job.lse[place] = highests[row][g] + std::log(totals[row][g]);
        }
}

// Attention of a chunk's query heads that share a kv head.
template <int STORED>
TARGET void attend_over(const Attention& job, long chunk, long kv_head) {
    for (long head = 0; head < job.group; head += HEADS) switch (job.group - head) {
            case 1: attend_heads<1, STORED>(job, chunk, kv_head, head); break;
            case 2: attend_heads<2, STORED>(job, chunk, kv_head, head); break;
            case 3: attend_heads<3, STORED>(job, chunk, kv_head, head); break;
            default: attend_heads<4, STORED>(job, chunk, kv_head, head);
        }
}

TARGET void attend(const Attention& job, long chunk, long kv_head) {
    switch (job.layer->stored) {
        case CODES: attend_over<CODES>(job, chunk, kv_head); break;
        case FLOAT16: attend_over<FLOAT16>(job, chunk, kv_head); break;
        default: attend_over<FLOAT32>(job, chunk, kv_head);
    }
}

}  // namespace avx512 or avx2

}  // namespace
