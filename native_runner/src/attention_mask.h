// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace farm {

// What a call's tokens attend to: positions of the cache, which stay where they are, and those of the call itself up
// to their own. Kept in the memory of the input, of which only what changes is written.
class AttentionMask {
 public:
  // `window`: how many positions a token attends to, itself included; all of them without. Throws Failure at load for
  // a dtype that has no value for that.
  AttentionMask(void* data, const std::string& dtype, size_t width, size_t context, std::optional<size_t> window);

  // Nothing of the cache.
  void clear();

  // The first `past` positions of the cache, which the call's first token follows.
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
  unsigned attends_ = 0;  // the bits of an element
  unsigned masked_ = 0;
  std::vector<Range> shown_;  // of the cache, by row
};

}  // namespace farm
