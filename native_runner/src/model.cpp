// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "model.h"

#include <executorch/devtools/etdump/etdump_flatcc.h>
#include <executorch/extension/data_loader/file_data_loader.h>

#include <chrono>
#include <cstdlib>

#include "failure.h"
#include "platform.h"

namespace farm {

namespace {

using executorch::aten::SizesType;
using executorch::etdump::ETDumpGen;
using executorch::etdump::ETDumpResult;
using executorch::extension::FileDataLoader;
using executorch::extension::Module;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::EventTracerDebugLogLevel;
using executorch::runtime::MethodMeta;
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

[[noreturn]] void refuse_planned(const char* what, size_t index) {
  throw Failure(Stage::kLoad, "--shared_buffer: the program brings the memory of " + std::string(what) + " " +
                                  std::to_string(index) +
                                  ": compile it with alloc_graph_input=False and alloc_graph_output=False");
}

}  // namespace

void verify_program(const std::string& path) {
  forget_errors();
  auto loader = FileDataLoader::from(path.c_str());
  check(loader.error(), Stage::kLoad, "cannot load '" + path + "'");
  const auto program = Program::load(&*loader, Program::Verification::InternalConsistency);
  check(program.error(), Stage::kLoad, "cannot load '" + path + "'");
}

Model::Model(const std::string& path, int method_index, const executorch::runtime::LoadBackendOptionsMap& options,
             const ModelSettings& settings)
    : settings_(settings) {
  forget_errors();
  module_ = std::make_unique<Module>(path, Module::LoadMode::File,
                                     settings.trace ? std::make_unique<ETDumpGen>() : nullptr);
  // As ExecuTorch's own runners load: what a load takes there is what is measured here.
  constexpr auto kVerification = Program::Verification::Minimal;
  check(options.size() > 0 ? module_->load(options, kVerification) : module_->load(kVerification), Stage::kLoad,
        "cannot load '" + path + "'");
  describe(method_index);
}

void Model::describe(int method_index) {
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
  inputs_ = input_specs(meta());
  outputs_ = output_specs(meta());
}

MethodMeta Model::meta() const {
  const auto meta = module_->program()->method_meta(method_.c_str());
  if (!meta.ok()) fail(Stage::kLoad, "cannot describe method '" + method_ + "'", meta.error());
  return *meta;
}

void Model::load(const std::vector<TensorSpec>& inputs) {
  forget_errors();
  provide_inputs(inputs);
  check(module_->load_method(method_), Stage::kLoad, "cannot load method '" + method_ + "'");
  provide_outputs();
  if (settings_.debug_bytes) {
    debug_sink_ = std::make_unique<DebugSink>(*settings_.debug_bytes);
    auto* tracer = static_cast<ETDumpGen*>(module_->event_tracer());
    tracer->set_data_sink(debug_sink_.get());
    tracer->set_event_tracer_debug_level(EventTracerDebugLogLevel::kIntermediateOutputs);
  }
}

void Model::provide_inputs(const std::vector<TensorSpec>& specs) {
  const MethodMeta described = meta();
  for (size_t i = 0; i < specs.size(); ++i) {
    const auto info = described.input_tensor_meta(i);
    if (!info.ok()) fail(Stage::kLoad, "cannot describe input " + std::to_string(i), info.error());
    if (settings_.shared_buffer && info->is_memory_planned()) refuse_planned("input", i);
    input_memory_.emplace_back(specs[i].nbytes, settings_.shared_buffer);
    tensors_.push_back(
        executorch::extension::from_blob(input_memory_.back().data(), sizes_of(specs[i]), info->scalar_type()));
    input_values_.emplace_back(tensors_.back());
  }
}

void Model::provide_outputs() {
  const MethodMeta described = meta();
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
    check(module_->set_output(method_, tensors_.back(), i), Stage::kLoad,
          "cannot give output " + std::to_string(i) + " its memory");
  }
}

int64_t Model::execute() {
  forget_errors();
  // Before every execution, and outside the time: the memory plan may reuse an input's bytes once it is read.
  check(module_->set_inputs(method_, input_values_), Stage::kExecute, "cannot set the inputs");
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
