// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "model.h"

#include <executorch/devtools/etdump/etdump_flatcc.h>

#include <chrono>
#include <utility>

#include "failure.h"
#include "platform.h"

namespace farm {

namespace {

using executorch::aten::SizesType;
using executorch::etdump::ETDumpGen;
using executorch::runtime::EValue;
using executorch::runtime::EventTracerDebugLogLevel;
using executorch::runtime::Tag;

std::vector<SizesType> sizes_of(const TensorSpec& spec) { return {spec.shape.begin(), spec.shape.end()}; }

[[noreturn]] void refuse_planned(const char* what, size_t index) {
  throw Failure(Stage::kLoad, "--shared_buffer: the program brings the memory of " + std::string(what) + " " +
                                  std::to_string(index) +
                                  ": compile it with alloc_graph_input=False and alloc_graph_output=False");
}

}  // namespace

Model::Model(std::shared_ptr<Program> program, std::string method, const ModelSettings& settings)
    : program_(std::move(program)), method_(std::move(method)), settings_(settings) {
  forget_errors();
  const auto meta = program_->meta(method_);
  inputs_ = input_specs(meta);
  outputs_ = output_specs(meta);
}

Model::~Model() {
  results_.clear();
  program_->module().unload_method(method_);
}

void Model::load(const std::vector<TensorSpec>& inputs) {
  forget_errors();
  provide_inputs(inputs);
  check(program_->module().load_method(method_), Stage::kLoad, "cannot load method '" + method_ + "'");
  provide_outputs();
  if (settings_.debug_bytes) {
    debug_sink_ = std::make_unique<DebugSink>(*settings_.debug_bytes);
    auto* tracer = static_cast<ETDumpGen*>(program_->module().event_tracer());
    tracer->set_data_sink(debug_sink_.get());
    tracer->set_event_tracer_debug_level(EventTracerDebugLogLevel::kIntermediateOutputs);
  }
}

void Model::provide_inputs(const std::vector<TensorSpec>& specs) {
  const auto described = program_->meta(method_);
  for (size_t i = 0; i < specs.size(); ++i) {
    const auto info = described.input_tensor_meta(i);
    if (!info.ok()) fail(Stage::kLoad, "cannot describe input " + std::to_string(i), info.error());
    if (settings_.shared_buffer && info->is_memory_planned()) refuse_planned("input", i);
    any_planned_input_ = any_planned_input_ || info->is_memory_planned();
    input_memory_.emplace_back(specs[i].nbytes, settings_.shared_buffer);
    tensors_.push_back(
        executorch::extension::from_blob(input_memory_.back().data(), sizes_of(specs[i]), info->scalar_type()));
    input_values_.emplace_back(tensors_.back());
  }
}

void Model::provide_outputs() {
  const auto described = program_->meta(method_);
  for (size_t i = 0; i < outputs_.size(); ++i) {
    const auto tag = described.output_tag(i);
    if (!tag.ok() || *tag != Tag::Tensor) continue;
    const auto info = described.output_tensor_meta(i);
    if (!info.ok()) fail(Stage::kLoad, "cannot describe output " + std::to_string(i), info.error());
    if (info->is_memory_planned()) {
      if (settings_.shared_buffer) refuse_planned("output", i);
      continue;
    }
    output_memory_.emplace_back(outputs_[i].nbytes, settings_.shared_buffer);
    tensors_.push_back(
        executorch::extension::from_blob(output_memory_.back().data(), sizes_of(outputs_[i]), info->scalar_type()));
    check(program_->module().set_output(method_, tensors_.back(), i), Stage::kLoad,
          "cannot give output " + std::to_string(i) + " its memory");
  }
}

int64_t Model::execute() {
  forget_errors();
  // Before every execution, outside of the measured time: the memory plan may reuse the bytes of an input after it was
  // read.
  if (!inputs_are_set_) {
    check(program_->module().set_inputs(method_, input_values_), Stage::kExecute, "cannot set the inputs");
    inputs_are_set_ = settings_.inputs_stay && !any_planned_input_;
  }
  const auto start = std::chrono::steady_clock::now();
  auto result = program_->module().execute(method_, std::vector<EValue>{});
  const auto end = std::chrono::steady_clock::now();
  if (!result.ok()) fail(Stage::kExecute, "cannot execute method '" + method_ + "'", result.error());
  results_ = std::move(*result);
  return std::chrono::duration_cast<std::chrono::nanoseconds>(end - start).count();
}

}  // namespace farm
