#include "kernels.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <vector>

#include "isa.h"
#include "pool.h"

namespace edgexpert {
namespace {

// Memory that stays between calls.
class Buffer {
 public:
  template <class T>
  T* get(std::int64_t count) {
    const std::size_t bytes = (static_cast<std::size_t>(count) * sizeof(T) + 63) / 64 * 64;
    if (bytes > bytes_) {
      std::free(memory_);
      bytes_ = 0;
      memory_ = std::aligned_alloc(64, bytes);
      if (!memory_) throw std::bad_alloc();
      bytes_ = bytes;
    }
    return static_cast<T*>(memory_);
  }

 private:
  void* memory_ = nullptr;
  std::size_t bytes_ = 0;
};

struct Task {
  const Linear* layer;
  float* apart;  // where the products of parts go that are joined later; null where a task has all parts
  std::int64_t expert, tile, begin, end, first_part, last_part;
};

// Shared by all calls, which hold busy().
Buffer quantised, token_sums, token_scales, packed, packed_sums, everything, channel_lists, quad_lists, row_x, row_sums, row_scales,
    products, partial, scratch;
std::vector<Task> tasks;
std::atomic<bool> counting{false};
std::atomic<std::int64_t> counted{0};

// Channels per block: those that share scales; 32 for weights without.
std::int64_t block_of(const Weights& w) { return w.bits == 16 ? std::min<std::int64_t>(32, w.channels) : w.group; }
std::int64_t blocks_of(const Weights& w) { return (w.channels + block_of(w) - 1) / block_of(w); }

template <class F>
void for_rows(std::int64_t rows, F&& f) {
  if (rows < 4) {
    for (std::int64_t r = 0; r < rows; ++r) f(r, 0);
  } else {
    parallel_for(rows, f);
  }
}

void add_sums(const std::int8_t* q, const std::int32_t* quads, std::int64_t blocks, std::int32_t* sums) {
  for (std::int64_t g = 0; g < blocks; ++g) {
    std::int32_t sum = 0;
    for (std::int64_t i = 4 * quads[g]; i < 4 * quads[g + 1]; ++i) sum += q[i];
    sums[g] = sum;
  }
}

// As Isa::pack_channels.
void pack_floats(const float* x, const bool* loaded, const bool* compute, std::int64_t n, std::int64_t block, float* packed) {
  std::int64_t count = 0;
  for (std::int64_t begin = 0; begin < n; begin += block) {
    for (std::int64_t i = begin; i < std::min(begin + block, n); ++i) {
      packed[count] = compute && !compute[i] ? 0.0f : x[i];
      count += loaded[i];
    }
    for (; count % 4; ++count) packed[count] = 0.0f;
  }
}

// Asks for the rows with which thread `thread` is likely to begin when this matrix, or that of these experts, is multiplied next.
void fetch_first_rows(const Weights& w, const Pairs& pairs, std::int64_t thread) {
  const std::int64_t place = w.tiles == 1 ? pairs.experts[std::min(thread, pairs.loaded - 1)] : std::min(thread, w.tiles - 1);
  const std::int64_t part = w.count() == 1 && w.tiles == 1 ? std::min(thread, kParts - 1) : 0;  // see `by_channels`
  const std::uint8_t* rows = w.places->values[place] + part * blocks_of(w) / kParts * block_of(w) * w.row_bytes();
  for (std::int64_t at = 0; at < block_of(w) * w.row_bytes(); at += 64) __builtin_prefetch(rows + at, 0, 2);
}

// Adds up the distinct rows in the lists of channels that are multiplied, and the groups that have some.
void count_touched(std::initializer_list<Linear> layers, const Pairs& pairs, const std::int32_t* channels, const std::int32_t* quads,
                   std::int64_t channel_stride, std::int64_t quad_stride) {
  for (const Linear& layer : layers) {
    const Weights& w = layer.weights;
    const std::int64_t beside = w.bits == 16 ? 0 : w.padded * (w.places->zeros[pairs.experts[0]] ? 3 : 2);
    for (std::int64_t u = 0; u < pairs.loaded; ++u, channels += channel_stride, quads += quad_stride) {
      std::vector<bool> touched(w.channels);
      for (std::int64_t i = 0; i < 4 * quads[blocks_of(w)]; ++i) touched[channels[i]] = true;
      counted += std::count(touched.begin(), touched.end(), true) * w.row_bytes();
      for (std::int64_t g = 0; g < blocks_of(w); ++g) counted += quads[g] < quads[g + 1] ? beside : 0;
    }
  }
}

bool alike(const Weights& a, const Weights& b) { return a.channels == b.channels && a.bits == b.bits && a.group == b.group; }

// out [pairs, outputs] of each layer = the activations of each pair times its expert's matrix, plus bias [experts, outputs]. The
// activations of pair p are row tokens[p] of x [rows, channels], or row p where tokens is null. They are quantised row by row
// before anything is selected. The layers' matrices are alike; `next` is the matrix that is multiplied after them, or null.
void multiply(std::initializer_list<Linear> layers, const float* x, std::int64_t rows, const Pairs& pairs,
              const std::int64_t* tokens, const Selection& selection, const Weights* next = nullptr) {
  const Weights& form = layers.begin()->weights;
  const std::int64_t count = pairs.count(), channels = form.channels, block = block_of(form), blocks = blocks_of(form);
  const std::int64_t experts = pairs.loaded;
  for (const Linear& layer : layers)
    for (std::int64_t u = 0; u < experts; ++u)
      if (!layer.weights.places->values[pairs.experts[u]]) throw std::runtime_error("an expert is used that is not in memory");
  const bool integer = form.bits != 16, selected = selection.loaded || selection.compute;
  const std::size_t value = integer ? 1 : 4;
  const Isa& set = isa();
  if (!count) return;

  const std::int64_t lists = selected ? experts : 1, room = channels + 16;
  auto* channel_list = channel_lists.get<std::int32_t>(lists * room);
  auto* quad_list = quad_lists.get<std::int32_t>(lists * (blocks + 1));
  auto* every_channel = everything.get<bool>(channels);
  std::fill_n(every_channel, channels, true);
  if (!selected) set.list_channels(every_channel, channels, block, channel_list, quad_list);

  auto* q = quantised.get<std::int8_t>(integer ? rows * channels : 0);
  auto* sums = token_sums.get<std::int32_t>(rows * blocks);
  auto* scales = token_scales.get<float>(rows);
  if (integer) {
    for_rows(rows, [&](std::int64_t r, int) {
      scales[r] = set.quantise(x + r * channels, channels, q + r * channels);
      if (!selected) add_sums(q + r * channels, quad_list, blocks, sums + r * blocks);
    });
  }

  auto* pair_x = row_x.get<const void*>(count);
  auto* pair_sums = row_sums.get<const std::int32_t*>(count);
  auto* pair_scales = row_scales.get<float>(count);
  const auto* source = integer ? reinterpret_cast<const std::uint8_t*>(q) : reinterpret_cast<const std::uint8_t*>(x);
  for (std::int64_t p = 0; p < count; ++p) {
    const std::int64_t r = tokens ? tokens[p] : p;
    pair_x[p] = source + r * channels * value;
    pair_sums[p] = sums + r * blocks;
    if (integer) pair_scales[p] = scales[r];
  }

  if (selected) {
    auto* rows_packed = packed.get<std::uint8_t>(count * room * value);
    auto* sums_packed = packed_sums.get<std::int32_t>(count * blocks);
    for_rows(experts, [&](std::int64_t u, int) {
      const bool* loaded = selection.loaded ? selection.loaded + pairs.experts[u] * channels : every_channel;
      set.list_channels(loaded, channels, block, channel_list + u * room, quad_list + u * (blocks + 1));
      for (std::int64_t p = pairs.offsets[u]; p < pairs.offsets[u + 1]; ++p) {
        const bool* compute = selection.compute ? selection.compute + p * channels : nullptr;
        auto* row = rows_packed + p * room * value;
        if (integer) {
          set.pack_channels(static_cast<const std::int8_t*>(pair_x[p]), loaded, compute, channels, block,
                            reinterpret_cast<std::int8_t*>(row), sums_packed + p * blocks);
        } else {
          pack_floats(static_cast<const float*>(pair_x[p]), loaded, compute, channels, block, reinterpret_cast<float*>(row));
        }
        pair_x[p] = row;
        pair_sums[p] = sums_packed + p * blocks;
      }
    });
  }

  if (counting && form.count() > 1) count_touched(layers, pairs, channel_list, quad_list, selected ? room : 0, selected ? blocks + 1 : 0);

  // Few rows wait for memory, which is slow where threads take turns in the lines of one row: they share small matrices by their
  // channels. Many rows compute: an expert's columns are split where there are few experts or where it has more rows than its share.
  std::int64_t tiles = 0, outputs = 0;
  for (const Linear& layer : layers) {
    tiles += layer.weights.tiles;
    outputs += layer.weights.outputs;
  }
  const auto cost = [&](std::int64_t u) { return std::max<std::int64_t>(4, pairs.offsets[u + 1] - pairs.offsets[u]); };
  std::int64_t total = 0;
  for (std::int64_t u = 0; u < experts; ++u) total += cost(u) * tiles;
  const std::int64_t share = std::max<std::int64_t>(1, total / (16 * threads()));
  const bool by_channels = threads() > 1 && count <= 16 * experts && experts * tiles < 4 * threads();
  float* apart = by_channels ? partial.get<float>(kParts * count * outputs) : nullptr;
  tasks.clear();
  for (const Linear& layer : layers) {
    const Weights& w = layer.weights;
    for (std::int64_t u = 0; u < experts; ++u) {
      if (pairs.offsets[u] == pairs.offsets[u + 1]) continue;
      const std::int64_t narrowest = cost(u) < 16 ? 512 : kColumns;
      const std::int64_t most = threads() == 1 || by_channels || cost(u) == 4 ? 1 : std::max<std::int64_t>(1, w.padded / narrowest);
      const std::int64_t parts = std::clamp<std::int64_t>(cost(u) / share, 1, most);
      const std::int64_t width = ((w.padded + parts - 1) / parts + kColumns - 1) / kColumns * kColumns;
      for (std::int64_t tile = 0; tile < w.tiles; ++tile)
        for (std::int64_t c = 0; c < w.padded; c += width)
          for (std::int64_t part = 0; part < (by_channels ? kParts : 1); ++part)
            tasks.push_back({&layer, apart, u, tile, c, std::min(c + width, w.padded), part, by_channels ? part + 1 : kParts});
    }
    if (by_channels) apart += kParts * count * w.outputs;
  }

  const std::int64_t bytes = (scratch_bytes(block, blocks) + 63) / 64 * 64;
  auto* memory = scratch.get<std::uint8_t>(bytes * threads());
  const auto product_of = [&](const Task& task) {
    const Weights& w = task.layer->weights;
    const float* bias = task.layer->bias;
    const std::int64_t u = task.expert, e = pairs.experts[u], p = pairs.offsets[u], list = selected ? u : 0;
    const std::int64_t place = e + task.tile, first = task.tile * w.padded;
    Product product{};
    product.values = w.places->values[place];
    product.scales = w.places->scales[place];
    product.zeros = w.places->zeros[place];
    product.padded = w.padded;
    product.outputs = std::min(w.padded, w.outputs - first);
    product.group = block;
    product.bits = w.bits;
    product.groups = blocks;
    product.channels = channel_list + list * room;
    product.quads = quad_list + list * (blocks + 1);
    product.rows = pairs.offsets[u + 1] - p;
    product.x = pair_x + p;
    product.sums = pair_sums + p;
    product.x_scales = task.apart ? nullptr : pair_scales + p;
    product.bias = bias && !task.apart ? bias + e * w.outputs + first : nullptr;
    product.out = (task.apart ? task.apart + task.first_part * count * w.outputs : task.layer->out) + p * w.outputs + first;
    product.out_stride = w.outputs;
    product.begin = task.begin;
    product.end = task.end;
    product.first_part = task.first_part;
    product.last_part = task.last_part;
    return product;
  };
  const auto number = static_cast<std::int64_t>(tasks.size());
  parallel_for(number, [&, step = threads()](std::int64_t i, int thread) {
    Product product = product_of(tasks[i]), after;
    product.scratch = memory + thread * bytes;
    if (i + step < number) {
      after = product_of(tasks[i + step]);
      product.after = &after;
    }
    set.product(product);
    if (next && i + step >= number) fetch_first_rows(*next, pairs, i + step - number);
  });
  if (!by_channels) return;
  const float* parts = partial.get<float>(0);
  for (const auto& [w, bias, out] : layers) {
    for (std::int64_t u = 0; u < experts; ++u) {
      const float* add = bias ? bias + pairs.experts[u] * w.outputs : nullptr;
      for (std::int64_t p = pairs.offsets[u]; p < pairs.offsets[u + 1]; ++p)
        set.join(parts + p * w.outputs, count * w.outputs, w.outputs, integer ? pair_scales[p] : 1.0f, add, out + p * w.outputs);
    }
    parts += kParts * count * w.outputs;
  }
}

}  // namespace

void count_bytes(bool on) {
  counting = on;
  if (on) counted = 0;
}

std::int64_t bytes_counted() { return counted; }

void linear(std::initializer_list<Linear> layers, const float* x, std::int64_t rows, const Weights* next) {
  const std::lock_guard lock(busy());
  const std::int64_t expert = 0, offsets[2] = {0, rows};
  const Pairs pairs{1, &expert, offsets, nullptr};
  const Weights& first = layers.begin()->weights;
  if (std::all_of(layers.begin(), layers.end(), [&](const Linear& layer) { return alike(layer.weights, first); })) {
    multiply(layers, x, rows, pairs, nullptr, {}, next);
  } else {
    for (const Linear& layer : layers) multiply({layer}, x, rows, pairs, nullptr, {});
  }
}

void gate_up(const Weights& w, const float* x, std::int64_t tokens, const Pairs& pairs, const Selection& selection,
             const float* bias, Activation activation, bool gated, float* out, const Weights* next) {
  const std::lock_guard lock(busy());
  const std::int64_t width = gated ? w.outputs / 2 : w.outputs;
  auto* y = products.get<float>(pairs.count() * w.outputs);
  multiply({{w, bias, y}}, x, tokens, pairs, pairs.tokens, selection, next);
  for_rows(pairs.count(),
           [&](std::int64_t p, int) { isa().activate(activation, gated, y + p * w.outputs, width, out + p * width); });
}

void down(const Weights& w, const float* x, std::int64_t tokens, const Pairs& pairs, const Selection& selection,
          const float* bias, const float* weights, float* out) {
  const std::lock_guard lock(busy());
  auto* y = products.get<float>(pairs.count() * w.outputs);
  multiply({{w, bias, y}}, x, pairs.count(), pairs, nullptr, selection);
  in_pieces(w.outputs, 256, pairs.count() * w.outputs, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = 0; t < tokens; ++t) std::memset(out + t * w.outputs + begin, 0, (end - begin) * sizeof(float));
    for (std::int64_t p = 0; p < pairs.count(); ++p)
      isa().add_scaled(weights[p], y + p * w.outputs + begin, end - begin, out + pairs.tokens[p] * w.outputs + begin);
  });
}

}  // namespace edgexpert
