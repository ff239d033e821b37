// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention_mask.h"
#include "decoder_layout.h"
#include "logits.h"
#include "model.h"
#include "program.h"

namespace farm {

// One method of a static decoder, with the caches that it reads: they lie in the memory of its inputs, a position at
// its own place, and are written there position by position.
class Decoder {
 public:
  // Describes the method; throws Failure at load, as all of these.
  Decoder(const std::shared_ptr<Program>& program, const std::string& method, const ModelSettings& settings);

  const DecoderLayout& layout() const { return layout_; }
  const Logits& logits() const { return logits_; }

  // Loads the method and returns the nanoseconds that it took.
  int64_t load();

  // Forgets every position.
  void clear();

  // How many of the positions [done, end) the next call takes.
  size_t takes(size_t done, size_t end) const;

  // Executes with those tokens, and what came before them in the caches. Returns the nanoseconds of the execution.
  int64_t feed(const std::vector<int32_t>& tokens, size_t done, size_t count);

  // The logits of one of the positions of the last call: what follows its token.
  const void* logits_of(size_t position) const;

  // Writes positions [done, done + count) of the last call into the caches of `to`, as far as these reach.
  void remember(size_t done, size_t count, Decoder* to) const;

 private:
  void write_index(size_t input, size_t element, int64_t value);
  size_t base(size_t done) const { return done < layout_.past ? done : layout_.past; }

  Model model_;
  DecoderLayout layout_;
  Logits logits_;
  std::optional<size_t> window_;
  std::vector<AttentionMask> masks_;
  size_t row_bytes_;
  size_t first_ = 0;  // position of the first token of the last call
};

}  // namespace farm
