#include "dense.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "isa.h"
#include "pool.h"

namespace edgexpert {
namespace {

constexpr std::int64_t kQueries = 32;   // so many meet the keys of a head together

struct alignas(64) CacheLine {
  float floats[16];
};

bool sees(const Attention& a, std::int64_t token, std::int64_t key) {
  return a.mask ? a.mask[token * a.keys + key] : key <= a.keys - a.tokens + token;
}

// The lists that a TokenBlock points into.
struct Sight {
  std::int64_t begin = 0, end = 0, before = 0;
  std::vector<std::int32_t> others, seen;
  std::vector<std::int64_t> starts;

  Sight() = default;
  Sight(const Attention& a, std::int64_t token, std::int64_t tokens) {
    std::vector<std::uint8_t> viewers(a.keys);  // how many of the tokens see a key
    for (std::int64_t t = token; t < token + tokens; ++t)
      for (std::int64_t key = 0; key < a.keys; ++key) viewers[key] += sees(a, t, key);
    const auto first = std::find(viewers.begin(), viewers.end(), tokens);
    begin = first - viewers.begin();
    end = std::find_if(first, viewers.end(), [=](std::uint8_t count) { return count != tokens; }) - viewers.begin();

    const auto add_others = [&](std::int64_t from, std::int64_t to) {
      for (std::int64_t key = from; key < to; ++key)
        if (viewers[key]) others.push_back(static_cast<std::int32_t>(key));
    };
    add_others(0, begin);
    before = static_cast<std::int64_t>(others.size());
    add_others(end, a.keys);

    const auto add_seen = [&](std::int64_t t, std::int64_t from, std::int64_t to) {
      starts.push_back(static_cast<std::int64_t>(seen.size()));
      for (std::int64_t i = from; i < to; ++i)
        if (sees(a, t, others[i])) seen.push_back(static_cast<std::int32_t>(i));
    };
    for (std::int64_t t = token; t < token + tokens; ++t) {
      add_seen(t, 0, before);
      add_seen(t, before, static_cast<std::int64_t>(others.size()));
    }
    starts.push_back(static_cast<std::int64_t>(seen.size()));
  }
};

}  // namespace

void rms_norm(const float* x, const float* weight, float* out, std::int64_t rows, std::int64_t n, float eps) {
  in_pieces(rows, 8, rows * n, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) isa().rms_norm(x + row * n, weight, out + row * n, n, eps);
  });
}

void float_linear(const float* x, const float* weight, float* out, std::int64_t rows, std::int64_t n, std::int64_t outputs) {
  in_pieces(outputs, 8, rows * n * outputs, [&](std::int64_t begin, std::int64_t end) {
    isa().float_product(x, weight, out, rows, n, outputs, begin, end);
  });
}

void attention(const Attention& a) {
  const std::int64_t group = a.heads / a.kv_heads, size = std::max<std::int64_t>(1, kQueries / group);
  const std::int64_t blocks = (a.tokens + size - 1) / size;
  std::vector<Sight> sights(blocks);
  in_pieces(a.tokens, size, a.tokens * a.keys, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t token = begin; token < end; token += size) sights[token / size] = {a, token, std::min(size, end - token)};
  });

  const std::int64_t stride = (((a.keys + 8) / 16 + 1) | 1) * 16;  // an odd number of cache lines: rows share no set of the cache
  const std::int64_t floats = cached_rows(a.dim) * a.dim + size * group * stride;
  // blocks of one head stand side by side, so that they find their keys in the cache
  in_pieces(a.kv_heads * blocks, 1, a.tokens * a.keys * a.heads * (a.dim + a.value_dim), [&](std::int64_t begin, std::int64_t end) {
    thread_local std::vector<CacheLine> scratch;
    scratch.resize(std::max<std::size_t>(scratch.size(), (floats + 15) / 16));
    for (std::int64_t i = begin; i < end; ++i) {
      const Sight& sight = sights[i % blocks];
      const std::int64_t token = i % blocks * size, others = static_cast<std::int64_t>(sight.others.size());
      isa().attend(a, {token, std::min(size, a.tokens - token), sight.begin, sight.end, sight.others.data(), sight.before,
                       others - sight.before, sight.seen.data(), sight.starts.data(), stride},
                   i / blocks, scratch.data()->floats);
    }
  });
}

}  // namespace edgexpert
