// Counts by exponent, in the cells that exponent_bins.py defines: tensors by tables of addresses, each into its own table or a shared one.
//
// A block's cells are found by comparisons, which compilers vectorise; then they are counted one by one. Values lie
// close together, and adding to a number just stored waits for the store: neighbours are counted in four separate tables.
// FP32's subnormals are only detected here: a block that contains one is processed again.

#pragma once

#include <mutex>

#include "cpu_blocks.h"
#include "cpu_formats.h"

namespace {

constexpr int kCuts = 8, kCells = kCuts + 1;
constexpr int kSideBySide = 4, kExponents = 256, kStride = 16;  // cells of an exponent in a thread's own table: a shift, no product
constexpr int kSide = kExponents * kStride + 208;               // tables 4 KiB apart would delay each other's loads
constexpr int kSubnormalRows = 23;                              // of FP32, before the row of its smallest normal number
constexpr uint32_t kMantissa = (1u << 23) - 1u;
constexpr int64_t kFull = int64_t{1} << 30;  // elements after which 32-bit counts are flushed

struct Cuts {
  uint32_t all[kCuts];
  int16_t shortened[kCuts];

  explicit Cuts(const int32_t* mantissas) {
    for (int k = 0; k < kCuts; ++k) {
      all[k] = static_cast<uint32_t>(mantissas[k]);
      shortened[k] = static_cast<int16_t>((all[k] >> 8) | ((all[k] & 0xffu) != 0u ? 1u : 0u));
    }
  }

  int cell(uint32_t mantissa) const {
    int above = 0;
    for (uint32_t cut : all) above += mantissa >= cut ? 1 : 0;
    return above;
  }
};

// What a block's values have in common: whether one is subnormal in FP32, and the ends of the exponents of those that are normal.
struct Seen {
  bool subnormal;
  int lowest, highest;
};

// Write every value's place: its exponent's bits and its cell.
//
// Plain pointers and the cuts in registers: otherwise compilers do not vectorise these loops. The second is in 16 bits, which fits
// twice as many into a register: of a mantissa's lowest eight bits, it only matters whether one is set.
Seen find_places(const float* __restrict__ x, int16_t* __restrict__ to, int64_t n, const Cuts& cuts) {
  int16_t mantissas[kBlock];
  uint32_t subnormal = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = float_to_bits(x[i]) & 0x7fffffffu;
    const uint32_t last = bits & 0xffu;
    mantissas[i] = static_cast<int16_t>(((bits >> 8) & 0x7fffu) | (last < 1u ? last : 1u));
    to[i] = static_cast<int16_t>((bits >> 19) & 0xff0u);
    subnormal |= bits <= kMantissa ? bits : 0u;
  }
  const int16_t *s = cuts.shortened, a = s[0], b = s[1], c = s[2], d = s[3], e = s[4], f = s[5], g = s[6], h = s[7];
  uint16_t lowest = 0xffffu, highest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int16_t m = mantissas[i];
    const int16_t low = static_cast<int16_t>((m >= a) + (m >= b) + (m >= c) + (m >= d));
    const uint16_t place = static_cast<uint16_t>(to[i] + low + (m >= e) + (m >= f) + (m >= g) + (m >= h));
    const uint16_t before = static_cast<uint16_t>(place - kStride);  // exponent 0 goes to the top, where it is never the lowest
    lowest = before < lowest ? before : lowest;
    highest = place > highest ? place : highest;
    to[i] = static_cast<int16_t>(place);
  }
  return {subnormal != 0u, lowest / kStride + 1, highest / kStride};
}

// What one thread has counted of its current tensor.
struct Counts {
  uint32_t sides[kSideBySide][kSide] = {};
  int64_t tensor = -1, elements = 0;
  int lowest = kExponents, highest = 0;

  void add(const float* x, int64_t n, int64_t* table, const Cuts& cuts, std::mutex& tables_lock) {
    int16_t places[kBlock];
    const Seen seen = find_places(x, places, n, cuts);
    int64_t i = 0;
    for (; i + kSideBySide <= n; i += kSideBySide)
      for (int side = 0; side < kSideBySide; ++side) ++sides[side][places[i + side]];
    for (; i < n; ++i) ++sides[0][places[i]];
    if (seen.subnormal) add_subnormal(x, n, table, cuts, tables_lock);
    lowest = std::min(lowest, seen.lowest);
    highest = std::max(highest, seen.highest);
    elements += n;
  }

  void flush(int64_t* const* tables, std::mutex& tables_lock) {
    if (elements == 0) return;
    const std::lock_guard<std::mutex> guard(tables_lock);
    int64_t* table = tables[tensor];
    for (auto& side : sides) {
      table[0] += side[0];  // the other cells of exponent 0 are subnormal numbers, which have been added
      std::memset(side, 0, kStride * sizeof(uint32_t));
      for (int exponent = lowest; exponent <= highest; ++exponent) {
        uint32_t* row = side + exponent * kStride;
        for (int cell = 0; cell < kCells; ++cell) table[(exponent + kSubnormalRows) * kCells + cell] += row[cell];
        std::memset(row, 0, kStride * sizeof(uint32_t));
      }
    }
    elements = 0;
    lowest = kExponents;
    highest = 0;
  }

 private:
  static void add_subnormal(const float* x, int64_t n, int64_t* table, const Cuts& cuts, std::mutex& tables_lock) {
    const std::lock_guard<std::mutex> guard(tables_lock);
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t bits = float_to_bits(x[i]) & 0x7fffffffu;
      if (bits == 0u || bits > kMantissa) continue;
      const uint32_t normal = float_to_bits(static_cast<float>(bits));  // the same digits, 149 powers of two above
      ++table[((normal >> 23) - 126u) * kCells + cuts.cell(normal & kMantissa)];
    }
  }
};

}  // namespace

extern "C" void mezzo_exponents(int64_t count, const void* const* tensors, int64_t* const* tables, const int64_t* sizes,
                                const int64_t* dtypes, const int32_t* mantissas, int64_t threads) {
  const Cuts cuts(mantissas);
  std::mutex tables_lock;
  std::vector<Counts> parts(static_cast<size_t>(std::max<int64_t>(1, threads)));
  for_blocks(count, sizes, threads, [&](int64_t part, int64_t t, int64_t at, int64_t n) {
    float space[kBlock];
    Counts& own = parts[static_cast<size_t>(part)];
    if (own.tensor != t || own.elements > kFull) own.flush(tables, tables_lock);
    own.tensor = t;
    own.add(load(tensors[t], dtypes[t], at, n, space), n, tables[t], cuts, tables_lock);
  });
  for (Counts& own : parts) own.flush(tables, tables_lock);
}
