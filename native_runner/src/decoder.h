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

// Method of a static decoder with its caches, which are the memory of its inputs. Each position has a fixed place there
// and is written alone.
class Decoder {
 public:
  // Reads the description of the method. All functions throw Failure at load.
  Decoder(const std::shared_ptr<Program>& program, const std::string& method, const ModelSettings& settings);

  const DecoderLayout& layout() const { return layout_; }
  const Logits& logits() const { return logits_; }

  // Loads the method and returns the time in nanoseconds.
  int64_t load();

  // Clears the caches.
  void clear();

  // Returns how many of the positions [done, end) the next call takes.
  size_t takes(size_t done, size_t end) const;

  // Executes with these tokens after the positions in the caches. Returns the time of the execution in nanoseconds.
  int64_t feed(const std::vector<int32_t>& tokens, size_t done, size_t count);

  // Returns the logits of a position of the last call, which are for the token after it.
  const void* logits_of(size_t position) const;

  // Writes positions [done, done + count) of the last call into the caches of `to`, as far as `to` has places.
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
