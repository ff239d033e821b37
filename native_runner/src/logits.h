// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace farm {

// How to read the logits of one token.
class Logits {
 public:
  // `scale` and `zero_point` of what is quantized, where the program says them. Throws Failure at load for a dtype that
  // cannot be compared here.
  Logits(const std::string& dtype, size_t vocabulary, std::optional<double> scale, std::optional<double> zero_point);

  // The token with the greatest value as it stands there; of equal ones the first.
  int32_t greedy(const void* row) const { return greedy_(row, vocabulary_); }

  // Whether `to_float` is possible.
  bool has_unit() const { return is_float_ || scale_.has_value(); }

  // In the unit of the module that was compiled.
  void to_float(const void* row, float* to) const { to_float_(row, vocabulary_, scale_.value_or(1), zero_point_, to); }

  size_t vocabulary() const { return vocabulary_; }

 private:
  size_t vocabulary_;
  std::optional<double> scale_;
  double zero_point_;
  bool is_float_ = false;
  int32_t (*greedy_)(const void*, size_t) = nullptr;
  void (*to_float_)(const void*, size_t, double, double, float*) = nullptr;
};

// The natural logarithms of the probabilities that `count` logits in `row` stand for: of the token `told`, and of the
// likeliest.
struct Likelihood {
  float told = 0;
  float likeliest = 0;
};
Likelihood likelihood_of(const float* row, size_t count, int32_t told);

}  // namespace farm
