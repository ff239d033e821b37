// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <executorch/extension/module/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace farm {

// A small program that stays loaded for a whole session and so keeps the QNN backend up between its jobs: the
// backend goes down with the last method that uses it, and its start costs many times the load of a program.
//
// ExecuTorch gives two methods with the same context binary one delegate, and destroys it with the first of
// them (1.5, QnnExecuTorchBackend). It tells binaries apart by a signature in front of them, so the anchor
// gets signatures of its own: a job may be the same program.
class Anchor {
 public:
  // Loads the first method of a program. Throws Failure at load.
  void load(const std::string& path, const executorch::runtime::LoadBackendOptionsMap& options);

  // The QNN backend is up because of this.
  bool holds_qnn() const { return holds_qnn_; }

 private:
  std::vector<uint8_t> program_;  // outlives the module, which reads from it
  std::unique_ptr<executorch::extension::Module> module_;
  bool holds_qnn_ = false;
};

}  // namespace farm
