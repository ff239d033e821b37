// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "inputs.h"

namespace farm {

// Line of the input list of a program that generates.
struct Prompt {
  int64_t line = 0;
  std::vector<int32_t> tokens;
  // Sequence whose logits are written, the number of rows, and whether the line has a sequence.
  std::vector<int32_t> scored;
  size_t rows = 0;
  bool has_scored = false;
  std::vector<size_t> file_tokens;  // of each file, with the padding
};

// Reads the files of all lines: token ids as int32, -1 after their end. Throws Failure at inputs unless each is a
// sequence of 1 to `context` ids below `vocabulary`, so that a wrong last line is found before the first execution.
std::vector<Prompt> read_prompts(const std::vector<InputLine>& lines, size_t vocabulary, size_t context);

// Parses "3,7" as 3 and 7. Throws Failure at flags.
std::vector<int32_t> parse_token_ids(const std::string& flag, const std::string& text);

}  // namespace farm
