// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "inputs.h"

namespace farm {

// What one line of the input list has for a program that generates.
struct Prompt {
  int64_t line = 0;
  std::vector<int32_t> tokens;
  // The sequence whose logits are written, how many rows these have, and whether there is one.
  std::vector<int32_t> scored;
  size_t rows = 0;
  bool has_scored = false;
  std::vector<size_t> file_tokens;  // of each file, with what fills it up
};

// Reads the files of all lines: token ids as int32, -1 after their end. Throws Failure at inputs for what is no
// sequence of 1 to `context` ids below `vocabulary`, so that a wrong last line is known before anything is executed.
std::vector<Prompt> read_prompts(const std::vector<InputLine>& lines, size_t vocabulary, size_t context);

// "3,7" -> 3 and 7. Throws Failure at flags.
std::vector<int32_t> parse_token_ids(const std::string& flag, const std::string& text);

}  // namespace farm
