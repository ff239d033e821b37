// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tensors.h"

namespace farm {

// A loaded method. Every function throws Failure, with ExecuTorch's code and its last logged error.
class Model {
 public:
  // Loads program and method; throws at load. `trace` collects an ETDump from here on.
  Model(const std::string& path, int method_index, bool trace);

  const std::string& method() const { return method_; }
  const std::vector<TensorSpec>& inputs() const { return inputs_; }
  const std::vector<TensorSpec>& outputs() const { return outputs_; }

  // The bytes of each input, as `inputs()` says; they stay the caller's and must outlive `execute`.
  void bind_inputs(std::vector<std::vector<uint8_t>>* bytes);

  // Runs once on the bound inputs and returns the nanoseconds it took.
  int64_t execute();

  // Values of the last execution; they point into the method's memory.
  std::vector<executorch::runtime::EValue> results();

  // The ETDump of everything since loading; throws at etdump.
  std::vector<uint8_t> take_etdump();

 private:
  void load_method(int method_index);
  void provide_outputs();

  std::unique_ptr<executorch::extension::Module> module_;
  std::string method_;
  std::vector<TensorSpec> inputs_;
  std::vector<TensorSpec> outputs_;
  std::vector<executorch::aten::ScalarType> input_types_;
  std::vector<executorch::extension::TensorPtr> bound_;
  std::vector<executorch::runtime::EValue> bound_values_;

  // Memory of outputs that the program leaves to its caller.
  std::vector<std::vector<uint8_t>> output_memory_;
  std::vector<executorch::extension::TensorPtr> output_tensors_;
};

}  // namespace farm
