// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "tensors.h"

namespace farm {

// One of the masks: [..., width, context]. The columns are those of the cache and, behind them, the call's own tokens.
struct MaskLayout {
  size_t input = 0;
  bool windowed = false;  // attends to the last positions only
};

// Keys or values of a layer. Both lie as `rows` runs of positions, a position having `unit` bytes in each: keys are
// [H, D, positions], so that a unit is one element; values [H, positions, D], so that it is D of them.
struct CacheLayout {
  std::optional<size_t> input;  // absent where the method takes no past
  size_t output = 0;
  size_t rows = 0;
  size_t unit = 0;
};

// What the inputs and outputs of a static decoder of ExecuTorch's Qualcomm examples are: tokens, one or two masks,
// positions, keys of all layers, values of all layers -> logits, new keys of all layers, new values of all layers.
struct DecoderLayout {
  std::string method;
  size_t width = 0;    // tokens that one call takes
  size_t context = 0;  // positions that a sequence may have
  size_t past = 0;     // positions of the caches: context - width
  size_t vocabulary = 0;
  std::vector<MaskLayout> masks;
  std::optional<size_t> positions;  // input
  std::vector<CacheLayout> caches;
};

// Finds that out from what a method declares. Throws Failure at load for a method that is no such decoder, saying where.
DecoderLayout decoder_layout(const std::string& method, const std::vector<TensorSpec>& inputs,
                             const std::vector<TensorSpec>& outputs);

// Throws Failure at load unless what `from` adds to its caches fits into those of `to`.
void require_same_caches(const DecoderLayout& from, const DecoderLayout& to);

}  // namespace farm
