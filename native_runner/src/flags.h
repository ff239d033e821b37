// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <optional>
#include <string>

#include "failure.h"

namespace farm {

// What the command line says. Names and defaults are those of ExecuTorch's qnn_executor_runner.
struct Flags {
  std::string model_path = "model.pte";
  std::string input_list_path = "input_list.txt";
  std::string output_folder_path = "outputs";
  int iteration = 1;
  int warm_up = 0;
  int method_index = 0;
  std::string performance_output_path = "inference_speed.txt";
  std::string result_path = "result.json";

  // Absent: tracing costs time and memory, so an ETDump is made only when it is asked for.
  std::optional<std::string> etdump_path;

  // Runtime options of the backend. Absent: what the .pte was compiled with stays.
  std::optional<int> log_level;
  std::optional<int> htp_performance_mode;
  std::optional<int> profile_level;

  bool version = false;
  bool help = false;
};

// The flags, and the first thing wrong with them. Parsing goes on after an error, because --result_path
// tells where the error is to be written.
struct ParsedFlags {
  Flags flags;
  std::optional<Failure> failure;
};

ParsedFlags parse_flags(int argc, const char* const* argv);

std::string flags_help();

}  // namespace farm
