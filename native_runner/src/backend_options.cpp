// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "backend_options.h"

#include <executorch/runtime/backend/interface.h>

#include <array>
#include <cstring>

#include "failure.h"

namespace farm {

namespace {

using executorch::runtime::BackendOption;
using executorch::runtime::Error;
using executorch::runtime::kMaxOptionKeyLength;
using executorch::runtime::kMaxOptionValueLength;
using executorch::runtime::Span;

constexpr char kBackend[] = "QnnBackend";

template <typename T>
void add_given(OptionList* list, const char* name, const std::optional<T>& value) {
  if (value) list->add("qnn_runtime_" + std::string(name), *value);
}

std::string value_text(const BackendOption& option) {
  if (const int* number = std::get_if<int>(&option.value)) return std::to_string(*number);
  if (const auto* text = std::get_if<std::array<char, kMaxOptionValueLength>>(&option.value)) return text->data();
  return "?";
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

void OptionList::add(const std::string& key, const std::string& value) {
  if (value.size() >= kMaxOptionValueLength) {
    throw Failure(Stage::kOptions, "the option " + key + " has a text of " + std::to_string(value.size()) +
                                       " bytes, ExecuTorch takes " + std::to_string(kMaxOptionValueLength - 1) +
                                       ": use a shorter path");
  }
  std::array<char, kMaxOptionValueLength> text{};
  std::memcpy(text.data(), value.c_str(), value.size() + 1);
  append(key).value = text;
}

BackendOptionSet::BackendOptionSet(const BackendFlags& flags) {
  add_given(&qnn_, "log_level", flags.log_level);
  add_given(&qnn_, "htp_performance_mode", flags.htp_performance_mode);
  add_given(&qnn_, "profile_level", flags.profile_level);
  add_given(&qnn_, "lpai_fps", flags.lpai_fps);
  add_given(&qnn_, "lpai_ftrt_ratio", flags.lpai_ftrt_ratio);
  add_given(&qnn_, "lpai_client_perf_type", flags.lpai_client_perf_type);
  add_given(&qnn_, "lpai_affinity", flags.lpai_affinity);
  add_given(&qnn_, "lpai_core_selection", flags.lpai_core_selection);
  add_given(&qnn_, "heap_profiling_path", flags.heap_profiling_path);
  if (qnn_.empty()) return;
  if (const Error error = map_.set_options(kBackend, qnn_.view()); error != Error::Ok) {
    throw Failure(Stage::kOptions, "ExecuTorch takes no options for one more backend: " +
                                       std::string(executorch::runtime::to_string(error)),
                  static_cast<int64_t>(error));
  }
}

void BackendOptionSet::apply() {
  if (applied_) return;
  for (BackendOption& option : qnn_.view()) {
    // One option per call: of several, a refused one leaves it open which of the others hold.
    const Error error = executorch::runtime::set_option(kBackend, Span<BackendOption>(&option, 1));
    if (error == Error::Ok) continue;
    std::string message = "backend " + std::string(kBackend) + " refuses the option " + option.key + "=" +
                          value_text(option) + ": " + executorch::runtime::to_string(error);
    if (error == Error::NotFound) message += ": this runner is built without that backend";
    throw Failure(Stage::kOptions, message, static_cast<int64_t>(error));
  }
  applied_ = true;
}

}  // namespace farm
