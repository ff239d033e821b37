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

// Looks at all of a program for what must be refused before anything reads it, or loads it: damage, and weights that its
// methods share where no backend here can do that. Throws Failure at load.
void verify_program(const std::string& path);

// A program, whose methods are loaded one by one. Every function throws Failure, with ExecuTorch's code and its first
// logged error.
class Program {
 public:
  // Reads a program that was verified; throws at load. `options` may go after it.
  Program(const std::string& path, const executorch::runtime::LoadBackendOptionsMap& options, bool trace);

  executorch::extension::Module& module() const { return *module_; }

  std::vector<std::string> methods() const;
  // Of the method with that index: `--method_index`.
  std::string method(int index) const;
  executorch::runtime::MethodMeta meta(const std::string& method) const;

  // What a method without inputs that returns one number says; nothing where there is no such method.
  std::optional<double> number(const std::string& method) const;

  // The ETDump of everything since loading; throws at etdump.
  std::vector<uint8_t> take_etdump() const;

 private:
  std::unique_ptr<executorch::extension::Module> module_;
};

// Throws Failure unless `error` is none.
[[noreturn]] void fail(Stage stage, const std::string& what, executorch::runtime::Error error);
void check(executorch::runtime::Error error, Stage stage, const std::string& what);

}  // namespace farm
