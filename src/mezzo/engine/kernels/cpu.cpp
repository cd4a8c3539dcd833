// One pass over everything an optimizer's update touches, for CPUs. Plain C++ without torch's headers: it compiles in seconds.
//
// A tensor is worked through in blocks that stay in the first-level cache: 16-bit gradients are widened into a block of FP32, the
// update runs on it in FP32, and the new weights are rounded back. So every byte of gradient, master and moments is read once and
// written once, and nothing else moves. All tensors of a group go in one call, by tables of addresses.
//
// `factor` takes scale, accumulation weights and clipping out of a gradient at once; `found_inf` above 0 leaves everything as it is.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kBlock = 1024;  // elements: five FP32 blocks of 4 KiB fit a first-level cache of 32 KiB

constexpr int kLanes = 16;  // sums side by side: with fewer, each addition waits for the one before

constexpr int64_t kBlocksWorthAThread = 256;  // a thread takes some 20 us to start

// What a weight is: FP32, 16 bits beside an FP32 master, BF16 beside its low bits, or 16 bits alone.
enum Dtype : int64_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kSplit = 3, kFloat16Alone = 4, kBFloat16Alone = 5 };
constexpr int64_t kAlone = 3;  // between a format and the same alone

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

// A split master: the upper 16 bits are the model's BF16 weight (truncated towards the stored low bits), the lower 16 lie beside it.
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

struct Master {
  float space[kBlock];
  float* values;

  float* open(void* weight, void* master, int64_t dtype, int64_t at, int64_t n) {
    if (dtype == kSplit) {
      join(static_cast<uint16_t*>(weight) + at, static_cast<uint16_t*>(master) + at, space, n);
      return values = space;
    }
    if (dtype >= kFloat16Alone) {
      load(weight, dtype - kAlone, at, n, space);
      return values = space;
    }
    return values = static_cast<float*>(dtype == kFloat32 ? weight : master) + at;
  }

  void close(void* weight, void* master, int64_t dtype, int64_t at, int64_t n) {
    if (dtype == kSplit) {
      split(values, static_cast<uint16_t*>(weight) + at, static_cast<uint16_t*>(master) + at, n);
    } else {
      store_weights(values, weight, dtype >= kFloat16Alone ? dtype - kAlone : dtype, at, n);
    }
  }
};

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

struct AdamWFloats {
  float scale, keep, beta1, to_mean, beta2, to_square, step, root, eps;
};

// torch.lerp's two forms: with a small beta1 a large old mean must leave no rounding error behind.
template <bool kMostlyOld>
inline float mean_of(float old, float fresh, const AdamWFloats& c) {
  return kMostlyOld ? old + (fresh - old) * c.to_mean : fresh - (fresh - old) * c.beta1;
}

// A function of its own with plain pointers: inside a lambda compilers do not turn this loop into vector instructions.
template <bool kAmsgrad, bool kMostlyOld>
void adamw_block(const float* __restrict__ g, float* __restrict__ p, float* __restrict__ m, float* __restrict__ v,
                 float* __restrict__ top, int64_t n, const AdamWFloats c) {
  for (int64_t i = 0; i < n; ++i) {
    const float gradient = g[i] * c.scale;
    const float mean = mean_of<kMostlyOld>(m[i], gradient, c);
    const float square = v[i] * c.beta2 + c.to_square * gradient * gradient;
    float under = square;
    if (kAmsgrad) top[i] = under = square > top[i] ? square : top[i];
    m[i] = mean;
    v[i] = square;
    p[i] = p[i] * c.keep - c.step * (mean / (std::sqrt(under) / c.root + c.eps));
  }
}

void sgd_block(const float* __restrict__ g, float* __restrict__ p, int64_t n, float scale, float lr, float decay) {
  for (int64_t i = 0; i < n; ++i) p[i] -= lr * (g[i] * scale + decay * p[i]);
}

struct MomentumFloats {
  float scale, lr, decay, momentum, old, fresh;
  int32_t nesterov;
};

void momentum_block(const float* __restrict__ g, float* __restrict__ p, float* __restrict__ b, int64_t n, const MomentumFloats c) {
  const float ahead = c.nesterov ? 1.0f : 0.0f, along = c.nesterov ? c.momentum : 1.0f;
  for (int64_t i = 0; i < n; ++i) {
    const float gradient = g[i] * c.scale + c.decay * p[i];
    const float buffer = c.old * b[i] + c.fresh * gradient;
    b[i] = buffer;
    p[i] -= c.lr * (ahead * gradient + along * buffer);
  }
}

}  // namespace

extern "C" {

// The sum of all squares, in FP64: it cannot overflow for finite gradients, and is not finite exactly when one of them is not.
double mezzo_sum_of_squares(int64_t count, const void* const* gradients, const int64_t* sizes, const int64_t* dtypes,
                            int64_t threads) {
  std::vector<double> totals(static_cast<size_t>(std::max<int64_t>(1, threads)) * 8);  // a cache line each
  for_blocks(count, sizes, threads, [&](int64_t part, int64_t t, int64_t at, int64_t n) {
    float space[kBlock];
    const float* g = load(gradients[t], dtypes[t], at, n, space);
    double lanes[kLanes] = {0};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
      for (int k = 0; k < kLanes; ++k) lanes[k] += static_cast<double>(g[i + k]) * g[i + k];
    for (; i < n; ++i) lanes[0] += static_cast<double>(g[i]) * g[i];
    for (double lane : lanes) totals[static_cast<size_t>(part) * 8] += lane;
  });
  double total = 0.0;
  for (size_t part = 0; part < totals.size(); part += 8) total += totals[part];
  return total;
}

struct AdamW {
  double lr, beta1, beta2, eps, weight_decay;
  int32_t maximize, amsgrad;
};

// torch.optim.AdamW's update (Loshchilov & Hutter, arXiv:1711.05101), in FP32 in torch's order of operations. `steps` counts every
// tensor's own updates: bias corrections are right for parameters that join later or miss a gradient.
void mezzo_adamw(int64_t count, void* const* weights, const void* const* gradients, void* const* masters, float* const* means,
                 float* const* squares, float* const* largest, float* const* steps, const int64_t* sizes,
                 const int64_t* weight_dtypes, const int64_t* gradient_dtypes, const AdamW* settings, const float* factor,
                 const float* found_inf, int64_t threads) {
  if (*found_inf > 0.0f) return;
  const AdamW s = *settings;
  const bool mostly_old = 1.0 - s.beta1 < 0.5;
  const auto block = s.amsgrad ? (mostly_old ? adamw_block<true, true> : adamw_block<true, false>)
                               : (mostly_old ? adamw_block<false, true> : adamw_block<false, false>);
  std::vector<AdamWFloats> constants(static_cast<size_t>(count));
  for (int64_t t = 0; t < count; ++t) {
    const double step = *steps[t] += 1.0f;
    constants[static_cast<size_t>(t)] = {s.maximize ? -*factor : *factor,
                                         static_cast<float>(1.0 - s.lr * s.weight_decay),
                                         static_cast<float>(s.beta1),
                                         static_cast<float>(1.0 - s.beta1),
                                         static_cast<float>(s.beta2),
                                         static_cast<float>(1.0 - s.beta2),
                                         static_cast<float>(s.lr / (1.0 - std::pow(s.beta1, step))),
                                         static_cast<float>(std::sqrt(1.0 - std::pow(s.beta2, step))),
                                         static_cast<float>(s.eps)};
  }
  for_blocks(count, sizes, threads, [&](int64_t, int64_t t, int64_t at, int64_t n) {
    float space[kBlock];
    Master master;
    const AdamWFloats c = constants[static_cast<size_t>(t)];
    const float* g = load(gradients[t], gradient_dtypes[t], at, n, space);
    float* p = master.open(weights[t], masters[t], weight_dtypes[t], at, n);
    block(g, p, means[t] + at, squares[t] + at, largest[t] + at, n, c);
    master.close(weights[t], masters[t], weight_dtypes[t], at, n);
  });
}

struct Sgd {
  double lr, momentum, dampening, weight_decay;
  int32_t nesterov, maximize;
};

// torch.optim.SGD's update, momentum after Sutskever et al. (2013) as torch defines it.
void mezzo_sgd(int64_t count, void* const* weights, const void* const* gradients, void* const* masters, float* const* buffers,
               float* const* steps, const int64_t* sizes, const int64_t* weight_dtypes, const int64_t* gradient_dtypes, const Sgd* settings,
               const float* factor, const float* found_inf, int64_t threads) {
  if (*found_inf > 0.0f) return;
  const Sgd s = *settings;
  const float scale = s.maximize ? -*factor : *factor;
  const float lr = static_cast<float>(s.lr), decay = static_cast<float>(s.weight_decay);
  const float momentum = static_cast<float>(s.momentum), fresh = static_cast<float>(1.0 - s.dampening);
  std::vector<char> first(static_cast<size_t>(count));  // the first buffer is the gradient itself
  for (int64_t t = 0; t < count; ++t) first[static_cast<size_t>(t)] = (*steps[t] += 1.0f) == 1.0f;
  for_blocks(count, sizes, threads, [&](int64_t, int64_t t, int64_t at, int64_t n) {
    float space[kBlock];
    Master master;
    const float* g = load(gradients[t], gradient_dtypes[t], at, n, space);
    float* p = master.open(weights[t], masters[t], weight_dtypes[t], at, n);
    if (s.momentum == 0.0) {
      sgd_block(g, p, n, scale, lr, decay);
    } else if (first[static_cast<size_t>(t)]) {
      momentum_block(g, p, buffers[t] + at, n, {scale, lr, decay, momentum, 0.0f, 1.0f, s.nesterov});
    } else {
      momentum_block(g, p, buffers[t] + at, n, {scale, lr, decay, momentum, momentum, fresh, s.nesterov});
    }
    master.close(weights[t], masters[t], weight_dtypes[t], at, n);
  });
}

}  // extern "C"
