// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "failure.h"

namespace farm {

// Runtime options of the backend. An absent option keeps the value that the .pte was compiled with. The options hold
// for the whole process: all jobs of a session share them.
struct BackendFlags {
  std::optional<int> log_level;
  std::optional<int> htp_performance_mode;
  std::optional<int> profile_level;
  std::optional<int> lpai_fps;
  std::optional<int> lpai_ftrt_ratio;
  std::optional<int> lpai_client_perf_type;
  std::optional<int> lpai_affinity;
  std::optional<int> lpai_core_selection;
  std::optional<std::string> heap_profiling_path;

  // Options of XNNPACK, which reads them at every load.
  std::optional<int> workspace_sharing_mode;
  std::optional<bool> weight_cache_enabled;
  std::optional<std::string> packed_cache_path;
};

// Flags of the command line, or of a job's line. Names and defaults are as in ExecuTorch's qnn_executor_runner.
struct Flags {
  std::string working_folder;  // "": the folder in which the process was started
  std::string model_path = "model.pte";
  std::string input_list_path = "input_list.txt";
  std::string input_shape_path;
  std::string output_shape_path;
  std::string output_folder_path = "outputs";
  int iteration = 1;
  int warm_up = 0;
  int method_index = 0;
  bool shared_buffer = false;
  int timeout_ms = 0;  // 0: no limit
  std::string performance_output_path = "inference_speed.txt";
  std::string result_path = "result.json";

  // Absent: no ETDump, because tracing costs time and memory.
  std::optional<std::string> etdump_path;
  bool dump_intermediate_outputs = false;
  std::string debug_output_path = "debug_output.bin";
  int debug_buffer_size = 100'000'000;  // bytes

  // Flags of a run that generates text; all others need `generate`.
  std::optional<int> generate;  // most tokens after each prompt
  std::string stop;
  std::optional<int> seconds;
  std::string tokens_path;
  std::optional<std::string> prefill_method;  // absent: prefill_forward, if the program has it
  std::string decode_method = "kv_forward";
  bool likelihoods = false;

  std::string carry;

  BackendFlags backend;

  // True if the process has the name of ExecuTorch's runner, which executes once on made-up inputs without an input
  // list.
  bool stands_in = false;

  bool serve = false;
  std::string keep_loaded;  // session only: program that stays loaded, or ""
  bool version = false;
  bool help = false;

  // Path of the ETDump, or "". Intermediate outputs cannot be read without an ETDump.
  std::string etdump_file() const { return etdump_path.value_or(dump_intermediate_outputs ? "etdump.etdp" : ""); }
  bool trace() const { return dump_intermediate_outputs || !etdump_file().empty(); }
};

// Flags with their first error. Parsing continues after an error, because --result_path names the file for the error.
struct ParsedFlags {
  Flags flags;
  std::optional<Failure> failure;
};

// Parses the command line, without the program's name. `--serve` takes backend options only.
ParsedFlags parse_command_line(const std::vector<std::string>& arguments);

// Parses the line of a job in a session. Its backend options must be equal to the session's: QNN's are global to the
// process.
ParsedFlags parse_job(const std::vector<std::string>& arguments, const BackendFlags& session);

std::string flags_help();

}  // namespace farm
