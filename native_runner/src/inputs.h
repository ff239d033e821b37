// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tensors.h"

namespace farm {

// One inference of an input list.
struct InputLine {
  int64_t number = 0;       // of the inference, from 0; blank lines do not count
  size_t line_in_file = 0;  // from 1, for messages
  std::vector<std::string> files;
};

// The inferences of an input list. Throws Failure at inputs for a list that is missing or has none.
std::vector<InputLine> read_input_list(const std::string& path);

// Throws Failure at inputs unless every line has a readable file of the right size for every input:
// a wrong last line is known before the first inference runs.
void check_inputs(const std::string& list_path, const std::vector<InputLine>& lines,
                  const std::vector<TensorSpec>& specs);

// The bytes of every input of one inference.
std::vector<std::vector<uint8_t>> read_inputs(const InputLine& line, const std::vector<TensorSpec>& specs);

}  // namespace farm
