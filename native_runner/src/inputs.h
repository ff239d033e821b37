// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "failure.h"
#include "tensors.h"

namespace farm {

// Inference of an input list.
struct InputLine {
  int64_t number = 0;       // number of the inference, from 0
  size_t line_in_file = 0;  // number of the line, from 1, for messages
  std::vector<std::string> files;
};

// Input list, read before the program is loaded and parsed when its inputs are known.
class InputList {
 public:
  // Reads the list. A missing list does not throw: a method without inputs needs none.
  explicit InputList(std::string path);

  // Returns the inferences. Throws Failure at inputs unless there is at least one, and every line has a file of the
  // right size for every input: a wrong last line is found before the first inference. Blank lines are inferences of a
  // method without inputs only, which is executed once without a list.
  std::vector<InputLine> inferences(const std::vector<TensorSpec>& specs) const;

  // Returns all lines that are not blank, numbered, with unchecked files. Throws Failure at inputs if there are none.
  std::vector<InputLine> lines() const;

 private:
  void check(const InputLine& line, const std::vector<TensorSpec>& specs) const;

  std::string path_;
  std::vector<InputLine> lines_;
  std::optional<Failure> failure_;
};

// Sets every element of the input at `data` to one, or true.
void fill_with_ones(void* data, const TensorSpec& spec);

}  // namespace farm
