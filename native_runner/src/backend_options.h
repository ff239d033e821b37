// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <executorch/runtime/backend/backend_options_map.h>
#include <executorch/runtime/backend/options.h>

#include <string>
#include <vector>

#include "flags.h"

namespace farm {

// Options of one backend, in ExecuTorch's layout. ExecuTorch's builder cuts a long key or text silently; this class
// throws Failure at options.
class OptionList {
 public:
  void add(const std::string& key, int value);
  void add(const std::string& key, bool value);
  void add(const std::string& key, const std::string& value);

  bool empty() const { return options_.empty(); }
  executorch::runtime::Span<executorch::runtime::BackendOption> view() { return {options_.data(), options_.size()}; }

 private:
  executorch::runtime::BackendOption& append(const std::string& key);

  std::vector<executorch::runtime::BackendOption> options_;
};

// Options for the backends of a program at load. Module::load copies them.
class LoadOptions {
 public:
  // Paths are relative to the current folder. Throws Failure at options for a value that is too long.
  explicit LoadOptions(const BackendFlags& flags);
  LoadOptions(const LoadOptions&) = delete;
  LoadOptions& operator=(const LoadOptions&) = delete;

  const executorch::runtime::LoadBackendOptionsMap& map() const { return map_; }

 private:
  OptionList qnn_;
  OptionList xnnpack_;
  executorch::runtime::LoadBackendOptionsMap map_;
};

// Options of the process. All are checked, and only QNN's are set: QNN has global state and reads it when its first
// program loads (ExecuTorch 1.5).
class ProcessOptions {
 public:
  // Throws Failure at options for a value that is too long.
  explicit ProcessOptions(const BackendFlags& flags);

  // Sets the options at the first call. Throws Failure at options if a backend is missing, refuses an option, or does
  // not know its name or its type.
  void apply();

 private:
  OptionList qnn_;
  OptionList xnnpack_;
  bool applied_ = false;
};

}  // namespace farm
