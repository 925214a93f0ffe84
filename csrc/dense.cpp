#include "dense.h"

#include <algorithm>
#include <vector>

#include "isa.h"
#include "pool.h"

namespace edgexpert {
namespace {

constexpr std::int64_t kSmall = 65536;  // multiply-adds that are not worth waking a thread for

// Runs body(begin, end) over [0, count) in pieces of `size`, or in one piece where the work is small.
template <class F>
void in_pieces(std::int64_t count, std::int64_t size, std::int64_t work, F&& body) {
  if (work < kSmall) return body(0, count);
  parallel_for((count + size - 1) / size,
               [&](std::int64_t piece, int) { body(piece * size, std::min(count, (piece + 1) * size)); });
}

}  // namespace

void rms_norm(const float* x, const float* weight, float* out, std::int64_t rows, std::int64_t n, float eps) {
  in_pieces(rows, 8, rows * n, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) isa().rms_norm(x + row * n, weight, out + row * n, n, eps);
  });
}

void float_linear(const float* x, const float* weight, float* out, std::int64_t rows, std::int64_t n, std::int64_t outputs) {
  in_pieces(outputs, 8, rows * n * outputs, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = 0; row < rows; ++row)
      for (std::int64_t o = begin; o < end; ++o) out[row * outputs + o] = isa().dot(x + row * n, weight + o * n, n);
  });
}

void attention(const Attention& a) {
  std::vector<std::int32_t> seen;  // the keys that each token sees, one list after another
  std::vector<std::int64_t> starts{0};
  seen.reserve(a.tokens * a.keys);
  for (std::int64_t token = 0; token < a.tokens; ++token) {
    std::int64_t end = a.mask ? a.keys : a.keys - a.tokens + token + 1;
    for (std::int64_t key = 0; key < end; ++key)
      if (!a.mask || a.mask[token * a.keys + key]) seen.push_back(static_cast<std::int32_t>(key));
    starts.push_back(static_cast<std::int64_t>(seen.size()));
  }
  std::int64_t work = static_cast<std::int64_t>(seen.size()) * a.heads * (a.dim + a.value_dim);
  // heads of one group stand side by side, token by token, so that they find their keys in the cache
  in_pieces(a.heads * a.tokens, a.tokens == 1 ? a.heads / a.kv_heads : 16, work, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> weights(a.keys);
    for (std::int64_t task = begin; task < end; ++task) {
      std::int64_t group = a.heads / a.kv_heads, token = task / group % a.tokens;
      std::int64_t head = task / (group * a.tokens) * group + task % group;
      isa().attend(a, head, token, seen.data() + starts[token], starts[token + 1] - starts[token], weights.data());
    }
  });
}

}  // namespace edgexpert
