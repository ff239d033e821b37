// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <executorch/extension/module/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace farm {

// Small program that stays loaded for a whole session and keeps the QNN backend started between jobs: the backend stops
// with the last method that uses it, and its start takes many times longer than the load of a program.
//
// ExecuTorch gives two methods with the same context binary one delegate, and destroys it with the first of them (1.5,
// QnnExecuTorchBackend). It identifies binaries by a signature in front of them, so that the anchor gets signatures of
// its own: a job may have the same program.
class Anchor {
 public:
  // Loads the first method of a program. Throws Failure at load.
  void load(const std::string& path, const executorch::runtime::LoadBackendOptionsMap& options);

  // Returns true if the anchor keeps the QNN backend started.
  bool holds_qnn() const { return holds_qnn_; }

 private:
  std::vector<uint8_t> program_;  // outlives the module, which reads from it
  std::unique_ptr<executorch::extension::Module> module_;
  bool holds_qnn_ = false;
};

}  // namespace farm
