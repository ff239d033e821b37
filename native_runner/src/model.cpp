// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "model.h"

#include <executorch/devtools/etdump/etdump_flatcc.h>

#include <chrono>
#include <cstdlib>

#include "failure.h"
#include "platform.h"

namespace farm {

namespace {

using executorch::aten::SizesType;
using executorch::etdump::ETDumpGen;
using executorch::etdump::ETDumpResult;
using executorch::extension::Module;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::Program;
using executorch::runtime::Tag;

[[noreturn]] void fail(Stage stage, const std::string& what, Error error) {
  std::string message = what + ": " + executorch::runtime::to_string(error);
  if (const std::string logged = first_error(); !logged.empty()) message += ": " + logged;
  throw Failure(stage, message, static_cast<int64_t>(error));
}

void check(Error error, Stage stage, const std::string& what) {
  if (error != Error::Ok) fail(stage, what, error);
}

std::vector<SizesType> sizes_of(const TensorSpec& spec) { return {spec.shape.begin(), spec.shape.end()}; }

}  // namespace

Model::Model(const std::string& path, int method_index, bool trace) {
  forget_errors();
  module_ = std::make_unique<Module>(path, Module::LoadMode::File, trace ? std::make_unique<ETDumpGen>() : nullptr);
  // A truncated or damaged program must be refused before anything reads it.
  check(module_->load(Program::Verification::InternalConsistency), Stage::kLoad, "cannot load '" + path + "'");
  load_method(method_index);
}

void Model::load_method(int method_index) {
  const auto count = module_->num_methods();
  if (!count.ok()) fail(Stage::kLoad, "cannot count the methods", count.error());
  const auto index = static_cast<size_t>(method_index);
  if (index >= *count) {
    throw Failure(Stage::kLoad, "--method_index: " + std::to_string(method_index) + " is too large: the program has " +
                                    std::to_string(*count) + " method(s)");
  }
  const auto name = module_->program()->get_method_name(index);
  if (!name.ok()) fail(Stage::kLoad, "cannot name method " + std::to_string(index), name.error());
  method_ = *name;
  const auto meta = module_->method_meta(method_);
  if (!meta.ok()) fail(Stage::kLoad, "cannot describe method '" + method_ + "'", meta.error());
  inputs_ = input_specs(*meta);
  outputs_ = output_specs(*meta);
  for (size_t i = 0; i < inputs_.size(); ++i) input_types_.push_back(meta->input_tensor_meta(i)->scalar_type());
  check(module_->load_method(method_), Stage::kLoad, "cannot load method '" + method_ + "'");
  provide_outputs();
}

void Model::provide_outputs() {
  const auto meta = module_->method_meta(method_);
  if (!meta.ok()) fail(Stage::kLoad, "cannot describe method '" + method_ + "'", meta.error());
  for (size_t i = 0; i < outputs_.size(); ++i) {
    const auto tag = meta->output_tag(i);
    if (!tag.ok() || *tag != Tag::Tensor) continue;
    const auto info = meta->output_tensor_meta(i);
    if (!info.ok() || info->is_memory_planned()) continue;
    output_memory_.emplace_back(outputs_[i].nbytes);
    output_tensors_.push_back(executorch::extension::from_blob(output_memory_.back().data(), sizes_of(outputs_[i]),
                                                               info->scalar_type()));
    check(module_->set_output(method_, output_tensors_.back(), i), Stage::kLoad,
          "cannot give output " + std::to_string(i) + " its memory");
  }
}

void Model::bind_inputs(std::vector<std::vector<uint8_t>>* bytes) {
  bound_.clear();
  bound_values_.clear();
  for (size_t i = 0; i < inputs_.size(); ++i) {
    bound_.push_back(
        executorch::extension::from_blob((*bytes)[i].data(), sizes_of(inputs_[i]), input_types_[i]));
    bound_values_.emplace_back(bound_.back());
  }
}

int64_t Model::execute() {
  forget_errors();
  // Before every execution, and outside the time: the memory plan may reuse an input's bytes once it is read.
  check(module_->set_inputs(method_, bound_values_), Stage::kExecute, "cannot set the inputs");
  const auto start = std::chrono::steady_clock::now();
  const auto result = module_->execute(method_, std::vector<EValue>{});
  const auto end = std::chrono::steady_clock::now();
  if (!result.ok()) fail(Stage::kExecute, "cannot execute method '" + method_ + "'", result.error());
  return std::chrono::duration_cast<std::chrono::nanoseconds>(end - start).count();
}

std::vector<EValue> Model::results() {
  auto values = module_->get_outputs(method_);
  if (!values.ok()) fail(Stage::kOutputs, "cannot get the outputs", values.error());
  return std::move(*values);
}

std::vector<uint8_t> Model::take_etdump() {
  auto* tracer = static_cast<ETDumpGen*>(module_->event_tracer());
  if (tracer == nullptr) throw Failure(Stage::kEtdump, "nothing was traced");
  const ETDumpResult dump = tracer->get_etdump_data();
  if (dump.buf == nullptr || dump.size == 0) throw Failure(Stage::kEtdump, "ExecuTorch made no ETDump");
  const auto* bytes = static_cast<const uint8_t*>(dump.buf);
  std::vector<uint8_t> content(bytes, bytes + dump.size);
  std::free(dump.buf);
  return content;
}

}  // namespace farm
