// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <executorch/runtime/core/evalue.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "model.h"
#include "tensors.h"

namespace farm {

// State of a program: an output of a line of the input list is an input of the next line.
class Carry {
 public:
  // Parses "1:2,0:3": output 1 becomes input 2, output 0 input 3. Throws Failure at flags.
  explicit Carry(const std::string& text);

  // Throws Failure at load unless these inputs and outputs exist, with equal sizes.
  void check(const std::vector<TensorSpec>& inputs, const std::vector<TensorSpec>& outputs) const;

  // Keeps the outputs of the last execution of a line.
  void take(const Model& model);

  // Overwrites values of the files of a line by the kept outputs, if there are any. `inputs` are the executed inputs.
  // Throws Failure at inputs if they have another size.
  void give(const std::vector<TensorSpec>& inputs, Model* model) const;

 private:
  struct Pair {
    size_t output = 0;
    size_t input = 0;
    std::vector<uint8_t> kept;
  };

  std::vector<Pair> pairs_;
};

}  // namespace farm
