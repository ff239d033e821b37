// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <executorch/runtime/backend/backend_options_map.h>
#include <executorch/runtime/backend/options.h>

#include <string>
#include <vector>

#include "flags.h"

namespace farm {

// Options of one backend, in the layout that ExecuTorch takes. Its own builder cuts a long key or text
// without a word; here both throw Failure at options.
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

// What the backends of one program get when it loads. Module::load copies it: it may go when that returns.
class LoadOptions {
 public:
  // A path is relative to the current folder. Throws Failure at options for what does not fit.
  explicit LoadOptions(const BackendFlags& flags);
  LoadOptions(const LoadOptions&) = delete;
  LoadOptions& operator=(const LoadOptions&) = delete;

  const executorch::runtime::LoadBackendOptionsMap& map() const { return map_; }

 private:
  OptionList qnn_;
  OptionList xnnpack_;
  executorch::runtime::LoadBackendOptionsMap map_;
};

// The options of the process, which are checked, and set for the backend that reads no others: QNN has a state that is
// global to the process, and looks at it when its first program loads (ExecuTorch 1.5).
class ProcessOptions {
 public:
  // Throws Failure at options for what does not fit.
  explicit ProcessOptions(const BackendFlags& flags);

  // Sets them, the first time it is called. Throws Failure at options when a backend refuses one, does not know its
  // name or its type, or is not there.
  void apply();

 private:
  OptionList qnn_;
  OptionList xnnpack_;
  bool applied_ = false;
};

}  // namespace farm
