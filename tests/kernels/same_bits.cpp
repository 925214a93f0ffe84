// Prints a hash of the results of every kernel, case by case, for each instruction set of the processor that it runs on.
#include <cstdio>
#include <string>
#include <vector>

#include "../../csrc/dense.h"
#include "../../csrc/isa.h"
#include "../../csrc/pool.h"
#include "../../csrc/select.h"

using namespace edgexpert;

namespace {

struct Random {
  std::uint64_t state = 1;

  std::uint32_t operator()() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::uint32_t>(state >> 33);
  }
  std::vector<float> floats(std::int64_t n) {
    std::vector<float> x(n);
    for (float& v : x) v = static_cast<float>(static_cast<int>((*this)() & 0xffff) - 0x8000) / 0x4000;
    return x;
  }
};

// Storage of Weights: `count` random matrices.
struct Matrix {
  std::vector<std::uint8_t> values, zeros;
  std::vector<std::uint16_t> scales;
  Weights weights;

  Matrix(Random& random, int bits, bool zero_points, std::int64_t group, std::int64_t count, std::int64_t channels, std::int64_t outputs) {
    const std::int64_t padded = (outputs + 31) / 32 * 32, groups = channels / group;
    values.resize(count * channels * padded * bits / 8);
    for (auto& v : values) v = static_cast<std::uint8_t>(random());
    if (bits == 16)  // bfloat16 near 1
      for (std::size_t i = 1; i < values.size(); i += 2) values[i] = (values[i] & 0x80) | 0x3f;
    if (bits == 8)
      for (auto& v : values) v = v == 0x80 ? 0 : v;  // -128 is no weight
    scales.resize(count * groups * padded);
    for (auto& s : scales) s = static_cast<std::uint16_t>(0x2000 + (random() & 0x7ff));
    if (zero_points) zeros.resize(scales.size());
    for (auto& z : zeros) z = random() & 15;
    weights.places = std::make_shared<Places>();
    for (std::int64_t e = 0; e < count; ++e) {
      weights.places->values.push_back(values.data() + e * channels * padded * bits / 8);
      weights.places->scales.push_back(bits == 16 ? nullptr : scales.data() + e * groups * padded);
      weights.places->zeros.push_back(zero_points ? zeros.data() + e * groups * padded : nullptr);
    }
    weights.channels = channels;
    weights.outputs = outputs;
    weights.padded = padded;
    weights.bits = bits;
    weights.group = group;
  }
};

void report(const std::string& name, const std::vector<float>& out) {
  std::uint64_t hash = 14695981039346656037u;
  const auto* bytes = reinterpret_cast<const unsigned char*>(out.data());
  for (std::size_t i = 0; i < out.size() * sizeof(float); ++i) hash = (hash ^ bytes[i]) * 1099511628211u;
  std::printf("%s %016llx\n", name.c_str(), static_cast<unsigned long long>(hash));
}

struct Form {
  int bits;
  bool zero_points;
  std::int64_t group;
};
constexpr Form kForms[] = {{4, false, 32}, {4, true, 32}, {4, false, 64}, {8, false, 32}, {16, false, 32}};

void linears(const Form& form) {
  Random random;
  for (const std::int64_t channels : {64, 192})
    for (const std::int64_t outputs : {5, 64, 300}) {
      const Matrix m(random, form.bits, form.zero_points, form.group, 1, channels, outputs);
      for (const std::int64_t rows : {1, 2, 3, 5, 12}) {
        const auto x = random.floats(rows * channels), bias = random.floats(outputs);
        std::vector<float> out(rows * outputs);
        linear({{m.weights, rows % 2 ? bias.data() : nullptr, out.data()}}, x.data(), rows);
        report("linear " + std::to_string(form.bits) + " bits, " + std::to_string(rows) + " x " + std::to_string(channels) + " x " +
                   std::to_string(outputs), out);
      }
    }
}

void mixtures(const Form& form) {
  Random random;
  const std::int64_t experts_ = 4, channels = 128, width = 64, tokens = 7;
  const Matrix gate(random, form.bits, form.zero_points, form.group, experts_, channels, 2 * width);
  const Matrix second(random, form.bits, form.zero_points, form.group, experts_, width, channels);
  const std::int64_t ids[] = {0, 1, 3}, offsets[] = {0, 7, 8, 12}, of[] = {0, 1, 2, 3, 4, 5, 6, 2, 0, 3, 5, 6};
  const Pairs pairs{3, ids, offsets, of};
  const auto x = random.floats(tokens * channels), weights = random.floats(12);
  std::vector<char> loaded(experts_ * channels), compute(12 * channels);
  for (auto& c : loaded) c = random() % 3 != 0;
  for (auto& c : compute) c = random() % 2;
  const Selection some{reinterpret_cast<const bool*>(loaded.data()), reinterpret_cast<const bool*>(compute.data())};
  for (const auto activation : {Activation::silu, Activation::relu, Activation::identity})
    for (const bool all : {true, false}) {
      std::vector<float> inner(12 * width), out(tokens * channels);
      gate_up(gate.weights, x.data(), tokens, pairs, all ? Selection{} : some, nullptr, activation, true, inner.data());
      down(second.weights, inner.data(), tokens, pairs, {}, nullptr, weights.data(), out.data());
      report("experts " + std::to_string(form.bits) + " bits, activation " + std::to_string(static_cast<int>(activation)) +
                 (all ? "" : ", some channels"), out);
    }
}

void dense() {
  Random random;
  for (const std::int64_t dim : {24, 64})
    for (const std::int64_t tokens : {1, 6, 40}) {
      const std::int64_t heads = 4, kv_heads = 2, keys = 100;
      const auto q = random.floats(heads * tokens * dim), k = random.floats(kv_heads * keys * dim), v = random.floats(kv_heads * keys * dim);
      std::vector<char> mask(tokens * keys);
      for (std::int64_t i = 0; i < tokens * keys; ++i) mask[i] = i % keys < 50 || random() % 2;
      for (const bool masked : {false, true}) {
        std::vector<float> out(tokens * heads * dim);
        attention({q.data(), k.data(), v.data(), tokens * dim, dim, keys * dim, dim, keys * dim, dim,
                   masked ? reinterpret_cast<const bool*>(mask.data()) : nullptr, out.data(), heads, kv_heads, tokens, keys, dim, dim,
                   0.125f});
        report("attention of " + std::to_string(tokens) + (masked ? " in a tree" : ""), out);
      }
    }
  for (const std::int64_t n : {30, 128}) {
    const auto x = random.floats(3 * n), weight = random.floats(n), router = random.floats(9 * n);
    std::vector<float> out(3 * n), scores(3 * 9);
    rms_norm(x.data(), weight.data(), out.data(), 3, n, 1e-6f);
    report("rms_norm", out);
    float_linear(x.data(), router.data(), scores.data(), 3, n, 9);
    report("float_linear", scores);
    report("exp_sum", {isa().exp_sum(x.data(), n, 2.0f)});
  }
}

}  // namespace

int main() {
  set_threads(2);
  for (const char* name : {"neon", "portable"}) {
    if (!select_isa(name)) continue;
    std::printf("isa %s\n", name);
    for (const Form& form : kForms) linears(form);
    for (const Form& form : kForms) mixtures(form);
    dense();
  }
}
