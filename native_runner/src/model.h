// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "debug_sink.h"
#include "io_memory.h"
#include "tensors.h"

namespace farm {

struct ModelSettings {
  bool trace = false;                 // collect an ETDump
  std::optional<size_t> debug_bytes;  // intermediate outputs, at most so many
  bool shared_buffer = false;         // memory of inputs and outputs
};

// Looks at all of a program for damage, which must be refused before anything reads it. Throws Failure at load.
void verify_program(const std::string& path);

// A method of a program. Every function throws Failure, with ExecuTorch's code and its first logged error.
class Model {
 public:
  // Reads the program, which was verified, and describes the method; throws at load. `options` may go after it.
  Model(const std::string& path, int method_index, const executorch::runtime::LoadBackendOptionsMap& options,
        const ModelSettings& settings);

  const std::string& method() const { return method_; }
  // What the program declares; for a dynamic shape, its upper bound.
  const std::vector<TensorSpec>& inputs() const { return inputs_; }
  const std::vector<TensorSpec>& outputs() const { return outputs_; }

  // Loads the method, which starts its backends. `inputs` are those to execute with, which have the shapes
  // of `inputs()` or smaller ones. Throws at load.
  void load(const std::vector<TensorSpec>& inputs);

  // Where the bytes of an input go before `execute`; they stay until they are written again.
  void* input_data(size_t index) { return input_memory_[index].data(); }

  // Runs once and returns the nanoseconds it took.
  int64_t execute();

  // Values of the last execution; they point into the method's memory.
  std::vector<executorch::runtime::EValue> results();

  // The ETDump of everything since loading; throws at etdump.
  std::vector<uint8_t> take_etdump();

  // Null unless `debug_bytes` was set.
  const DebugSink* debug_sink() const { return debug_sink_.get(); }

 private:
  void describe(int method_index);
  void provide_inputs(const std::vector<TensorSpec>& specs);
  void provide_outputs();
  executorch::runtime::MethodMeta meta() const;

  ModelSettings settings_;
  std::string method_;
  std::vector<TensorSpec> inputs_;
  std::vector<TensorSpec> outputs_;

  // All of these outlive the module, which refers to them.
  std::unique_ptr<DebugSink> debug_sink_;
  std::vector<IoMemory> input_memory_;
  std::vector<IoMemory> output_memory_;  // of outputs that the program leaves to its caller
  std::vector<executorch::extension::TensorPtr> tensors_;
  std::vector<executorch::runtime::EValue> input_values_;

  std::unique_ptr<executorch::extension::Module> module_;
};

}  // namespace farm
