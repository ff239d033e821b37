// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "failure.h"

namespace farm {

// Runtime options of the backend. Absent: what the .pte was compiled with stays. They hold for the whole
// process, so that all jobs of a session share them.
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

  // XNNPACK's, which it reads at every load.
  std::optional<int> workspace_sharing_mode;
  std::optional<bool> weight_cache_enabled;
  std::optional<std::string> packed_cache_path;
};

// What the command line says, or the line of a job. Names and defaults are those of ExecuTorch's
// qnn_executor_runner.
struct Flags {
  std::string working_folder;  // "" is where the process was started
  std::string model_path = "model.pte";
  std::string input_list_path = "input_list.txt";
  std::string input_shape_path;
  std::string output_shape_path;
  std::string output_folder_path = "outputs";
  int iteration = 1;
  int warm_up = 0;
  int method_index = 0;
  bool shared_buffer = false;
  int timeout_ms = 0;  // 0 is no limit
  std::string performance_output_path = "inference_speed.txt";
  std::string result_path = "result.json";

  // Absent: tracing costs time and memory, so an ETDump is made only when it is asked for.
  std::optional<std::string> etdump_path;
  bool dump_intermediate_outputs = false;
  std::string debug_output_path = "debug_output.bin";
  int debug_buffer_size = 100'000'000;  // bytes

  // A run that generates text; without `generate` the others do not count.
  std::optional<int> generate;  // tokens after each prompt, at most
  std::string stop;
  std::optional<int> seconds;
  std::string tokens_path;
  std::optional<std::string> prefill_method;  // absent: prefill_forward, where there is one
  std::string decode_method = "kv_forward";
  bool told = false;

  std::string carry;

  BackendFlags backend;

  // Started by the name of ExecuTorch's own runner, which executes once on made up inputs where the list is missing.
  bool stands_in = false;

  bool serve = false;
  std::string keep_loaded;  // of a session: a program that stays loaded, or ""
  bool version = false;
  bool help = false;

  // Where the ETDump goes, or "". Intermediate outputs cannot be read without one.
  std::string etdump_file() const { return etdump_path.value_or(dump_intermediate_outputs ? "etdump.etdp" : ""); }
  bool trace() const { return dump_intermediate_outputs || !etdump_file().empty(); }
};

// The flags, and the first thing wrong with them. Parsing goes on after an error, because --result_path
// tells where the error is to be written.
struct ParsedFlags {
  Flags flags;
  std::optional<Failure> failure;
};

// The command line, without the program's name. `--serve` takes backend options only.
ParsedFlags parse_command_line(const std::vector<std::string>& arguments);

// The line of a job in a session, and whether its backend options are those of the session: QNN's are global to the
// process.
ParsedFlags parse_job(const std::vector<std::string>& arguments, const BackendFlags& session);

std::string flags_help();

}  // namespace farm
