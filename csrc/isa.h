// What each instruction set provides. An isa_*.cpp compiles matmul.h with its own compiler flags; nothing here is inline, so that
// no code of one instruction set can be linked in the place of another's.
#pragma once

#include <cstdint>

#include "dense.h"
#include "kernels.h"

namespace edgexpert {

// The groups of a matrix are summed in this many runs of channels, and the runs added in their order: threads can share the reading of a
// matrix, each some whole rows of it, and the sums are the same as with one.
constexpr std::int64_t kParts = 4;
constexpr std::int64_t kColumns = 128;    // columns are split at multiples of this (a cache line of 4-bit weights)
constexpr std::int64_t kRows = 64;        // most rows that share one unpacking of the weights
constexpr std::int64_t kAccumulators = 8192;  // most floats that are summed at once

constexpr std::int32_t kBins = 512;       // into which values are sorted to find the least of the largest

// A product of some rows of activations with columns [begin, end) of one matrix.
struct Product {
  const std::uint8_t* values;
  const std::uint16_t* scales;
  const std::uint8_t* zeros;
  std::int64_t padded, outputs, group;  // group: at most this many channels share a row of scales
  int bits;
  std::int64_t groups;
  const std::int32_t* channels;  // rows of `values` to read, in quads of one group each
  const std::int32_t* quads;     // [groups + 1]: group g has the quads from quads[g] up to quads[g + 1]
  std::int64_t rows;
  const void* const* x;              // [rows] int8 (float for 16 bits) activations in the order of `channels`
  const std::int32_t* const* sums;   // [rows] sums of x, by group
  const float* x_scales;             // [rows] or null for 1
  const float* bias;                 // [outputs] or null
  float* out;                        // [rows, out_stride]
  std::int64_t out_stride;
  std::int64_t begin, end;  // multiples of 128, or the end of the row
  std::int64_t first_part, last_part;  // of kParts: the product of their channels alone
  const Product* after;     // what this thread will probably compute next, null for nothing: its first rows are fetched ahead
  std::uint8_t* scratch;    // scratch_bytes(group, groups), aligned to 64

  std::int64_t first_group(std::int64_t part) const { return part * groups / kParts; }
};

// Consecutive tokens that attend together, and the keys that they see.
struct TokenBlock {
  std::int64_t token, tokens;   // the first, and how many
  std::int64_t begin, end;      // all of them see the keys [begin, end)
  const std::int32_t* others;   // the other keys that any of them sees, in ascending order
  std::int64_t before, after;   // how many of those are before `begin`, and from `end` on
  const std::int32_t* seen;     // which of the others a token sees, in ascending order, one token after another
  const std::int64_t* starts;   // [2 * tokens + 1]: token t sees those before `begin` from starts[2t], the rest from starts[2t + 1]
  std::int64_t stride;          // floats in a row of weights: the number of keys and 8 at least
};

struct Isa {
  const char* name;
  void (*product)(const Product&);
  // out [n] = the kParts sums, `stride` apart, added and scaled, plus bias unless null: what product() does with all parts.
  void (*join)(const float* sums, std::int64_t stride, std::int64_t n, float scale, const float* bias, float* out);
  // q = round_half_even(x * 127 / max|x|) of n values; returns the scale max|x| / 127.
  float (*quantise)(const float* x, std::int64_t n, std::int8_t* q);
  // y [width or 2 * width] -> out [width]
  void (*activate)(Activation activation, bool gated, const float* y, std::int64_t width, float* out);
  // out[i] += weight * y[i]
  void (*add_scaled)(float weight, const float* y, std::int64_t n, float* out);
  // Reads n bytes (a multiple of 256) at the speed of memory: the yardstick of benchmarks/native_kernels.py.
  std::uint64_t (*read)(const std::uint8_t* bytes, std::int64_t n);
  // Multiply-adds of int8 in registers alone, for `rounds` rounds; returns how many were done.
  std::int64_t (*peak)(std::int64_t rounds);
  // The inner loops of dense.h.
  void (*rms_norm)(const float* x, const float* weight, float* out, std::int64_t n, float eps);
  void (*float_product)(const float* x, const float* weight, float* out, std::int64_t rows, std::int64_t n, std::int64_t outputs,
                        std::int64_t begin, std::int64_t end);  // outputs [begin, end) of float_linear
  void (*attend)(const Attention& a, const TokenBlock& block, std::int64_t kv_head, float* scratch);
  float (*exp_sum)(const float* x, std::int64_t n, float top);
  // The inner loops of select.h.
  float (*weigh)(const float* x, float weight, std::int64_t n, float* out);
  void (*sort_into_bins)(const float* values, std::int64_t n, float largest, std::uint16_t* bins);
  std::int64_t (*values_of_bin)(const float* values, const std::uint16_t* bins, std::int64_t n, std::uint16_t bin, float* out);
  void (*mark)(const float* values, float least, std::int64_t n, bool* marked);
  void (*add_scores)(const float* x, float weight, const bool* needed, std::int64_t n, float* all, float* salient);
  void (*load_salient)(const float* all, const float* salient, float ratio, std::int64_t n, bool* loaded);
  // What is read and multiplied of a selection.
  void (*list_channels)(const bool* loaded, std::int64_t n, std::int64_t block, std::int32_t* channels, std::int32_t* quads);
  void (*pack_channels)(const std::int8_t* x, const bool* loaded, const bool* compute, std::int64_t n, std::int64_t block,
                        std::int8_t* packed, std::int32_t* sums);
};

inline constexpr std::int64_t scratch_bytes(std::int64_t group, std::int64_t groups) {
  return 2 * kAccumulators * 4 + group * (kColumns + 64 + 3 * 8) + groups * 32 * (32 + 4) + 4096;
}

// Rows of floats that stay in a level-1 cache, or in half of it, while others come by; a multiple of 8.
inline constexpr std::int64_t cached_rows(std::int64_t floats) { return floats < 512 ? 4096 / floats / 8 * 8 : 8; }

extern const Isa isa_portable;
#ifdef EDGEXPERT_AVX2
extern const Isa isa_avx2;
#endif
#ifdef EDGEXPERT_AVX512
extern const Isa isa_avx512;
#endif
#ifdef EDGEXPERT_NEON
extern const Isa isa_neon;
#endif

// The instruction set in use.
const Isa& isa();
// "auto", "avx512", "avx2", "neon" or "portable"; false where this build or CPU lacks it.
bool select_isa(const char* name);
bool has_isa(const char* name);

}  // namespace edgexpert
