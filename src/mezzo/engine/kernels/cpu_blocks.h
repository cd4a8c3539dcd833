// Tensors in blocks that fit the first-level cache, divided among threads.

#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kBlock = 1024;  // elements: five FP32 blocks of 4 KiB fit a first-level cache of 32 KiB

constexpr int64_t kBlocksWorthAThread = 256;  // a thread takes some 20 us to start

// Call `work(tensor, at, n)` for every block of every tensor, in `threads` parts of equal numbers of blocks.
template <typename Work>
void for_blocks(int64_t count, const int64_t* sizes, int64_t threads, const Work& work) {
  int64_t blocks = 0;
  for (int64_t t = 0; t < count; ++t) blocks += (sizes[t] + kBlock - 1) / kBlock;
  const int64_t parts = std::max<int64_t>(1, std::min(threads, blocks / kBlocksWorthAThread));
  auto part = [&](int64_t number) {
    const int64_t begin = blocks * number / parts, end = blocks * (number + 1) / parts;
    int64_t passed = 0;
    for (int64_t t = 0; t < count && passed < end; ++t) {
      const int64_t own = (sizes[t] + kBlock - 1) / kBlock;
      for (int64_t b = std::max<int64_t>(0, begin - passed); b < own && passed + b < end; ++b)
        work(number, t, b * kBlock, std::min(kBlock, sizes[t] - b * kBlock));
      passed += own;
    }
  };
  std::vector<std::thread> others;
  for (int64_t number = 1; number < parts; ++number) others.emplace_back(part, number);
  part(0);
  for (std::thread& other : others) other.join();
}

}  // namespace
