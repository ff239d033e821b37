// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "program.h"

#include <executorch/devtools/etdump/etdump_flatcc.h>
#include <executorch/extension/data_loader/file_data_loader.h>

#include <algorithm>
#include <cstdlib>

#include "platform.h"
#include "weight_sharing.h"

namespace farm {

namespace {

using executorch::etdump::ETDumpGen;
using executorch::etdump::ETDumpResult;
using executorch::extension::FileDataLoader;
using executorch::extension::Module;
using executorch::runtime::Error;
using executorch::runtime::MethodMeta;

using Verification = executorch::runtime::Program::Verification;

}  // namespace

void fail(Stage stage, const std::string& what, Error error) {
  std::string message = what + ": " + executorch::runtime::to_string(error);
  if (const std::string logged = first_error(); !logged.empty()) message += ": " + logged;
  throw Failure(stage, message, static_cast<int64_t>(error));
}

void check(Error error, Stage stage, const std::string& what) {
  if (error != Error::Ok) fail(stage, what, error);
}

void verify_program(const std::string& path) {
  forget_errors();
  auto loader = FileDataLoader::from(path.c_str());
  check(loader.error(), Stage::kLoad, "cannot load '" + path + "'");
  const auto program = executorch::runtime::Program::load(&*loader, Verification::InternalConsistency);
  check(program.error(), Stage::kLoad, "cannot load '" + path + "'");
  refuse_shared_weights(path);
}

Program::Program(const std::string& path, const executorch::runtime::LoadBackendOptionsMap& options, bool trace) {
  forget_errors();
  module_ = std::make_unique<Module>(path, Module::LoadMode::File, trace ? std::make_unique<ETDumpGen>() : nullptr);
  // The same load mode as in ExecuTorch's runners, so that load times are comparable.
  constexpr auto kVerification = Verification::Minimal;
  check(options.size() > 0 ? module_->load(options, kVerification) : module_->load(kVerification), Stage::kLoad,
        "cannot load '" + path + "'");
}

std::vector<std::string> Program::methods() const {
  const auto count = module_->num_methods();
  if (!count.ok()) fail(Stage::kLoad, "cannot count the methods", count.error());
  std::vector<std::string> names;
  for (size_t i = 0; i < *count; ++i) {
    const auto name = module_->program()->get_method_name(i);
    if (!name.ok()) fail(Stage::kLoad, "cannot name method " + std::to_string(i), name.error());
    names.emplace_back(*name);
  }
  return names;
}

std::string Program::method(int index) const {
  const std::vector<std::string> names = methods();
  const auto wanted = static_cast<size_t>(index);
  if (wanted < names.size()) return names[wanted];
  throw Failure(Stage::kLoad, "--method_index: " + std::to_string(index) + " is too large: the program has " +
                                  std::to_string(names.size()) + " method(s)");
}

MethodMeta Program::meta(const std::string& method) const {
  const auto meta = module_->program()->method_meta(method.c_str());
  if (!meta.ok()) fail(Stage::kLoad, "cannot describe method '" + method + "'", meta.error());
  return *meta;
}

std::optional<double> Program::number(const std::string& method) const {
  const std::vector<std::string> names = methods();
  if (std::find(names.begin(), names.end(), method) == names.end()) return std::nullopt;
  // Another module: constant methods are not part of a trace.
  Module module(module_->program());
  const auto values = module.execute(method);
  if (!values.ok()) fail(Stage::kLoad, "cannot ask '" + method + "'", values.error());
  if (values->size() == 1) {
    const auto& value = values->front();
    if (value.isInt()) return static_cast<double>(value.toInt());
    if (value.isDouble()) return value.toDouble();
    if (value.isBool()) return value.toBool() ? 1 : 0;
  }
  throw Failure(Stage::kLoad, "'" + method + "' does not give one number");
}

std::vector<uint8_t> Program::take_etdump() const {
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
