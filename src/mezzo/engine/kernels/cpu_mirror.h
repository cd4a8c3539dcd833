// Rounding errors of contiguous tensors against their exact values, and the opposite errors at random elements, as
// observe/values/tracer.py explains them. One pass, in FP64.

#pragma once

#include <cmath>

#include "cpu_blocks.h"
#include "cpu_formats.h"

namespace {

// By format: the unit in the last place at 1, the smallest number above 0, and the smallest magnitude that rounds to infinity.
constexpr float kUnits[] = {0x1p-23f, 0x1p-10f, 0x1p-7f};
constexpr float kSmallest[] = {0x1p-149f, 0x1p-24f, 0x1p-133f};
constexpr double kTooLarge[] = {0x1.ffffffp127, 65520.0, 0x1.ffp127};

constexpr int64_t kSums = 8;  // separate sums, because compilers vectorise no sum whose order they would change

struct Errors {
  double apart[kSums] = {}, exact[kSums] = {};  // sums of squares

  void add(const double* __restrict__ wide, const float* __restrict__ x, int64_t n) {
    for (int64_t i = 0; i + kSums <= n; i += kSums)
      for (int64_t j = 0; j < kSums; ++j) add_one(wide[i + j], x[i + j], j);
    for (int64_t i = n - n % kSums; i < n; ++i) add_one(wide[i], x[i], i % kSums);
  }

 private:
  void add_one(double wide, float value, int64_t place) {
    const double error = wide - value;
    apart[place] += error * error;
    exact[place] += wide * wide;
  }
};

// Half of the elements get the opposite error. Rounding alone would return most of them to where they were: an error of a quarter of a
// unit mirrors into half of one. So up to half a unit is added or taken away first.
void mirror(const double* __restrict__ exact, const float* __restrict__ x, void* base, int64_t dtype, int64_t at, int64_t n,
            uint32_t start) {
  const float unit_at_1 = kUnits[dtype], smallest = kSmallest[dtype];
  const double too_large = kTooLarge[dtype];
  float opposite[kBlock];
  int32_t random[kBlock], taken[kBlock];
  for (int64_t i = 0; i < n; ++i) random[i] = static_cast<int32_t>(mix(start + static_cast<uint32_t>(at + i)));
  for (int64_t i = 0; i < n; ++i) {
    const double whole = 2 * exact[i] - x[i];
    const float below = bits_to_float(float_to_bits(static_cast<float>(whole)) & 0x7f800000u);  // the power of two
    const float unit = std::max(below * unit_at_1, smallest);
    const double moved = whole + (random[i] & 0x7fffffff) * 0x1p-31 * unit - 0.5 * unit;
    opposite[i] = static_cast<float>(moved);
    taken[i] = (random[i] < 0) & (exact[i] != x[i]) & (std::fabs(moved) < too_large);
  }
  if (dtype == kFloat32) {
    float* to = static_cast<float*>(base) + at;
    for (int64_t i = 0; i < n; ++i) to[i] = taken[i] ? opposite[i] : to[i];
    return;
  }
  uint16_t narrow[kBlock];
  store_weights(opposite, narrow, dtype, 0, n);
  uint16_t* to = static_cast<uint16_t*>(base) + at;
  for (int64_t i = 0; i < n; ++i) to[i] = taken[i] ? narrow[i] : to[i];
}

}  // namespace

// Write the sums of squares of each result's error and of its exact values to `sums`. A seed of 0 or more also mirrors the errors.
extern "C" void mezzo_mirror(int64_t count, const double* const* exact, void* const* results, double* const* sums, const int64_t* sizes,
                             const int64_t* dtypes, const int64_t* seeds, int64_t threads) {
  std::vector<Errors> parts(static_cast<size_t>(std::max<int64_t>(1, threads)));
  for (int64_t t = 0; t < count; ++t) {
    std::fill(parts.begin(), parts.end(), Errors());
    const uint64_t seed = static_cast<uint64_t>(seeds[t]);
    const uint32_t start = mix(mix(static_cast<uint32_t>(seed >> 32)) + static_cast<uint32_t>(seed) * 0x9e3779b9u);
    for_blocks(1, &sizes[t], threads, [&](int64_t part, int64_t, int64_t at, int64_t n) {
      float space[kBlock];
      const float* x = load(results[t], dtypes[t], at, n, space);
      parts[static_cast<size_t>(part)].add(exact[t] + at, x, n);
      if (seeds[t] >= 0) mirror(exact[t] + at, x, results[t], dtypes[t], at, n, start);
    });
    sums[t][0] = sums[t][1] = 0.0;
    for (const Errors& part : parts) {
      for (int64_t j = 0; j < kSums; ++j) {
        sums[t][0] += part.apart[j];
        sums[t][1] += part.exact[j];
      }
    }
  }
}
