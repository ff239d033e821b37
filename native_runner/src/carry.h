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

// State that a program hands to its caller: an output of one line of the input list is an input of the next one.
class Carry {
 public:
  // "1:2,0:3": output 1 becomes input 2, output 0 input 3. Throws Failure at flags.
  explicit Carry(const std::string& text);

  // Throws Failure at load unless there are such inputs and outputs, of the same size.
  void check(const std::vector<TensorSpec>& inputs, const std::vector<TensorSpec>& outputs) const;

  // Keeps the outputs of the last execution of a line.
  void take(const Model& model);

  // Writes what was kept, if anything was, over what the files of a line say. `inputs` are those that are executed.
  // Throws Failure at inputs where they have another size.
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
