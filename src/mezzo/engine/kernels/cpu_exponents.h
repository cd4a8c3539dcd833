// Counts by exponent, in the cells that exponents.py defines: tensors by tables of addresses, each into a table of its own or a shared one.
//
// A block's cells are found by comparisons, which compilers turn into vector instructions; then they are counted one by one. Values lie
// close together, and adding to a number just stored waits for the store: neighbours are counted in four tables side by side.

#pragma once

#include <mutex>

#include "cpu_blocks.h"
#include "cpu_formats.h"

namespace {

constexpr int kCuts = 8, kCells = kCuts + 1, kBins = 279 * kCells;
constexpr int kSideBySide = 4;
constexpr int64_t kFull = int64_t{1} << 30;  // elements after which 32-bit counts are handed over

// Two loops with plain pointers and the cuts in registers: else compilers do not turn them into vector instructions. The second is
// in 16 bits, where a register holds twice as many: a mantissa's lowest eight bits only matter as zero or not.
void find_cells(const float* __restrict__ x, int16_t* __restrict__ to, int64_t n, const int32_t* __restrict__ cuts) {
  int16_t mantissas[kBlock];
  for (int64_t i = 0; i < n; ++i) {
    const int32_t plain = static_cast<int32_t>(float_to_bits(x[i]) & 0x7fffffffu);
    // FP32's subnormals are made normal by a shift of 24 places, which their row takes out again; zero ends below row 0.
    const int32_t raised = static_cast<int32_t>(float_to_bits(x[i] * 0x1p24f) & 0x7fffffffu) - (24 << 23);
    const int32_t bits = plain < (1 << 23) ? raised : plain;
    const int32_t row = (bits >> 23) + 23;
    mantissas[i] = static_cast<int16_t>(((bits & 0x7fffff) >> 8) | ((bits & 0xff) != 0));
    to[i] = static_cast<int16_t>((row > 0 ? row : 0) * kCells);
  }
  int16_t c[kCuts];
  for (int k = 0; k < kCuts; ++k) c[k] = static_cast<int16_t>((cuts[k] >> 8) | ((cuts[k] & 0xff) != 0));
  const int16_t c0 = c[0], c1 = c[1], c2 = c[2], c3 = c[3], c4 = c[4], c5 = c[5], c6 = c[6], c7 = c[7];
  for (int64_t i = 0; i < n; ++i) {
    const int16_t m = mantissas[i];
    const int16_t low = static_cast<int16_t>((m >= c0) + (m >= c1) + (m >= c2) + (m >= c3));
    to[i] = static_cast<int16_t>(to[i] + low + (m >= c4) + (m >= c5) + (m >= c6) + (m >= c7));
  }
}

// What one thread has counted of the tensor that it is at.
struct Counts {
  uint32_t sides[kSideBySide][kBins] = {};
  int64_t tensor = -1, elements = 0;

  void hand_over(int64_t* const* tables, std::mutex& others) {
    if (elements > 0) {
      const std::lock_guard<std::mutex> alone(others);
      for (int bin = 0; bin < kBins; ++bin) {
        int64_t sum = 0;
        for (int side = 0; side < kSideBySide; ++side) sum += sides[side][bin];
        tables[tensor][bin] += sum;
      }
      std::memset(sides, 0, sizeof sides);
    }
    elements = 0;
  }
};

}  // namespace

extern "C" void mezzo_exponents(int64_t count, const void* const* tensors, int64_t* const* tables, const int64_t* sizes,
                                const int64_t* dtypes, const int32_t* cuts, int64_t threads) {
  std::mutex others;
  std::vector<Counts> parts(static_cast<size_t>(std::max<int64_t>(1, threads)));
  int32_t fixed[kCuts];
  std::copy(cuts, cuts + kCuts, fixed);
  for_blocks(count, sizes, threads, [&](int64_t part, int64_t t, int64_t at, int64_t n) {
    float space[kBlock];
    int16_t cells[kBlock];
    find_cells(load(tensors[t], dtypes[t], at, n, space), cells, n, fixed);
    if (sizes[t] <= kBlock) {  // a small tensor costs less than handing its tables over
      const std::lock_guard<std::mutex> alone(others);
      for (int64_t i = 0; i < n; ++i) ++tables[t][cells[i]];
      return;
    }
    Counts& own = parts[static_cast<size_t>(part)];
    if (own.tensor != t || own.elements > kFull) own.hand_over(tables, others);
    own.tensor = t;
    own.elements += n;
    int64_t i = 0;
    for (; i + kSideBySide <= n; i += kSideBySide)
      for (int side = 0; side < kSideBySide; ++side) ++own.sides[side][cells[i + side]];
    for (; i < n; ++i) ++own.sides[0][cells[i]];
  });
  for (Counts& own : parts) own.hand_over(tables, others);
}
