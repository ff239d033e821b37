// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "tensors.h"

namespace farm {

// Attention mask: [..., width, context]. The columns are the positions of the cache, then the tokens of the call.
struct MaskLayout {
  size_t input = 0;
  bool windowed = false;  // only the last positions are attended to
};

// Keys or values of a layer: `rows` sequences of positions with `unit` bytes for each position. Keys are
// [H, D, positions]: a unit is one element. Values are [H, positions, D]: a unit has D elements.
struct CacheLayout {
  std::optional<size_t> input;  // absent if the method has no cache
  size_t output = 0;
  size_t rows = 0;
  size_t unit = 0;
};

// Inputs and outputs of a static decoder of ExecuTorch's Qualcomm examples: tokens, one or two masks, positions, keys
// of all layers, values of all layers -> logits, new keys of all layers, new values of all layers.
struct DecoderLayout {
  std::string method;
  size_t width = 0;    // tokens of one call
  size_t context = 0;  // most positions of a sequence
  size_t past = 0;     // positions of the caches: context - width
  size_t vocabulary = 0;
  std::vector<MaskLayout> masks;
  std::optional<size_t> positions;  // input
  std::vector<CacheLayout> caches;
};

// Finds the layout from the declaration of a method. Throws Failure at load, with the place, for any other method.
DecoderLayout decoder_layout(const std::string& method, const std::vector<TensorSpec>& inputs,
                             const std::vector<TensorSpec>& outputs);

// Throws Failure at load unless new positions of `from` fit into the caches of `to`.
void require_same_caches(const DecoderLayout& from, const DecoderLayout& to);

}  // namespace farm
