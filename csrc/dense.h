// Float kernels around the weights: RMSNorm, the router's linear layer, attention over a token tree.
//
// Sums have an order of their own whatever the instruction set, and run over the keys that a token sees in ascending order: its
// result depends neither on what else is in the call nor on where in the cache its keys are.
#pragma once

#include <cstdint>

namespace edgexpert {

// Softmax attention. Strides count floats; the last dimension of each array is contiguous.
struct Attention {
  const float *query, *key, *value;  // [heads, tokens, dim], [kv_heads, keys, dim], [kv_heads, keys, value_dim]
  std::int64_t query_head, query_token, key_head, key_token, value_head, value_token;
  const bool* mask;  // [tokens, keys], or null for a text whose last token is the last key
  float* out;        // [tokens, heads, value_dim]
  std::int64_t heads, kv_heads, tokens, keys, dim, value_dim;
  float scale;
};

// out [rows, n] = x / rms(x) * weight
void rms_norm(const float* x, const float* weight, float* out, std::int64_t rows, std::int64_t n, float eps);
// out [rows, outputs] = x [rows, n] times weight [outputs, n] transposed
void float_linear(const float* x, const float* weight, float* out, std::int64_t rows, std::int64_t n, std::int64_t outputs);
void attention(const Attention& a);

}  // namespace edgexpert
