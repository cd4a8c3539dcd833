// The formats in which weights, gradients and moments lie in memory, a block at a time: widened to FP32, and rounded back.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

// How a weight is stored: in FP32, in 16 bits with an FP32 master, in BF16 with its low bits, in 16 bits without a master, or in BF16
// without a master and with stochastic rounding.
enum Dtype : int64_t {
  kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kSplit = 3, kFloat16NoMaster = 4, kBFloat16NoMaster = 5, kBFloat16Stochastic = 6,
};
constexpr int64_t kNoMaster = 3;  // added to a format's code if its weight has no master
constexpr int64_t kPacked = 7;  // a moment in 8 bits

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline uint16_t to_bfloat16(float value) {
  const uint32_t bits = float_to_bits(value);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
  return static_cast<uint16_t>(nan ? (bits >> 16) | 0x40u : rounded);
}

#if !defined(__F16C__)
inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  // A half's bits moved into a float's place are the value times 2^-112, subnormals included.
  return bits_to_float(sign | float_to_bits(bits_to_float(magnitude << 13) * 0x1p112f));
}

inline uint16_t float_to_half(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {                        // below 2^-14: let the adder round to the subnormal's place
    const float shifted = bits_to_float(magnitude) + 0.5f;
    return sign | static_cast<uint16_t>(float_to_bits(shifted) - 0x3f000000u);
  }
  return sign | static_cast<uint16_t>((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13);
}
#endif

void widen_half(const uint16_t* from, float* to, int64_t n) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  for (; i < n; ++i) to[i] = _cvtsh_ss(from[i]);
#else
  for (; i < n; ++i) to[i] = half_to_float(from[i]);
#endif
}

void narrow_half(const float* from, uint16_t* to, int64_t n) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
  for (; i < n; ++i) to[i] = _cvtss_sh(from[i], _MM_FROUND_TO_NEAREST_INT);
#else
  for (; i < n; ++i) to[i] = float_to_half(from[i]);
#endif
}

// Return FP32 gradients for a block: the tensor's own memory, or `space` with the widened values.
const float* load(const void* base, int64_t dtype, int64_t at, int64_t n, float* space) {
  if (dtype == kFloat32) return static_cast<const float*>(base) + at;
  const uint16_t* from = static_cast<const uint16_t*>(base) + at;
  if (dtype == kFloat16) {
    widen_half(from, space, n);
  } else {
    for (int64_t i = 0; i < n; ++i) space[i] = bits_to_float(static_cast<uint32_t>(from[i]) << 16);
  }
  return space;
}

// Round a block of masters into the model's 16-bit weights.
void store_weights(const float* masters, void* base, int64_t dtype, int64_t at, int64_t n) {
  if (dtype == kFloat32) return;  // the weights are the masters
  uint16_t* to = static_cast<uint16_t*>(base) + at;
  if (dtype == kFloat16) {
    narrow_half(masters, to, n);
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] = to_bfloat16(masters[i]);
  }
}

// A split master: the upper 16 bits are the model's BF16 weight (truncated towards the stored low bits), the lower 16 are stored separately.
void join(const uint16_t* high, const uint16_t* low, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    // The weight was rounded to nearest: where the low half is above the middle, the true upper half is one below.
    const uint32_t upper = static_cast<uint32_t>(high[i]) - (low[i] >> 15);
    to[i] = bits_to_float((upper << 16) | low[i]);
  }
}

void split(const float* from, uint16_t* high, uint16_t* low, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = float_to_bits(from[i]);
    low[i] = static_cast<uint16_t>(bits);
    high[i] = static_cast<uint16_t>((bits >> 16) + (static_cast<uint16_t>(bits) >> 15));  // to nearest, ties away from zero
  }
}

// Random bits from a hash of position and update: noise.py explains why and how.
inline uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

inline uint32_t seed_of(int64_t number, float step) {
  return mix(mix(static_cast<uint32_t>(step)) + static_cast<uint32_t>(number) * 0x9e3779b9u);
}

enum Stream { kForWeight, kForFirst, kForSecond };

// Fill `to` with 16 random bits for each element of one of the three streams.
void noise(uint32_t seed, Stream stream, int64_t at, int64_t n, uint32_t* to) {
  const uint32_t start = static_cast<uint32_t>(at) + seed;
  const uint32_t times = stream == kForSecond ? 0x9e3779b1u : 1u;
  const int shift = stream == kForWeight ? 0 : 16;
  for (int64_t i = 0; i < n; ++i) to[i] = ((mix(start + static_cast<uint32_t>(i)) * times) >> shift) & 0xffffu;
}

void narrow_bfloat16_by(const uint32_t* bits16, const float* from, uint16_t* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = float_to_bits(from[i]);
    const bool finite = (bits & 0x7fffffffu) < 0x7f800000u;
    to[i] = finite ? static_cast<uint16_t>((bits + bits16[i]) >> 16) : to_bfloat16(from[i]);
  }
}

// Moments in 8 bits: eight_bit.py is the specification.
constexpr int64_t kPackedBlock = 128;

template <bool kSigned>
void unpack(const uint8_t* codes, const uint8_t* exponents, float* to, int64_t n) {
  constexpr uint32_t top = kSigned ? 15 : 31;
  for (int64_t begin = 0; begin < n; begin += kPackedBlock) {
    const int64_t end = std::min(n, begin + kPackedBlock);
    const uint32_t largest = exponents[begin / kPackedBlock], reach = (largest - top) << 3;
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t magnitude = kSigned ? codes[i] & 0x7fu : codes[i], sign = kSigned ? codes[i] & 0x80u : 0u;
      to[i] = bits_to_float((magnitude ? (magnitude + reach) << 20 : 0u) | sign << 24);
    }
    if (largest == 255u) std::fill(to + begin, to + end, bits_to_float(0x7fc00000u));
  }
}

template <bool kSigned>
void pack(const float* from, const uint32_t* bits16, uint8_t* codes, uint8_t* exponents, int64_t n) {
  constexpr uint32_t top = kSigned ? 15 : 31, floor = kSigned ? 40 : 64;
  for (int64_t begin = 0; begin < n; begin += kPackedBlock) {
    const int64_t end = std::min(n, begin + kPackedBlock);
    uint32_t rounded[kPackedBlock];
    uint32_t largest = floor << 3;
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t magnitude = std::min(float_to_bits(from[i]) & 0x7fffffffu, 0x7f800000u);
      const uint32_t r = rounded[i - begin] = (magnitude + (bits16[i] << 4)) >> 20;
      largest = r > largest ? r : largest;
    }
    largest >>= 3;
    exponents[begin / kPackedBlock] = static_cast<uint8_t>(largest);
    const uint32_t reach = (largest - top) << 3, smallest = (largest - top + 1) << 23;
    const float chance = bits_to_float(smallest) * 0x1p-16f;
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t bits = float_to_bits(from[i]), magnitude = bits & 0x7fffffffu;
      const uint32_t code = rounded[i - begin] - reach;
      if (kSigned) {
        const uint32_t below = bits_to_float(magnitude) > static_cast<float>(static_cast<int32_t>(bits16[i])) * chance ? 8u : 0u;
        codes[i] = static_cast<uint8_t>((magnitude >= smallest ? code : below) | ((bits >> 24) & 0x80u));
      } else {
        const uint32_t raised = static_cast<int32_t>(code) > 8 ? code : 8u;
        codes[i] = static_cast<uint8_t>(magnitude ? raised : 0u);
      }
    }
  }
}

}  // namespace
