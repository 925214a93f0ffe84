// Arrays as Python hands them over: nanobind checks type, dimensions and contiguity; sizes are checked here, by name.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <array>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace edgexpert {

namespace nb = nanobind;

template <class T, std::size_t N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <class T, std::size_t N>
using Maybe = std::optional<Array<T, N>>;
// The last dimension is contiguous, the others have strides of their own.
template <class T, std::size_t N>
using Strided = nb::ndarray<T, nb::ndim<N>, nb::device::cpu>;

inline void check(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument(message);  // ValueError in Python
}

template <std::size_t N>
std::string text_of(const std::array<std::int64_t, N>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < N; ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

// The values of an array of exactly this shape.
template <class T, std::size_t N>
T* of_shape(const Array<T, N>& array, const char* name, const std::array<std::int64_t, N>& shape) {
  std::array<std::int64_t, N> found;
  for (std::size_t i = 0; i < N; ++i) found[i] = static_cast<std::int64_t>(array.shape(i));
  if (found != shape) throw std::invalid_argument(std::string(name) + " has the shape " + text_of(found) + ", expected " + text_of(shape));
  return array.data();
}

template <class T, std::size_t N>
T* of_shape(const Maybe<T, N>& array, const char* name, const std::array<std::int64_t, N>& shape) {
  return array ? of_shape(*array, name, shape) : nullptr;
}

// Keeps arrays alive that a native object points into.
class Holder {
 public:
  template <class A>
  const A& hold(const A& array) {
    held_.emplace_back(array);
    return array;
  }
  template <class A>
  const std::optional<A>& hold(const std::optional<A>& array) {
    if (array) held_.emplace_back(*array);
    return array;
  }

 private:
  std::vector<nb::ndarray<>> held_;
};

}  // namespace edgexpert
