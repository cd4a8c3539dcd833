// Matrices rounded to formats whose blocks share scales: matrix_units/block_formats.py is the specification, to the bit.
//
// A matrix is worked through in strips: as many rows as a block is high, and so many columns that a strip stays in the second-level
// cache. A strip is read twice there: for the largest magnitudes, and to be rounded.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <thread>
#include <vector>

#include "cpu_blocks.h"
#include "cpu_formats.h"

namespace {

enum Rule : int32_t { kExact = 0, kCeiling = 1, kFloor = 2, kUnderTensor = 3, kFourOrSix = 4 };

struct BlockFormat {
  float largest, min_normal;
  int32_t mantissa_bits, max_exponent, rule, stochastic;
  uint32_t seed;
  float encode, decode;  // the tensor's scale and its reciprocal
};

struct Scale {
  float factor, scale;
};

// To the nearest, ties to even: the sum with `magic` has its last place at the step of `x`. The sign of a zero is kept.
inline float nearest(float x, float smallest, float magic, float largest) {
  x = x > largest ? largest : x;
  x = x < -largest ? -largest : x;
  const float power = bits_to_float(float_to_bits(x) & 0x7f800000u);
  const float m = (power < smallest ? smallest : power) * magic;
  return bits_to_float(float_to_bits((x + m) - m) | (float_to_bits(x) & 0x80000000u));
}

inline float at_random(float x, float noise, float smallest, float eps, float largest) {
  const float clamped = std::fabs(x) > largest ? largest : std::fabs(x);
  const float power = bits_to_float(float_to_bits(clamped) & 0x7f800000u);
  const float step = (power < smallest ? smallest : power) * eps;
  const float inverse = bits_to_float((254u << 23) - float_to_bits(step));
  const float up = std::floor(clamped * inverse + noise) * step;
  return std::copysign(up > largest ? largest : up, x);
}

inline float power_of_two(int32_t code) {  // 2 to the code - 127, also for code 0, a subnormal
  return code > 0 ? bits_to_float(static_cast<uint32_t>(code) << 23) : bits_to_float(1u << 22);
}

Scale under_tensor(float amax, float stretch, const BlockFormat& f) {
  constexpr float kLeast = 0x1p-6f, kMost = 448.0f, kMagic = 1.5f * 0x1p20f, kFloatMax = 0x1.fffffep127f;
  float wanted = amax / f.largest * f.encode;
  if (stretch != 1.0f) wanted *= stretch;
  wanted = wanted < kLeast ? kLeast : wanted;
  const float scale = nearest(wanted, kLeast, kMagic, kMost) * f.decode;
  const float factor = 1.0f / scale;
  return {factor > kFloatMax ? kFloatMax : factor, scale};
}

Scale scale_of(float amax, const BlockFormat& f) {
  const float nan = bits_to_float(0x7fc00000u);
  if (f.rule == kExact) {
    const double covered = static_cast<double>(amax) < 1e-12 ? 1e-12 : static_cast<double>(amax);
    const float factor = static_cast<float>(static_cast<double>(f.largest) / covered);
    return {factor, 1.0f / factor};
  }
  if (f.rule >= kUnderTensor) return under_tensor(amax, 1.0f, f);
  if (amax != amax) return {nan, nan};
  if (f.rule == kCeiling) {
    const uint32_t bits = float_to_bits(amax / f.largest);
    const int32_t field = static_cast<int32_t>(bits >> 23);
    const uint32_t mantissa = bits & 0x7fffffu;
    const int32_t code = std::min(254, field + ((field == 0 ? mantissa > 0x400000u : mantissa > 0u) ? 1 : 0));
    return {code == 0 ? 1.0f : power_of_two(254 - code), power_of_two(code)};
  }
  const int32_t code = std::max(0, static_cast<int32_t>(float_to_bits(amax) >> 23) - f.max_exponent);
  return {power_of_two(254 - std::max(1, code)), power_of_two(code)};
}

struct Rounder {
  const BlockFormat& f;
  float magic, eps;

  explicit Rounder(const BlockFormat& format)
      : f(format), magic(std::ldexp(1.5f, 23 - format.mantissa_bits)), eps(std::ldexp(1.0f, -format.mantissa_bits)) {}

  // Round `n` values with their factors and scales; `step` is 0 where all share one. `at` is the first value's place in the matrix.
  void row(const float* __restrict__ x, float* __restrict__ to, const float* __restrict__ factors, const float* __restrict__ scales,
           int64_t step, int64_t n, uint32_t at) const {
    const float largest = f.largest, smallest = f.min_normal, m = magic, e = eps;
    if (f.stochastic) {
      const uint32_t start = at + f.seed;
      for (int64_t i = 0; i < n; ++i) {
        const float noise = static_cast<float>(static_cast<int32_t>(mix(start + static_cast<uint32_t>(i)) >> 16)) * 0x1p-16f;
        to[i] = at_random(x[i] * factors[i * step], noise, smallest, e, largest) * scales[i * step];
      }
    } else if (step == 0) {
      const float factor = *factors, scale = *scales;
      for (int64_t i = 0; i < n; ++i) to[i] = nearest(x[i] * factor, smallest, m, largest) * scale;
    } else {
      for (int64_t i = 0; i < n; ++i) to[i] = nearest(x[i] * factors[i], smallest, m, largest) * scales[i];
    }
  }
};

inline float largest_magnitude(const float* x, int64_t n) {
  int32_t most = 0;  // as integers, magnitudes have their order, and NaN is above infinity
  for (int64_t i = 0; i < n; ++i) most = std::max(most, static_cast<int32_t>(float_to_bits(x[i]) & 0x7fffffffu));
  return bits_to_float(static_cast<uint32_t>(most));
}

struct Strip {
  std::vector<float> values, factors, scales, tried;
  std::vector<int32_t> most;

  // Round rows [r, r + high) and columns [c, c + n) of a matrix.
  void round(const void* from, int64_t dtype, float* to, int64_t columns, int64_t r, int64_t high, int64_t c, int64_t n, int64_t wide,
             const Rounder& rounder) {
    values.resize(static_cast<size_t>(high * n));
    const int64_t blocks = (n + wide - 1) / wide;
    factors.resize(static_cast<size_t>(blocks));
    scales.resize(static_cast<size_t>(blocks));
    most.assign(static_cast<size_t>(blocks), 0);
    for (int64_t i = 0; i < high; ++i) {
      float* row = values.data() + i * n;
      const float* read = load(from, dtype, (r + i) * columns + c, n, row);
      if (read != row) std::copy(read, read + n, row);
      if (wide == 1) {
        int32_t* __restrict__ m = most.data();
        for (int64_t j = 0; j < n; ++j) m[j] = std::max(m[j], static_cast<int32_t>(float_to_bits(row[j]) & 0x7fffffffu));
      } else {
        for (int64_t b = 0; b < blocks; ++b) {
          const float amax = largest_magnitude(row + b * wide, std::min(wide, n - b * wide));
          most[static_cast<size_t>(b)] = std::max(most[static_cast<size_t>(b)], static_cast<int32_t>(float_to_bits(amax)));
        }
      }
    }
    for (int64_t b = 0; b < blocks; ++b) {
      const size_t at = static_cast<size_t>(b);
      const float amax = bits_to_float(static_cast<uint32_t>(most[at]));
      const Scale s = rounder.f.rule == kFourOrSix ? better(amax, high, b, n, wide, rounder, r, c, columns) : scale_of(amax, rounder.f);
      factors[at] = s.factor;
      scales[at] = s.scale;
    }
    for (int64_t i = 0; i < high; ++i) {
      const int64_t place = (r + i) * columns + c;
      const float* row = values.data() + i * n;
      if (wide == 1) {
        rounder.row(row, to + place, factors.data(), scales.data(), 1, n, static_cast<uint32_t>(place));
        continue;
      }
      for (int64_t b = 0; b < blocks; ++b)
        rounder.row(row + b * wide, to + place + b * wide, &factors[static_cast<size_t>(b)], &scales[static_cast<size_t>(b)], 0,
                    std::min(wide, n - b * wide), static_cast<uint32_t>(place + b * wide));
    }
  }

 private:
  Scale better(float amax, int64_t high, int64_t b, int64_t n, int64_t wide, const Rounder& rounder, int64_t r, int64_t c,
               int64_t columns) {
    const Scale six = under_tensor(amax, 1.0f, rounder.f), four = under_tensor(amax, 1.5f, rounder.f);
    const int64_t width = std::min(wide, n - b * wide);
    return errors(four, high, b, n, wide, width, rounder, r, c, columns) < errors(six, high, b, n, wide, width, rounder, r, c, columns)
               ? four
               : six;
  }

  double errors(const Scale& s, int64_t high, int64_t b, int64_t n, int64_t wide, int64_t width, const Rounder& rounder, int64_t r,
                int64_t c, int64_t columns) {
    tried.resize(static_cast<size_t>(width));
    double sum = 0.0;
    for (int64_t i = 0; i < high; ++i) {
      const float* row = values.data() + i * n + b * wide;
      rounder.row(row, tried.data(), &s.factor, &s.scale, 0, width, static_cast<uint32_t>((r + i) * columns + c + b * wide));
      for (int64_t j = 0; j < width; ++j) sum += std::fabs(tried[static_cast<size_t>(j)] - row[j]);
    }
    return sum;
  }
};

}  // namespace

// Write a matrix of `rows` and `columns`, rounded in blocks `high` and `wide`, to `to`.
extern "C" void mezzo_round_blocks(int64_t dtype, const void* from, float* to, int64_t rows, int64_t columns, int64_t high, int64_t wide,
                                   const BlockFormat* format, int64_t threads) {
  constexpr int64_t kStripValues = 16384;  // 64 KiB of FP32
  const int64_t width = std::max<int64_t>(wide, kStripValues / high / wide * wide);
  const int64_t down = (rows + high - 1) / high, across = (columns + width - 1) / width;
  const int64_t parts = std::max<int64_t>(1, std::min(threads, rows * columns / (kBlock * kBlocksWorthAThread)));
  const Rounder rounder(*format);
  auto part = [&](int64_t number) {
    Strip strip;
    for (int64_t task = down * across * number / parts; task < down * across * (number + 1) / parts; ++task) {
      const int64_t r = task / across * high, c = task % across * width;
      strip.round(from, dtype, to, columns, r, std::min(high, rows - r), c, std::min(width, columns - c), wide, rounder);
    }
  };
  std::vector<std::thread> others;
  for (int64_t number = 1; number < parts; ++number) others.emplace_back(part, number);
  part(0);
  for (std::thread& other : others) other.join();
}

// Write a matrix whose rows are mixed 16 by 16 (`block_formats.transformed`) to `to`, in BF16; rows are a multiple of 16.
extern "C" void mezzo_hadamard(const uint16_t* from, uint16_t* to, int64_t rows, int64_t columns, const float* signs) {
  constexpr int64_t kRows = 16, kColumns = 256;
  float values[kRows][kColumns];
  for (int64_t r = 0; r < rows; r += kRows) {
    for (int64_t c = 0; c < columns; c += kColumns) {
      const int64_t n = std::min(kColumns, columns - c);
      for (int64_t i = 0; i < kRows; ++i) {
        const uint16_t* row = from + (r + i) * columns + c;
        for (int64_t j = 0; j < n; ++j) values[i][j] = bits_to_float(static_cast<uint32_t>(row[j]) << 16) * signs[i];
      }
      for (int64_t apart = 1; apart < kRows; apart *= 2) {
        for (int64_t i = 0; i < kRows; ++i) {
          if (i & apart) continue;
          float* __restrict__ a = values[i];
          float* __restrict__ b = values[i + apart];
          for (int64_t j = 0; j < n; ++j) {
            const float sum = a[j] + b[j], difference = a[j] - b[j];
            a[j] = sum;
            b[j] = difference;
          }
        }
      }
      for (int64_t i = 0; i < kRows; ++i)
        for (int64_t j = 0; j < n; ++j) to[(r + i) * columns + c + j] = to_bfloat16(values[i][j] * 0.25f);
    }
  }
}
