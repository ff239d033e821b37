// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace farm {

// Reader of the logits of a token.
class Logits {
 public:
  // `scale` and `zero_point` are for quantized logits, if the program has them. Throws Failure at load for a dtype that
  // cannot be compared.
  Logits(const std::string& dtype, size_t vocabulary, std::optional<double> scale, std::optional<double> zero_point);

  // Returns the token with the greatest stored value; the first of equal ones.
  int32_t greedy(const void* row) const { return greedy_(row, vocabulary_); }

  // Returns true if `to_float` is possible.
  bool has_unit() const { return is_float_ || scale_.has_value(); }

  // Converts to the unit of the compiled module.
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

// Natural logarithms of the probabilities of the next token and of the likeliest token.
struct Likelihood {
  float next = 0;
  float likeliest = 0;
};
// Returns them for `token`, from the `count` logits in `row`.
Likelihood likelihood_of(const float* row, size_t count, int32_t token);

}  // namespace farm
