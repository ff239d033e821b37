// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <executorch/extension/tensor/tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "debug_sink.h"
#include "io_memory.h"
#include "program.h"
#include "tensors.h"

namespace farm {

struct ModelSettings {
  std::optional<size_t> debug_bytes;  // most bytes of intermediate outputs
  bool shared_buffer = false;         // inputs and outputs are in memory that is shared with the DSP
  // Memory of the caller's inputs is set once, not before every execution.
  bool inputs_stay = false;
};

// Method of a program. Every function throws Failure, with ExecuTorch's code and its first logged error.
class Model {
 public:
  // Reads the description of the method; throws at load.
  Model(std::shared_ptr<Program> program, std::string method, const ModelSettings& settings);
  // Unloads the method.
  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const std::string& method() const { return method_; }
  // Declared inputs and outputs; for a dynamic shape the upper bound.
  const std::vector<TensorSpec>& inputs() const { return inputs_; }
  const std::vector<TensorSpec>& outputs() const { return outputs_; }

  // Loads the method, which starts its backends. `inputs` are the inputs of the executions, with the shapes of
  // `inputs()` or smaller ones. Throws at load.
  void load(const std::vector<TensorSpec>& inputs);

  // Returns the memory of an input, to be written before `execute`; its bytes stay until they are written again.
  void* input_data(size_t index) { return input_memory_[index].data(); }

  // Executes once and returns the time in nanoseconds.
  int64_t execute();

  // Returns the outputs of the last execution, which point into the method's memory.
  const std::vector<executorch::runtime::EValue>& results() const { return results_; }

  // Returns null unless `debug_bytes` was set.
  const DebugSink* debug_sink() const { return debug_sink_.get(); }

 private:
  void provide_inputs(const std::vector<TensorSpec>& specs);
  void provide_outputs();

  std::shared_ptr<Program> program_;
  std::string method_;
  ModelSettings settings_;
  std::vector<TensorSpec> inputs_;
  std::vector<TensorSpec> outputs_;

  // The loaded method refers to these members.
  std::unique_ptr<DebugSink> debug_sink_;
  std::vector<IoMemory> input_memory_;
  std::vector<IoMemory> output_memory_;  // memory of outputs that the caller has to provide
  std::vector<executorch::extension::TensorPtr> tensors_;
  std::vector<executorch::runtime::EValue> input_values_;
  bool any_planned_input_ = false;
  bool inputs_are_set_ = false;
  std::vector<executorch::runtime::EValue> results_;
};

}  // namespace farm
