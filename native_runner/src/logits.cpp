// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "logits.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "failure.h"

namespace farm {

namespace {

// Number of values that are compared side by side: compilers make vector instructions of it, for floating point too,
// and a vocabulary of 128,000 takes microseconds.
constexpr size_t kLanes = 32;

template <typename T>
int32_t greedy_of(const void* data, size_t count) {
  const T* values = static_cast<const T*>(data);
  T lanes[kLanes];
  std::fill(lanes, lanes + kLanes, values[0]);
  size_t at = 0;
  for (; at + kLanes <= count; at += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = values[at + lane] > lanes[lane] ? values[at + lane] : lanes[lane];
    }
  }
  T best = lanes[0];
  for (const T lane : lanes) best = lane > best ? lane : best;
  for (; at < count; ++at) best = values[at] > best ? values[at] : best;
  const auto index = static_cast<size_t>(std::find(values, values + count, best) - values);
  // NaN does not equal itself.
  return index == count ? 0 : static_cast<int32_t>(index);
}

template <typename T>
void floats_of(const void* data, size_t count, double scale, double zero_point, float* to) {
  const T* values = static_cast<const T*>(data);
  for (size_t i = 0; i < count; ++i) {
    if constexpr (std::is_floating_point_v<T>) {
      to[i] = values[i];
    } else {
      to[i] = static_cast<float>((static_cast<double>(values[i]) - zero_point) * scale);
    }
  }
}

}  // namespace

Logits::Logits(const std::string& dtype, size_t vocabulary, std::optional<double> scale,
               std::optional<double> zero_point)
    : vocabulary_(vocabulary), scale_(scale), zero_point_(zero_point.value_or(0)), is_float_(dtype == "float32") {
  if (scale && !(*scale > 0 && std::isfinite(*scale) && std::isfinite(zero_point_))) {
    throw Failure(Stage::kLoad, "--generate: get_logits_scale and get_logits_zero_point of the program are no scale");
  }
  const auto take = [&](auto value) {
    using T = decltype(value);
    greedy_ = &greedy_of<T>;
    to_float_ = &floats_of<T>;
  };
  if (dtype == "float32") take(float{});
  if (dtype == "uint16") take(uint16_t{});
  if (dtype == "uint8") take(uint8_t{});
  if (dtype == "int16") take(int16_t{});
  if (dtype == "int8") take(int8_t{});
  if (greedy_ == nullptr) throw Failure(Stage::kLoad, "--generate: logits of " + dtype + " are not known here");
}

Likelihood likelihood_of(const float* row, size_t count, int32_t token) {
  const double greatest = *std::max_element(row, row + count);
  double sum = 0;
  for (size_t i = 0; i < count; ++i) sum += std::exp(static_cast<double>(row[i]) - greatest);
  const double rest = std::log(sum);
  return {static_cast<float>(static_cast<double>(row[token]) - greatest - rest), static_cast<float>(-rest)};
}

}  // namespace farm
