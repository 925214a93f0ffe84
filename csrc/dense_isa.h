// The inner loops of dense.h, compiled once for each instruction set (see isa.h). Everything is in an anonymous namespace, so that
// no code of one instruction set can be linked in the place of another's.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "dense.h"

namespace edgexpert {
namespace {

constexpr int kLanes = 32;
typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));

inline Eight eight(const float* p) { return *reinterpret_cast<const Eight*>(p); }

// Four vectors of eight lanes, added in an order of its own.
inline float sum_lanes(Eight a, Eight b, Eight c, Eight d) {
  const Eight sum = (a + c) + (b + d);
  return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

float dot(const float* x, const float* y, std::int64_t n) {
  Eight a{}, b{}, c{}, d{};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    a += eight(x + i) * eight(y + i);
    b += eight(x + i + 8) * eight(y + i + 8);
    c += eight(x + i + 16) * eight(y + i + 16);
    d += eight(x + i + 24) * eight(y + i + 24);
  }
  float sum = sum_lanes(a, b, c, d);
  for (; i < n; ++i) sum += x[i] * y[i];
  return sum;
}

// e^x for x <= 0 within a few units in the last place, and 0 below -87. Without branches, so that loops over it vectorise.
inline float exp_negative(float x) {
  float y = x < -87.0f ? -87.0f : x;
  float n = static_cast<float>(static_cast<std::int32_t>(y * 1.44269504f - 0.5f));
  float r = y - n * 0.693359375f - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  float power = std::bit_cast<float>((static_cast<std::int32_t>(n) + 127) << 23);
  return p * (x < -87.0f ? 0.0f : power);
}

// Sum of e^(x - top) over n values, of which none is above top.
float exp_sum(const float* x, std::int64_t n, float top) {
  float lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    float powers[kLanes];  // in a loop of its own, which the compiler vectorises
    for (int lane = 0; lane < kLanes; ++lane) powers[lane] = exp_negative(x[i + lane] - top);
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += powers[lane];
  }
  float sum = sum_lanes(eight(lanes), eight(lanes + 8), eight(lanes + 16), eight(lanes + 24));
  for (; i < n; ++i) sum += exp_negative(x[i] - top);
  return sum;
}

void rms_norm_row(const float* x, const float* weight, float* out, std::int64_t n, float eps) {
  float scale = 1.0f / std::sqrt(dot(x, x, n) / static_cast<float>(n) + eps);
  for (std::int64_t i = 0; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

// One head of one token, which sees `count` keys; `weights` is scratch for as many floats.
void attend(const Attention& a, std::int64_t head, std::int64_t token, const std::int32_t* seen, std::int64_t count,
            float* weights) {
  std::int64_t kv_head = head / (a.heads / a.kv_heads);
  const float* query = a.query + head * a.query_head + token * a.query_token;
  const float* key = a.key + kv_head * a.key_head;
  float top = -INFINITY;
  for (std::int64_t j = 0; j < count; ++j) {
    weights[j] = dot(query, key + seen[j] * a.key_token, a.dim) * a.scale;
    top = weights[j] > top ? weights[j] : top;
  }
  for (std::int64_t j = 0; j < count; ++j) weights[j] = exp_negative(weights[j] - top);
  float total = 0;
  for (std::int64_t j = 0; j < count; ++j) total += weights[j];

  const float* value = a.value + kv_head * a.value_head;
  float* out = a.out + (token * a.heads + head) * a.value_dim;
  const float share = 1.0f / total;
  std::int64_t d = 0;
  for (; d + kLanes <= a.value_dim; d += kLanes) {
    Eight sum[4] = {};
    for (std::int64_t j = 0; j < count; ++j) {
      const float* row = value + seen[j] * a.value_token + d;
      for (int k = 0; k < 4; ++k) sum[k] += weights[j] * eight(row + 8 * k);
    }
    for (int k = 0; k < 4; ++k) *reinterpret_cast<Eight*>(out + d + 8 * k) = sum[k] * share;
  }
  for (; d < a.value_dim; ++d) {
    float sum = 0;
    for (std::int64_t j = 0; j < count; ++j) sum += weights[j] * value[seen[j] * a.value_token + d];
    out[d] = sum * share;
  }
}

}  // namespace
}  // namespace edgexpert
