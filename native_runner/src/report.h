// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "failure.h"
#include "tensors.h"

namespace farm {

struct Inference {
  int64_t line = 0;
  std::vector<int64_t> warm_up_ns;
  std::vector<int64_t> iterations_ns;
};

// What happened, filled in as it happens, so that a failure still tells what went before.
struct Report {
  Stage stage = Stage::kFlags;  // the one that runs now
  std::optional<Failure> failure;
  std::string method;
  int64_t load_ns = 0;
  std::vector<TensorSpec> inputs;
  std::vector<TensorSpec> outputs;
  std::vector<Inference> inferences;

  int exit_code() const { return failure ? farm::exit_code(failure->stage) : 0; }

  // Mean over all measured executions, in milliseconds; 0 when there was none.
  double mean_ms() const;

  // The layout is in docs/native_runner.md.
  std::string to_json() const;
};

// Mean time as ExecuTorch's scripts read it: a bare number, milliseconds. Throws Failure at outputs.
void write_performance(const Report& report, const std::string& path);

// Throws Failure at outputs.
void write_report(const Report& report, const std::string& path);

}  // namespace farm
