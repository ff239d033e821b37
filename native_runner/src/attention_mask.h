// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace farm {

// Attention mask of a call: each token attends to positions of the cache and to the tokens of the call up to itself.
// The mask is kept in the memory of the input, and only changes are written.
class AttentionMask {
 public:
  // `window`: number of positions that a token attends to, itself included; absent for all. Throws Failure at load for
  // a dtype without values for a mask.
  AttentionMask(void* data, const std::string& dtype, size_t width, size_t context, std::optional<size_t> window);

  // Masks the whole cache.
  void clear();

  // Shows the first `past` positions of the cache; the first token of the call follows them.
  void show(size_t past);

 private:
  struct Range {
    size_t begin = 0;
    size_t end = 0;
  };

  void fill(size_t row, size_t begin, size_t end, bool attends);

  void* data_;
  size_t width_;
  size_t context_;
  std::optional<size_t> window_;
  size_t itemsize_ = 0;
  unsigned attends_ = 0;  // bits of an element that is attended to
  unsigned masked_ = 0;
  std::vector<Range> shown_;  // shown range of the cache, by row
};

}  // namespace farm
