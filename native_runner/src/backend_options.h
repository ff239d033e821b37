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
  void add(const std::string& key, const std::string& value);

  bool empty() const { return options_.empty(); }
  executorch::runtime::Span<executorch::runtime::BackendOption> view() {
    return {options_.data(), options_.size()};
  }

 private:
  executorch::runtime::BackendOption& append(const std::string& key);

  std::vector<executorch::runtime::BackendOption> options_;
};

// The runtime options that were passed, for both ways a backend may read them: at load, and from a state
// that is global to the process. QNN reads the latter only (ExecuTorch 1.5), when its first program loads.
class BackendOptionSet {
 public:
  // Throws Failure at options for what does not fit.
  explicit BackendOptionSet(const BackendFlags& flags);
  BackendOptionSet(const BackendOptionSet&) = delete;
  BackendOptionSet& operator=(const BackendOptionSet&) = delete;

  // Sets them for the process, the first time it is called. Throws Failure at options when the backend refuses one, or is not there.
  void apply();

  // For Module::load, which copies it.
  const executorch::runtime::LoadBackendOptionsMap& map() const { return map_; }

 private:
  OptionList qnn_;
  bool applied_ = false;
  executorch::runtime::LoadBackendOptionsMap map_;
};

}  // namespace farm
