// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "failure.h"
#include "tensors.h"

namespace farm {

// One inference of an input list.
struct InputLine {
  int64_t number = 0;       // of the inference, from 0
  size_t line_in_file = 0;  // from 1, for messages
  std::vector<std::string> files;
};

// An input list, read before the program is loaded and understood when its inputs are known.
class InputList {
 public:
  // Does not throw for a list that is missing: a method without inputs needs none.
  explicit InputList(std::string path);

  // The inferences. Throws Failure at inputs unless there is one, and every line has a file of the right
  // size for every input: a wrong last line is known before the first inference runs. Blank lines count
  // for a method without inputs only, which is executed once when the list is missing.
  std::vector<InputLine> inferences(const std::vector<TensorSpec>& specs) const;

  // All lines but the blank ones, numbered, with their files as they are. Throws Failure at inputs unless there is one.
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
