// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "backend_options.h"

#include <executorch/runtime/backend/interface.h>

#include <array>
#include <cstring>
#include <filesystem>

#include "failure.h"

namespace farm {

namespace {

using executorch::runtime::BackendOption;
using executorch::runtime::Error;
using executorch::runtime::kMaxOptionKeyLength;
using executorch::runtime::kMaxOptionValueLength;
using executorch::runtime::OptionValue;
using executorch::runtime::Span;

using Text = std::array<char, kMaxOptionValueLength>;

constexpr char kQnn[] = "QnnBackend";
constexpr char kXnnpack[] = "XnnpackBackend";

template <typename T>
void add_given(OptionList* list, const std::string& name, const std::optional<T>& value) {
  if (value) list->add(name, *value);
}

OptionList qnn_options(const BackendFlags& flags) {
  OptionList list;
  const std::string prefix = "qnn_runtime_";
  add_given(&list, prefix + "log_level", flags.log_level);
  add_given(&list, prefix + "htp_performance_mode", flags.htp_performance_mode);
  add_given(&list, prefix + "profile_level", flags.profile_level);
  add_given(&list, prefix + "lpai_fps", flags.lpai_fps);
  add_given(&list, prefix + "lpai_ftrt_ratio", flags.lpai_ftrt_ratio);
  add_given(&list, prefix + "lpai_client_perf_type", flags.lpai_client_perf_type);
  add_given(&list, prefix + "lpai_affinity", flags.lpai_affinity);
  add_given(&list, prefix + "lpai_core_selection", flags.lpai_core_selection);
  add_given(&list, prefix + "heap_profiling_path", flags.heap_profiling_path);
  return list;
}

OptionList xnnpack_options(const BackendFlags& flags) {
  OptionList list;
  add_given(&list, "workspace_sharing_mode", flags.workspace_sharing_mode);
  add_given(&list, "weight_cache_enabled", flags.weight_cache_enabled);
  if (!flags.packed_cache_path) return list;
  if (!flags.weight_cache_enabled.value_or(false)) {
    throw Failure(Stage::kOptions, "--packed_cache_path has no effect without --weight_cache_enabled");
  }
  // XNNPACK identifies its caches by this text: the same relative path in two jobs of a session must not be one cache.
  list.add("packed_cache_path", std::filesystem::absolute(*flags.packed_cache_path).string());
  return list;
}

std::string value_text(const BackendOption& option) {
  if (const bool* boolean = std::get_if<bool>(&option.value)) return *boolean ? "true" : "false";
  if (const int* number = std::get_if<int>(&option.value)) return std::to_string(*number);
  return std::get<Text>(option.value).data();
}

const char* type_name(const BackendOption& option) {
  return std::holds_alternative<bool>(option.value) ? "bool" : std::holds_alternative<int>(option.value) ? "int" : "text";
}

[[noreturn]] void refuse(const char* backend, const BackendOption& option, const std::string& why, Error error) {
  std::string message = "backend " + std::string(backend) + " refuses the option " + option.key + "=" +
                        value_text(option) + ": " + why;
  if (error == Error::NotFound) message += ": this runner is built without that backend";
  throw Failure(Stage::kOptions, message, static_cast<int64_t>(error));
}

// Backends that read options at load silently use the default for an unknown name or type. get_option writes the value
// of a known option, and leaves an unknown one unchanged.
void require_known(const char* backend, const BackendOption& option) {
  for (const OptionValue& other : {OptionValue(false), OptionValue(0), OptionValue(Text{})}) {
    if (other.index() == option.value.index()) continue;
    BackendOption asked = option;
    asked.value = other;
    const Error error = executorch::runtime::get_option(backend, Span<BackendOption>(&asked, 1));
    if (error != Error::Ok) refuse(backend, option, executorch::runtime::to_string(error), error);
    if (asked.value.index() == option.value.index()) return;
    if (asked.value.index() == other.index()) continue;
    const std::string types = std::string(type_name(asked)) + ", not " + type_name(option);
    refuse(backend, option, "it takes a value of type " + types, Error::InvalidArgument);
  }
  refuse(backend, option, "it has no such option", Error::InvalidArgument);
}

}  // namespace

BackendOption& OptionList::append(const std::string& key) {
  if (key.size() >= kMaxOptionKeyLength) {
    throw Failure(Stage::kOptions, "the option name '" + key + "' has " + std::to_string(key.size()) +
                                       " characters, ExecuTorch takes " + std::to_string(kMaxOptionKeyLength - 1));
  }
  options_.emplace_back();
  std::memcpy(options_.back().key, key.c_str(), key.size() + 1);
  return options_.back();
}

void OptionList::add(const std::string& key, int value) { append(key).value = value; }

void OptionList::add(const std::string& key, bool value) { append(key).value = value; }

void OptionList::add(const std::string& key, const std::string& value) {
  if (value.size() >= kMaxOptionValueLength) {
    throw Failure(Stage::kOptions, "the option " + key + " has a text of " + std::to_string(value.size()) +
                                       " bytes, ExecuTorch takes " + std::to_string(kMaxOptionValueLength - 1) +
                                       ": use a shorter path");
  }
  Text text{};
  std::memcpy(text.data(), value.c_str(), value.size() + 1);
  append(key).value = text;
}

LoadOptions::LoadOptions(const BackendFlags& flags) : qnn_(qnn_options(flags)), xnnpack_(xnnpack_options(flags)) {
  const std::pair<const char*, OptionList*> all[] = {{kQnn, &qnn_}, {kXnnpack, &xnnpack_}};
  for (const auto& [backend, list] : all) {
    if (list->empty()) continue;
    if (const Error error = map_.set_options(backend, list->view()); error != Error::Ok) {
      throw Failure(Stage::kOptions, "ExecuTorch takes no options for one more backend: " +
                                         std::string(executorch::runtime::to_string(error)),
                    static_cast<int64_t>(error));
    }
  }
}

ProcessOptions::ProcessOptions(const BackendFlags& flags)
    : qnn_(qnn_options(flags)), xnnpack_(xnnpack_options(flags)) {}

void ProcessOptions::apply() {
  if (applied_) return;
  for (BackendOption& option : qnn_.view()) {
    // Separate calls: after a refused call with several options it is unknown which of them were set.
    const Error error = executorch::runtime::set_option(kQnn, Span<BackendOption>(&option, 1));
    if (error != Error::Ok) refuse(kQnn, option, executorch::runtime::to_string(error), error);
  }
  for (const BackendOption& option : xnnpack_.view()) require_known(kXnnpack, option);
  applied_ = true;
}

}  // namespace farm
