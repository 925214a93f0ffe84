// The inner loops of dense.h, compiled once for each instruction set (see isa.h). Everything is in an anonymous namespace, so that
// no code of one instruction set can be linked in the place of another's.
//
// Every sum has an order of its own, which neither the number of rows that are computed together nor the instruction set changes.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "eight.h"
#include "isa.h"

namespace edgexpert {
namespace {

inline std::int64_t least(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

// Keys and values come from memory row by row, which a processor takes for many short runs and would not read ahead.
inline void prefetch(const float* row, std::int64_t n) {
  for (std::int64_t i = 0; i < n; i += 16) __builtin_prefetch(row + i);
}

// Dot products of Q rows x with 8 / Q rows y, side by side: lane i of a sum has the elements i, i + 8, i + 16 and so on.
template <int Q>
inline __attribute__((always_inline)) Eight dots(const float* const* x, const float* const* y, std::int64_t n) {
  constexpr int K = 8 / Q;
  Eight sums[8];
#pragma GCC unroll 8
  for (int k = 0; k < 8; ++k) sums[k] = Eight{};
  std::int64_t i = 0;
#pragma GCC unroll 1
  for (; i + 8 <= n; i += 8) {
    Eight a[Q];
#pragma GCC unroll 2
    for (int q = 0; q < Q; ++q) a[q] = eight(x[q] + i);
#pragma GCC unroll 8
    for (int k = 0; k < K; ++k) {
      const Eight b = in_register(eight(y[k] + i));
#pragma GCC unroll 2
      for (int q = 0; q < Q; ++q) sums[q * K + k] += a[q] * b;
    }
  }
  if (i < n) {
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) sums[k] += first_of(x[k / K] + i, n - i) * first_of(y[k % K] + i, n - i);
  }
  return sum_lanes(sums);
}

// use(size, at) for [begin, end) in parts of Most where that many are left, of half as many where they are not, and so on.
template <int Most, class Use>
inline __attribute__((always_inline)) void in_parts(std::int64_t begin, std::int64_t end, Use use) {
  for (; begin + Most <= end; begin += Most) use(std::integral_constant<int, Most>(), begin);
  if constexpr (Most > 1) in_parts<Most / 2>(begin, end, use);
}

void float_product(const float* x, const float* weight, float* out, std::int64_t rows, std::int64_t n, std::int64_t outputs,
                   std::int64_t begin, std::int64_t end) {
  in_parts<2>(0, rows, [=](auto count, std::int64_t row) {
    constexpr int Q = count, K = 8 / Q;
    const float *xs[Q], *ys[K];
    for (int q = 0; q < Q; ++q) xs[q] = x + (row + q) * n;
    for (std::int64_t o = begin; o < end; o += K) {
      for (int k = 0; k < K; ++k) ys[k] = weight + (o + k < end ? o + k : end - 1) * n;
      const Eight sums = dots<Q>(xs, ys, n);
      for (int q = 0; q < Q; ++q)
        for (int k = 0; k < K && o + k < end; ++k) out[(row + q) * outputs + o + k] = sums[q * K + k];
    }
  });
}

void rms_norm_row(const float* x, const float* weight, float* out, std::int64_t n, float eps) {
  constexpr std::int64_t lanes = 32;
  Eight sums[4] = {};
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes)
    for (int k = 0; k < 4; ++k) sums[k] += eight(x + i + 8 * k) * eight(x + i + 8 * k);
  float sum = sum_lanes((sums[0] + sums[2]) + (sums[1] + sums[3]));
  for (; i < n; ++i) sum += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(n) + eps);
  for (i = 0; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

// Sum of e^(x - top) over n values, of which none is above top.
float exp_sum(const float* x, std::int64_t n, float top) {
  Eight sum{};
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) sum += exp_negative(eight(x + i) - top);
  Eight rest = Eight{} - INFINITY;
  std::memcpy(&rest, x + i, (n - i) * sizeof(float));
  return sum_lanes(sum + exp_negative(rest - top));
}

// Softmax in place, with room for seven scores more. Lane i of the sum has the scores i, i + 8, i + 16 and so on.
inline void softmax(float* scores, std::int64_t count) {
  for (std::int64_t i = count; i % 8; ++i) scores[i] = -INFINITY;
  Eight highest = Eight{} - INFINITY, sum{};
  for (std::int64_t i = 0; i < count; i += 8) {
    const Eight s = eight(scores + i);
    highest = larger_of(s, highest);
  }
  float top = highest[0];
  for (int i = 1; i < 8; ++i) top = highest[i] > top ? highest[i] : top;
  for (std::int64_t i = 0; i < count; i += 8) {
    const Eight e = exp_negative(eight(scores + i) - top);
    store(scores + i, e);
    sum += e;
  }
  const float share = 1.0f / sum_lanes(sum);
  for (std::int64_t i = 0; i < count; i += 8) store(scores + i, eight(scores + i) * share);
}

// Eight rows of n floats, as columns of `out`.
inline void transpose(const float* const* rows, std::int64_t n, float* out, std::int64_t out_stride) {
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) transpose_eight(rows, i, out + i * out_stride, out_stride);
  for (; i < n; ++i)
    for (int k = 0; k < 8; ++k) out[i * out_stride + k] = rows[k][i];
}

// sums[q][n] += x[q][i] * row(i)[8n..8n + 7] for i = 0, 1 and so on.
template <int Q, int N, class Row>
inline __attribute__((always_inline)) void add_products(const float* const* x, std::int64_t count, Row row, Eight (&sums)[Q][N]) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float* y = row(i);
    for (int n = 0; n < N; ++n) {
      const Eight v = Q > 1 ? in_register(eight(y + 8 * n)) : eight(y + 8 * n);
      for (int q = 0; q < Q; ++q) sums[q][n] += x[q][i] * v;
    }
  }
}

// Which of a block's other keys a token sees.
struct Seen {
  const std::int32_t* others;
  std::int64_t count;
};

// Attention of the queries of some tokens to one head of keys and values.
struct Attending {
  const Attention& a;
  const TokenBlock& b;
  const std::int64_t kv_head, group;  // group: so many heads share the keys; query i is one of token i / group
  float* const transposed;            // keys, the same dimension of all of them side by side
  float* const weights;               // [queries, b.stride]

  std::int64_t head(std::int64_t i) const { return kv_head * group + i % group; }
  const float* query(std::int64_t i) const { return a.query + head(i) * a.query_head + (b.token + i / group) * a.query_token; }
  float* out(std::int64_t i) const { return a.out + ((b.token + i / group) * a.heads + head(i)) * a.value_dim; }
  float* row(std::int64_t i) const { return weights + i * b.stride; }
  Seen before(std::int64_t t) const { return {b.seen + b.starts[2 * t], b.starts[2 * t + 1] - b.starts[2 * t]}; }
  Seen after(std::int64_t t) const { return {b.seen + b.starts[2 * t + 1], b.starts[2 * t + 2] - b.starts[2 * t + 1]}; }

  // Scores of all queries with the keys slot(0), slot(1) and so on, into columns [at, at + count) and some beyond.
  template <class Slot>
  void score(std::int64_t at, std::int64_t count, Slot slot) const {
    const float* keys = a.key + kv_head * a.key_head;
    const std::int64_t most = cached_rows(a.dim);
    for (std::int64_t begin = 0; begin < count; begin += most) {
      const std::int64_t vectors = (least(most, count - begin) + 7) / 8;
      for (std::int64_t n = 0; n < vectors; ++n) {
        const float* rows[8];
        for (int k = 0; k < 8; ++k) {
          rows[k] = keys + slot(least(begin + 8 * n + k, count - 1)) * a.key_token;
          prefetch(keys + slot(least(begin + 8 * n + k + 16, count - 1)) * a.key_token, a.dim);
        }
        transpose(rows, a.dim, transposed + 8 * n, 8 * vectors);
      }
      multiply_transposed(at + begin, vectors);
    }
  }

  void multiply_transposed(std::int64_t at, std::int64_t vectors) const {
    in_parts<4>(0, b.tokens * group, [&](auto queries, std::int64_t i) __attribute__((always_inline)) {
      constexpr int Q = queries;
      const float* x[Q];
      for (int q = 0; q < Q; ++q) x[q] = query(i + q);
      in_parts<kSums / Q>(0, vectors, [&](auto width, std::int64_t n) __attribute__((always_inline)) {
        constexpr int N = width;
        Eight sums[Q][N] = {};
        add_products(x, a.dim, [&](std::int64_t d) { return transposed + 8 * (d * vectors + n); }, sums);
        for (int q = 0; q < Q; ++q)
          for (int m = 0; m < N; ++m) store(row(i + q) + at + 8 * (n + m), sums[q][m] * a.scale);
      });
    });
  }

  // Moves the scores of the keys that query i sees side by side; returns how many there are.
  std::int64_t keep_seen(std::int64_t i) const {
    float* scores = row(i);
    const std::int64_t common = b.end - b.begin;
    const Seen early = before(i / group), late = after(i / group);
    for (std::int64_t j = 0; j < early.count; ++j) scores[j] = scores[early.others[j]];
    if (early.count < b.before) std::memmove(scores + early.count, scores + b.before, common * sizeof(float));
    float* rest = scores + early.count + common;
    for (std::int64_t j = 0; j < late.count; ++j) rest[j] = scores[common + late.others[j]];
    return early.count + common + late.count;
  }

  // Adds the values at slot(0), slot(1) and so on to the outputs of queries [first, last); query i has their weights from
  // column at(i) on.
  template <class At, class Slot>
  void add_values(std::int64_t first, std::int64_t last, At at, std::int64_t count, Slot slot) const {
    const float* values = a.value + kv_head * a.value_head;
    in_parts<4>(first, last, [&](auto queries, std::int64_t i) __attribute__((always_inline)) {
      constexpr int Q = queries;
      const float* w[Q];
      float* to[Q];
      for (int q = 0; q < Q; ++q) {
        w[q] = row(i + q) + at(i + q);
        to[q] = out(i + q);
      }
      in_parts<kSums / Q>(0, a.value_dim / 8, [&](auto width, std::int64_t n) __attribute__((always_inline)) {
        constexpr int N = width;
        Eight sums[Q][N];
        for (int q = 0; q < Q; ++q)
          for (int m = 0; m < N; ++m) sums[q][m] = eight(to[q] + 8 * (n + m));
        add_products(w, count, [&](std::int64_t j) { return values + slot(j) * a.value_token + 8 * n; }, sums);
        for (int q = 0; q < Q; ++q)
          for (int m = 0; m < N; ++m) store(to[q] + 8 * (n + m), sums[q][m]);
      });
      for (std::int64_t d = a.value_dim / 8 * 8; d < a.value_dim; ++d)
        for (int q = 0; q < Q; ++q)
          for (std::int64_t j = 0; j < count; ++j) to[q][d] += w[q][j] * values[slot(j) * a.value_token + d];
    });
  }

  void run() const {
    const std::int64_t common = b.end - b.begin, queries = b.tokens * group;
    score(0, b.before, [&](std::int64_t j) { return b.others[j]; });
    score(b.before, common, [&](std::int64_t j) { return b.begin + j; });
    score(b.before + common, b.after, [&](std::int64_t j) { return b.others[b.before + j]; });
    for (std::int64_t i = 0; i < queries; ++i) {
      softmax(row(i), keep_seen(i));
      std::memset(out(i), 0, a.value_dim * sizeof(float));
    }
    const auto add_others = [&](std::int64_t t, std::int64_t at, Seen seen) {
      add_values(t * group, (t + 1) * group, [=](std::int64_t) { return at; }, seen.count,
                 [=, this](std::int64_t j) { return b.others[seen.others[j]]; });
    };
    for (std::int64_t t = 0; t < b.tokens; ++t) add_others(t, 0, before(t));
    const std::int64_t most = cached_rows(a.value_dim);
    for (std::int64_t j = 0; j < common; j += most) {
      for (std::int64_t k = j + most; k < least(j + 2 * most, common); ++k)
        prefetch(a.value + kv_head * a.value_head + (b.begin + k) * a.value_token, a.value_dim);
      add_values(0, queries, [=, this](std::int64_t i) { return before(i / group).count + j; }, least(most, common - j),
                 [=, this](std::int64_t k) { return b.begin + j + k; });
    }
    for (std::int64_t t = 0; t < b.tokens; ++t) add_others(t, before(t).count + common, after(t));
  }
};

void attend(const Attention& a, const TokenBlock& block, std::int64_t kv_head, float* scratch) {
  const std::int64_t transposed = cached_rows(a.dim) * a.dim;
  Attending{a, block, kv_head, a.heads / a.kv_heads, scratch, scratch + transposed}.run();
}

}  // namespace
}  // namespace edgexpert
