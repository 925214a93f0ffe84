// What the kernels compute, for callers in C++. Matrices are channel-major: all outputs of one input channel are one row,
// so that a skipped channel is a skipped contiguous run. docs/architecture.md describes the arithmetic.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <vector>

namespace edgexpert {

// Where the matrices of a Weights lie: of each expert, or of each tile, its values [channels, row bytes], its float16 scales and
// its zeros [channels / group, padded]; null where there are none. Whoever loads experts may change it between calls.
struct Places {
  std::vector<const std::uint8_t*> values;
  std::vector<const std::uint16_t*> scales;
  std::vector<const std::uint8_t*> zeros;
};

// E matrices of one shape, each [channels, outputs]; a single linear layer is E = 1. Rows are padded to `padded` outputs, a
// multiple of 32. bits 4: byte j of a row holds outputs 2j (low nibble) and 2j + 1; the weight is (q - zero) * scale, and zero
// is 8 where `zeros` is null. bits 8: int8, q * scale. bits 16: bfloat16, no scales.
struct Weights {
  std::shared_ptr<Places> places;
  std::int64_t channels = 0, outputs = 0, padded = 0;
  int bits = 4;
  std::int64_t group = 32;  // channels that share a row of scales
  // A wide matrix lies in tiles of `padded` outputs each, so that threads have rows of their own to read; experts have no tiles.
  std::int64_t tiles = 1;

  std::int64_t count() const { return tiles > 1 ? 1 : static_cast<std::int64_t>(places->values.size()); }
  std::int64_t row_bytes() const { return padded * bits / 8; }
};

// The (token, expert) pairs of a layer, grouped by expert in ascending order: expert `experts[u]` owns the pairs from
// `offsets[u]` up to `offsets[u + 1]`, and pair p belongs to token `tokens[p]`.
struct Pairs {
  std::int64_t loaded = 0;  // number of experts
  const std::int64_t* experts = nullptr;
  const std::int64_t* offsets = nullptr;  // [loaded + 1]
  const std::int64_t* tokens = nullptr;   // [pairs]

  std::int64_t count() const { return loaded ? offsets[loaded] : 0; }
};

// Which input channels are read, and which of them a pair computes on; null means all.
struct Selection {
  const bool* loaded = nullptr;   // [E, channels], by expert id
  const bool* compute = nullptr;  // [pairs, channels]
};

enum class Activation : int { silu, gelu, gelu_tanh, relu, identity };

// A linear layer, and where its outputs [rows, outputs] go: x [rows, channels] times the matrix, plus bias [outputs] unless null.
struct Linear {
  const Weights& weights;
  const float* bias;
  float* out;
};

// Several linear layers of the same x at once, so that they share its quantisation and threads wait for each other but once. Of the
// matrix `next`, to be multiplied after them, threads that are done ask for the first rows.
void linear(std::initializer_list<Linear> layers, const float* x, std::int64_t rows, const Weights* next = nullptr);

// out [pairs, width] = act(gate) * up of every pair, for x [tokens, channels]. Gated: w.outputs = 2 * width, gate first;
// otherwise act(y) with w.outputs = width. bias is [E, w.outputs] or null. `next` as in linear.
void gate_up(const Weights& w, const float* x, std::int64_t tokens, const Pairs& pairs, const Selection& selection,
             const float* bias, Activation activation, bool gated, float* out, const Weights* next = nullptr);

// out [tokens, outputs] = for each token the sum over its pairs, in ascending order of expert, of
// weights[p] * (x[p] times the expert's matrix + bias), for x [pairs, channels].
void down(const Weights& w, const float* x, std::int64_t tokens, const Pairs& pairs, const Selection& selection,
          const float* bias, const float* weights, float* out);

// Counts the bytes of expert weights that products touch: rows of values, and rows of scales and zeros. For tests.
void count_bytes(bool on);
std::int64_t bytes_counted();  // since it was switched on

}  // namespace edgexpert
