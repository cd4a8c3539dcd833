// Fingerprints of contiguous tensors, as observe/values/fingerprints.py defines them: the sums of squares and of fourth powers, 64 sums of
// elements with fixed signs, and the sum of all bits with the weights of observe/tensors.py. One pass, in FP64; a thread would take longer
// to start than most tensors need.

#pragma once

#include "cpu_blocks.h"
#include "cpu_formats.h"

namespace {

constexpr int64_t kBuckets = 64;

// Separate sums for each bucket, because compilers vectorise no sum whose order they would change.
struct Sums {
  double signs[kBuckets] = {}, squares[kBuckets] = {}, fourths[kBuckets] = {};

  void add(const float* __restrict__ x, const int8_t* __restrict__ sign, int64_t n) {
    for (int64_t i = 0; i + kBuckets <= n; i += kBuckets)
      for (int64_t j = 0; j < kBuckets; ++j) add_one(x[i + j], sign[i + j], j);
    for (int64_t i = n - n % kBuckets; i < n; ++i) add_one(x[i], sign[i], i % kBuckets);
  }

 private:
  void add_one(float value, int8_t sign, int64_t bucket) {
    const double wide = value, square = wide * wide;
    signs[bucket] += sign * wide;
    squares[bucket] += square;
    fourths[bucket] += square * square;
  }
};

template <typename Bits>
int64_t weighted_bits(const void* tensor, int64_t size) {
  const Bits* bits = static_cast<const Bits*>(tensor);
  uint64_t sum = 0;
  for (int64_t i = 0; i < size; ++i) {
    const uint64_t mixed = static_cast<uint64_t>(2 * i + 1) * 0x9E3779B97F4A7C15u;
    sum += static_cast<uint64_t>(static_cast<int64_t>(bits[i])) * ((mixed ^ (mixed >> 32)) | 1u);
  }
  return static_cast<int64_t>(sum);
}

}  // namespace

// Write the sums of each tensor to `numbers`: squares, fourth powers, buckets; and its bits to `hashes`.
extern "C" void mezzo_fingerprints(int64_t count, const void* const* tensors, double* const* numbers, int64_t* const* hashes,
                                   const int64_t* sizes, const int64_t* dtypes, const int8_t* signs, int64_t) {
  for (int64_t t = 0; t < count; ++t) {
    Sums sums;
    for (int64_t at = 0; at < sizes[t]; at += kBlock) {
      float space[kBlock];
      const int64_t n = std::min(kBlock, sizes[t] - at);
      sums.add(load(tensors[t], dtypes[t], at, n, space), signs + at, n);
    }
    double* to = numbers[t];
    to[0] = to[1] = 0.0;
    for (int64_t j = 0; j < kBuckets; ++j) {
      to[0] += sums.squares[j];
      to[1] += sums.fourths[j];
      to[2 + j] = sums.signs[j];
    }
    *hashes[t] = dtypes[t] == 0 ? weighted_bits<int32_t>(tensors[t], sizes[t]) : weighted_bits<int16_t>(tensors[t], sizes[t]);
  }
}
