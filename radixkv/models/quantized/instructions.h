// Vectors of float32 by the instruction set INSTRUCTIONS, 512 or 2: the start of a namespace that the including file ends.
// Both sets round alike, so that code over all lanes in order has the same bits.

#if INSTRUCTIONS == 512
namespace avx512 {

using Floats = __m512;
using Words = __m512i;
constexpr int LANES = 16;
constexpr long DIRECT = 12;  // most rows for which weights are expanded in registers

INLINE Floats zeros() { return _mm512_setzero_ps(); }
INLINE Floats all(float number) { return _mm512_set1_ps(number); }
INLINE Floats load(const float* at) { return _mm512_loadu_ps(at); }
INLINE void store(float* at, Floats numbers) { _mm512_storeu_ps(at, numbers); }
INLINE Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
INLINE Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
INLINE Floats fused(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
INLINE Floats halves(const uint8_t* at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at)); }
INLINE Floats bytes(const uint8_t* at) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at)));
}
INLINE Floats divided(Floats a, Floats b) { return _mm512_div_ps(a, b); }
INLINE Floats lower(Floats a, Floats b) { return _mm512_min_ps(a, b); }  // b if one is NaN
INLINE Floats higher(Floats a, Floats b) { return _mm512_max_ps(a, b); }
INLINE Floats nearest(Floats a) { return _mm512_roundscale_ps(a, 8); }
INLINE Floats power_of_two(Floats a) {  // of whole numbers
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(a), _mm512_set1_epi32(127)), 23));
}
INLINE __m256 eighths(const Floats* sixteen) {  // the sums of lanes n and n + 8 of 16
    return _mm256_add_ps(_mm512_castps512_ps256(*sixteen), _mm512_extractf32x8_ps(*sixteen, 1));
}
INLINE Words words(const uint8_t* at) { return _mm512_loadu_si512(at); }
INLINE Words next(Words words) { return _mm512_srli_epi32(words, 4); }
template <int FORMAT>
INLINE Floats numbers(Words words) {  // a permutation reads the lowest four bits of each word
    const Floats from_0 = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const Floats from_8 = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    return _mm512_permutexvar_ps(words, FORMAT == INT4 ? from_8 : from_0);
}

#else
namespace avx2 {

using Floats = __m256;
using Words = __m256i;
constexpr int LANES = 8;
constexpr long DIRECT = 6;

INLINE Floats zeros() { return _mm256_setzero_ps(); }
INLINE Floats all(float number) { return _mm256_set1_ps(number); }
INLINE Floats load(const float* at) { return _mm256_loadu_ps(at); }
INLINE void store(float* at, Floats numbers) { _mm256_storeu_ps(at, numbers); }
INLINE Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
INLINE Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
INLINE Floats fused(Floats a, Floats b, Floats sum) { return _mm256_fmadd_ps(a, b, sum); }
INLINE Floats halves(const uint8_t* at) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at)); }
INLINE Floats bytes(const uint8_t* at) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at)));
}
INLINE Floats divided(Floats a, Floats b) { return _mm256_div_ps(a, b); }
INLINE Floats lower(Floats a, Floats b) { return _mm256_min_ps(a, b); }
INLINE Floats higher(Floats a, Floats b) { return _mm256_max_ps(a, b); }
INLINE Floats nearest(Floats a) { return _mm256_round_ps(a, 8); }
INLINE Floats power_of_two(Floats a) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(a), _mm256_set1_epi32(127)), 23));
}
INLINE __m256 eighths(const Floats* sixteen) { return _mm256_add_ps(sixteen[0], sixteen[1]); }
INLINE Words words(const uint8_t* at) { return _mm256_loadu_si256((const __m256i*)at); }
INLINE Words next(Words words) { return _mm256_srli_epi32(words, 4); }
template <int FORMAT>
INLINE Floats numbers(Words words) {
    const Words found = _mm256_and_si256(words, _mm256_set1_epi32(15));
    return _mm256_cvtepi32_ps(FORMAT == INT4 ? _mm256_sub_epi32(found, _mm256_set1_epi32(8)) : found);
}

#endif
