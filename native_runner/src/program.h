// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <executorch/extension/module/module.h>
#include <executorch/runtime/core/error.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "failure.h"

namespace farm {

// Checks a program before it is read or loaded. Throws Failure at load for damage, and for weights that methods share
// if the backend cannot load such weights here.
void verify_program(const std::string& path);

// Program whose methods are loaded one by one. Every function throws Failure, with ExecuTorch's code and its first
// logged error.
class Program {
 public:
  // Reads a verified program; throws at load. `options` are copied.
  Program(const std::string& path, const executorch::runtime::LoadBackendOptionsMap& options, bool trace);

  executorch::extension::Module& module() const { return *module_; }

  std::vector<std::string> methods() const;
  // Returns the name of the method with the index of `--method_index`.
  std::string method(int index) const;
  executorch::runtime::MethodMeta meta(const std::string& method) const;

  // Returns the number of a method without inputs; nothing if the program has no such method.
  std::optional<double> number(const std::string& method) const;

  // Returns the ETDump of everything since loading; throws at etdump.
  std::vector<uint8_t> take_etdump() const;

 private:
  std::unique_ptr<executorch::extension::Module> module_;
};

// Throws Failure unless `error` is Error::Ok.
[[noreturn]] void fail(Stage stage, const std::string& what, executorch::runtime::Error error);
void check(executorch::runtime::Error error, Stage stage, const std::string& what);

}  // namespace farm
