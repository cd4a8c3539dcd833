// One pass over everything an optimizer's update touches, for CPUs. Plain C++ without torch's headers: it compiles in seconds.
//
// A tensor is worked through in blocks that stay in the first-level cache: 16-bit gradients are widened into a block of FP32, the
// update runs on it in FP32, and the new weights are rounded back. So every byte of gradient, master and moments is read once and
// written once, and nothing else moves. All tensors of a group go in one call, by tables of addresses.
//
// `factor` unscales, averages and clips a gradient in one multiplication; if `found_inf` is above 0, nothing changes.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "cpu_block_formats.h"
#include "cpu_blocks.h"
#include "cpu_exponents.h"
#include "cpu_fingerprints.h"
#include "cpu_formats.h"
#include "cpu_mirror.h"
#include "cpu_sums.h"

namespace {

constexpr int kLanes = 16;  // parallel sums: with fewer, each addition waits for the one before

// A block of a tensor as FP32: its own memory where it is FP32, else `space`.
struct Master {
  float space[kBlock];
  float* values;

  float* read(void* weight, void* master, int64_t dtype, int64_t at, int64_t n) {
    if (dtype == kSplit) {
      join(static_cast<uint16_t*>(weight) + at, static_cast<uint16_t*>(master) + at, space, n);
      return values = space;
    }
    if (dtype >= kFloat16NoMaster) {
      load(weight, dtype == kFloat16NoMaster ? kFloat16 : kBFloat16, at, n, space);
      return values = space;
    }
    return values = static_cast<float*>(dtype == kFloat32 ? weight : master) + at;
  }

  void write(void* weight, void* master, int64_t dtype, int64_t at, int64_t n, uint32_t seed) {
    if (dtype == kSplit) {
      split(values, static_cast<uint16_t*>(weight) + at, static_cast<uint16_t*>(master) + at, n);
    } else if (dtype == kBFloat16Stochastic) {
      uint32_t bits16[kBlock];
      noise(seed, kForWeight, at, n, bits16);
      narrow_bfloat16_by(bits16, values, static_cast<uint16_t*>(weight) + at, n);
    } else {
      store_weights(values, weight, dtype >= kFloat16NoMaster ? dtype - kNoMaster : dtype, at, n);
    }
  }
};

template <bool kSigned>
struct Moment {
  float space[kBlock];

  float* read(void* base, int64_t dtype, int64_t at, int64_t n, int64_t size) {
    if (dtype == kFloat32) return static_cast<float*>(base) + at;
    if (dtype == kPacked) {
      const uint8_t* codes = static_cast<uint8_t*>(base);
      unpack<kSigned>(codes + at, codes + size + at / kPackedBlock, space, n);
    } else {
      load(base, dtype, at, n, space);
    }
    return space;
  }

  void write(void* base, int64_t dtype, int64_t at, int64_t n, int64_t size, uint32_t seed) {
    if (dtype == kFloat32) return;
    uint32_t bits16[kBlock];
    noise(seed, kSigned ? kForFirst : kForSecond, at, n, bits16);
    if (dtype == kPacked) {
      uint8_t* codes = static_cast<uint8_t*>(base);
      pack<kSigned>(space, bits16, codes + at, codes + size + at / kPackedBlock, n);
    } else {
      narrow_bfloat16_by(bits16, space, static_cast<uint16_t*>(base) + at, n);
    }
  }
};

struct AdamWFloats {
  float scale, decay, beta1, to_mean, beta2, to_square, step, root, eps;
};

// torch.lerp's two forms: with a small beta1 a large old mean must leave no rounding error behind.
template <bool kMostlyOld>
inline float mean_of(float old, float fresh, const AdamWFloats& c) {
  return kMostlyOld ? old + (fresh - old) * c.to_mean : fresh - (fresh - old) * c.beta1;
}

// A function of its own with plain pointers: compilers do not vectorise this loop inside a lambda.
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
    p[i] -= c.decay * p[i] + c.step * (mean / (std::sqrt(under) / c.root + c.eps));
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

// torch.optim.AdamW's update (Loshchilov & Hutter, arXiv:1711.05101), in FP32; the weight is rounded once per update, in torch twice.
// `steps` counts every tensor's own updates: bias corrections are right for parameters that join later or miss a gradient.
void mezzo_adamw(int64_t count, void* const* weights, const void* const* gradients, void* const* masters, void* const* means,
                 void* const* squares, void* const* largest, float* const* steps, const int64_t* sizes,
                 const int64_t* weight_dtypes, const int64_t* gradient_dtypes, const int64_t* moment_dtypes, const int64_t* numbers,
                 const AdamW* settings, const float* factor, const float* found_inf, int64_t threads) {
  if (*found_inf > 0.0f) return;
  const AdamW s = *settings;
  const bool mostly_old = 1.0 - s.beta1 < 0.5;
  const auto block = s.amsgrad ? (mostly_old ? adamw_block<true, true> : adamw_block<true, false>)
                               : (mostly_old ? adamw_block<false, true> : adamw_block<false, false>);
  std::vector<AdamWFloats> constants(static_cast<size_t>(count));
  for (int64_t t = 0; t < count; ++t) {
    const double step = *steps[t] += 1.0f;
    constants[static_cast<size_t>(t)] = {s.maximize ? -*factor : *factor,
                                         static_cast<float>(s.lr * s.weight_decay),
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
    Moment<true> mean;
    Moment<false> square, top;
    const AdamWFloats c = constants[static_cast<size_t>(t)];
    const int64_t kind = moment_dtypes[t], size = sizes[t];
    const uint32_t seed = seed_of(numbers[t], *steps[t]);
    const float* g = load(gradients[t], gradient_dtypes[t], at, n, space);
    float* p = master.read(weights[t], masters[t], weight_dtypes[t], at, n);
    float* m = mean.read(means[t], kind, at, n, size);
    float* v = square.read(squares[t], kind, at, n, size);
    block(g, p, m, v, s.amsgrad ? top.read(largest[t], kind, at, n, size) : v, n, c);
    mean.write(means[t], kind, at, n, size, seed);
    square.write(squares[t], kind, at, n, size, seed);
    if (s.amsgrad) top.write(largest[t], kind, at, n, size, seed);
    master.write(weights[t], masters[t], weight_dtypes[t], at, n, seed);
  });
}

struct Sgd {
  double lr, momentum, dampening, weight_decay;
  int32_t nesterov, maximize;
};

// torch.optim.SGD's update, momentum after Sutskever et al. (2013) as torch defines it.
void mezzo_sgd(int64_t count, void* const* weights, const void* const* gradients, void* const* masters, void* const* buffers,
               float* const* steps, const int64_t* sizes, const int64_t* weight_dtypes, const int64_t* gradient_dtypes,
               const int64_t* moment_dtypes, const int64_t* numbers, const Sgd* settings, const float* factor, const float* found_inf,
               int64_t threads) {
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
    float* p = master.read(weights[t], masters[t], weight_dtypes[t], at, n);
    const uint32_t seed = seed_of(numbers[t], *steps[t]);
    if (s.momentum == 0.0) {
      sgd_block(g, p, n, scale, lr, decay);
    } else {
      Moment<true> buffer;
      float* b = buffer.read(buffers[t], moment_dtypes[t], at, n, sizes[t]);
      const bool begins = first[static_cast<size_t>(t)] != 0;
      momentum_block(g, p, b, n, {scale, lr, decay, momentum, begins ? 0.0f : momentum, begins ? 1.0f : fresh, s.nesterov});
      buffer.write(buffers[t], moment_dtypes[t], at, n, sizes[t], seed);
    }
    master.write(weights[t], masters[t], weight_dtypes[t], at, n, seed);
  });
}

}  // extern "C"
