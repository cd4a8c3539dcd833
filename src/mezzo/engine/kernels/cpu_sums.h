// Sums of products of 8-bit numbers in 14 significant bits, as Hopper's matrix units keep them (engine/matrix_units/accumulation.py).

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kProducts = 32;  // of one instruction
constexpr int64_t kColumns = 64;   // of a tile: 32 rows of two FP32 operands fit a first-level cache
constexpr uint32_t kExponent = 0x7F800000u, kKept = ~0x3FFu;
constexpr float kLeastPower = 0x1p-100f, kUnitsOfPower = 0x1p13f;

inline float masked(float x, uint32_t mask) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits &= mask;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// An operand: its numbers in FP32 and the powers of two of their exponents, row after row.
struct Operand {
  const float* values;
  const float* powers;
  int64_t width;
};

// Add the products `begin` to `end` of row `i` of `a` and the columns from `j` on, at most kColumns, to `total`; all numbers are finite.
inline void add_products(const Operand& a, const Operand& b, int64_t i, int64_t j, int64_t n, int64_t begin, int64_t end, float* total) {
  float per_unit[kColumns];
  int32_t units[kColumns];
  for (int64_t c = 0; c < n; ++c) per_unit[c] = std::max(masked(total[c], kExponent), kLeastPower);
  for (int64_t k = begin; k < end; ++k) {
    const float x = a.powers[i * a.width + k];
    const float* y = b.powers + k * b.width + j;
    for (int64_t c = 0; c < n; ++c) per_unit[c] = std::max(per_unit[c], x * y[c]);
  }
  for (int64_t c = 0; c < n; ++c) {
    per_unit[c] = 1.0f / per_unit[c] * kUnitsOfPower;
    units[c] = static_cast<int32_t>(total[c] * per_unit[c]);
  }
  for (int64_t k = begin; k < end; ++k) {
    const float x = a.values[i * a.width + k];
    const float* y = b.values + k * b.width + j;
    for (int64_t c = 0; c < n; ++c) units[c] += static_cast<int32_t>(x * y[c] * per_unit[c]);
  }
  for (int64_t c = 0; c < n; ++c) total[c] = masked(static_cast<float>(units[c]) / per_unit[c], kKept);
}

// Return the sums of row `i` of `a` times these columns in `sum`, in FP32 from one promotion to the next.
inline void add_row(const Operand& a, const Operand& b, int64_t i, int64_t j, int64_t n, int64_t promoted, float* sum) {
  float total[kColumns];
  for (int64_t c = 0; c < n; ++c) sum[c] = 0.0f;
  for (int64_t at = 0; at < a.width; at += promoted) {
    const int64_t end = std::min(at + promoted, a.width);
    for (int64_t c = 0; c < n; ++c) total[c] = 0.0f;
    for (int64_t k = at; k < end; k += kProducts) add_products(a, b, i, j, n, k, std::min(k + kProducts, end), total);
    for (int64_t c = 0; c < n; ++c) sum[c] += total[c];
  }
}

}  // namespace

extern "C" {

// The rows of `a` times `b`, promoted after every `promoted` products; `threads` share the columns.
void mezzo_sums(int64_t rows, const float* a, const float* a_powers, const float* b, const float* b_powers, float* sums, int64_t width,
                int64_t columns, int64_t promoted, int64_t threads) {
  const Operand left{a, a_powers, width}, right{b, b_powers, columns};
  const int64_t tiles = (columns + kColumns - 1) / kColumns, parts = std::max<int64_t>(1, std::min(threads, tiles));
  auto part = [&](int64_t number) {
    for (int64_t tile = tiles * number / parts; tile < tiles * (number + 1) / parts; ++tile) {
      const int64_t j = tile * kColumns, n = std::min(kColumns, columns - j);
      for (int64_t i = 0; i < rows; ++i) add_row(left, right, i, j, n, promoted, sums + i * columns + j);
    }
  };
  std::vector<std::thread> others;
  for (int64_t number = 1; number < parts; ++number) others.emplace_back(part, number);
  part(0);
  for (std::thread& other : others) other.join();
}

}  // extern "C"
