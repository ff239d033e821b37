// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "flags.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <variant>

#include "carry.h"
#include "token_files.h"

namespace farm {

namespace {

using Target = std::variant<bool*, int*, std::string*, std::optional<bool>*, std::optional<int>*,
                            std::optional<std::string>*>;

// Lines in which a flag is valid.
enum class Place {
  kRun,      // single runs, and jobs of a session
  kBackend,  // single runs, and the start of a session; a job may repeat the session's value
  kProcess,  // command line
};

struct Flag {
  const char* name;
  Place place;
  Target target;
  const char* help;
  int least = 0;
  int most = 0;
  bool given = false;

  bool is_bool() const {
    return std::holds_alternative<bool*>(target) || std::holds_alternative<std::optional<bool>*>(target);
  }
};

std::vector<Flag> table(Flags* flags) {
  BackendFlags* backend = &flags->backend;
  return {
      {"model_path", Place::kRun, &flags->model_path, "the .pte to run"},
      {"input_list_path", Place::kRun, &flags->input_list_path,
       "one inference per line: raw files separated by one space"},
      {"output_folder_path", Place::kRun, &flags->output_folder_path,
       "existing folder for output_{line}_{index}.raw"},
      {"iteration", Place::kRun, &flags->iteration, "measured executions per inference", 1, INT_MAX},
      {"warm_up", Place::kRun, &flags->warm_up, "executions before those", 0, INT_MAX},
      {"method_index", Place::kRun, &flags->method_index, "which method of the .pte", 0, INT_MAX},
      {"input_shape_path", Place::kRun, &flags->input_shape_path,
       "shapes of the inputs, where they are below the .pte's bounds: one tensor per line, `1, 3, 16, 16`"},
      {"output_shape_path", Place::kRun, &flags->output_shape_path, "shapes of the outputs that go with them"},
      {"shared_buffer", Place::kRun, &flags->shared_buffer,
       "inputs and outputs in memory that the DSP shares (rpcmem); the .pte must leave their memory to its caller"},
      {"etdump_path", Place::kRun, &flags->etdump_path, "write an ETDump here; none is made without this flag"},
      {"dump_intermediate_outputs", Place::kRun, &flags->dump_intermediate_outputs,
       "write the values between operators, of a .pte compiled for it; makes an ETDump, etdump.etdp by default"},
      {"debug_output_path", Place::kRun, &flags->debug_output_path, "file of these values"},
      {"debug_buffer_size", Place::kRun, &flags->debug_buffer_size, "most bytes of these values", 1, INT_MAX},
      {"performance_output_path", Place::kRun, &flags->performance_output_path,
       "mean time of one execution in ms, a bare number"},
      {"result_path", Place::kRun, &flags->result_path, "report of the run, as JSON"},
      {"working_folder", Place::kRun, &flags->working_folder, "change into it first: other paths are relative to it"},
      {"timeout_ms", Place::kRun, &flags->timeout_ms, "time limit of the run, which ends the process; 0 is no limit", 0,
       INT_MAX},
      {"carry", Place::kRun, &flags->carry,
       "state: `1:2` gives input 2 of a line output 1 of the line before it, and the first line its file; several are "
       "separated by commas"},
      {"generate", Place::kRun, &flags->generate,
       "the .pte is a static decoder: most tokens to generate after each prompt, greedy. A line of the input list has "
       "the prompt and, for logits, a sequence: int32 token ids, -1 after their end",
       1, INT_MAX},
      {"stop", Place::kRun, &flags->stop, "with --generate: tokens that end a text, `2,7`"},
      {"seconds", Place::kRun, &flags->seconds,
       "with --generate: repeat the prompts for so many seconds", 1, 86400},
      {"tokens_path", Place::kRun, &flags->tokens_path,
       "with --generate: write every token here at once, `line token`"},
      {"likelihoods", Place::kRun, &flags->likelihoods,
       "with --generate: write two numbers for each position of a sequence in place of the logits: the natural "
       "logarithms of the probability of the next token, and of the likeliest"},
      {"decode_method", Place::kRun, &flags->decode_method, "with --generate: method for single tokens"},
      {"prefill_method", Place::kRun, &flags->prefill_method,
       "with --generate: method for prompts, by default prefill_forward if there is one; empty for none"},
      {"log_level", Place::kBackend, &backend->log_level,
       "QNN log level: error 1, warn 2, info 3, verbose 4, debug 5", 1, 5},
      {"htp_performance_mode", Place::kBackend, &backend->htp_performance_mode,
       "HTP performance: default 0, sustained_high 1, burst 2, high 3, power_saver 4, low_power_saver 5, "
       "high_power_saver 6, low_balanced 7, balanced 8",
       0, 8},
      {"profile_level", Place::kBackend, &backend->profile_level, "QNN profiling: off 0, basic 1, detailed 2", 0, 2},
      {"lpai_fps", Place::kBackend, &backend->lpai_fps, "LPAI: inferences per second", 1, INT_MAX},
      {"lpai_ftrt_ratio", Place::kBackend, &backend->lpai_ftrt_ratio, "LPAI: faster than real time by this ratio", 1,
       INT_MAX},
      {"lpai_client_perf_type", Place::kBackend, &backend->lpai_client_perf_type,
       "LPAI client: real time 1, not real time 2", 1, 2},
      {"lpai_affinity", Place::kBackend, &backend->lpai_affinity, "LPAI core affinity: soft 1, hard 2", 1, 2},
      {"lpai_core_selection", Place::kBackend, &backend->lpai_core_selection, "LPAI cores, a bit mask", 0, INT_MAX},
      {"heap_profiling_path", Place::kBackend, &backend->heap_profiling_path,
       "DSP heap before the first context and after the last (HTP on a device, profile level not 0)"},
      {"workspace_sharing_mode", Place::kBackend, &backend->workspace_sharing_mode,
       "XNNPACK: delegates that share memory for their values: none 0, those of a program 1, all of the process 2", 0, 2},
      {"weight_cache_enabled", Place::kBackend, &backend->weight_cache_enabled,
       "XNNPACK: delegates share packed weights"},
      {"packed_cache_path", Place::kBackend, &backend->packed_cache_path,
       "XNNPACK: file of packed weights, for this load and later ones; with --weight_cache_enabled"},
      {"serve", Place::kProcess, &flags->serve,
       "execute jobs from standard input, a line of flags each, and answer with a line of JSON each"},
      {"keep_loaded", Place::kProcess, &flags->keep_loaded,
       "of a session: a small .pte that stays loaded, so that the QNN backend stays up between jobs"},
      {"version", Place::kProcess, &flags->version, "print the versions and end"},
      {"help", Place::kProcess, &flags->help, "print this and end"},
  };
}

[[noreturn]] void fail(const std::string& message) { throw Failure(Stage::kFlags, message); }

int parse_int(const Flag& flag, const std::string& text) {
  char* end = nullptr;
  errno = 0;
  const long value = std::strtol(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || errno != 0 || value < flag.least || value > flag.most) {
    const std::string range = flag.most == INT_MAX
                                  ? "at least " + std::to_string(flag.least)
                                  : "from " + std::to_string(flag.least) + " to " + std::to_string(flag.most);
    fail("--" + std::string(flag.name) + ": '" + text + "' is not a whole number " + range);
  }
  return static_cast<int>(value);
}

bool parse_bool(const Flag& flag, const std::string& text) {
  for (const char* yes : {"true", "t", "1", "yes", "y"}) {
    if (text == yes) return true;
  }
  for (const char* no : {"false", "f", "0", "no", "n"}) {
    if (text == no) return false;
  }
  fail("--" + std::string(flag.name) + ": '" + text + "' is not true or false");
}

void store(Flag* flag, const std::string& text) {
  flag->given = true;
  if (auto* const* boolean = std::get_if<bool*>(&flag->target)) {
    **boolean = parse_bool(*flag, text);
  } else if (auto* const* maybe_boolean = std::get_if<std::optional<bool>*>(&flag->target)) {
    **maybe_boolean = parse_bool(*flag, text);
  } else if (auto* const* number = std::get_if<int*>(&flag->target)) {
    **number = parse_int(*flag, text);
  } else if (auto* const* maybe_number = std::get_if<std::optional<int>*>(&flag->target)) {
    **maybe_number = parse_int(*flag, text);
  } else if (auto* const* string = std::get_if<std::string*>(&flag->target)) {
    **string = text;
  } else if (auto* const* maybe_string = std::get_if<std::optional<std::string>*>(&flag->target)) {
    **maybe_string = text;
  }
}

Flag* find(std::vector<Flag>* flags, const std::string& name) {
  for (Flag& flag : *flags) {
    if (name == flag.name) return &flag;
  }
  return nullptr;
}

// Takes arguments[*next] and, for a flag without `=`, its value in the next argument.
void parse_one(std::vector<Flag>* flags, const std::vector<std::string>& arguments, size_t* next) {
  const std::string& argument = arguments[(*next)++];
  const size_t dashes = argument.rfind("--", 0) == 0 ? 2 : argument.rfind('-', 0) == 0 ? 1 : 0;
  if (dashes == 0 || argument.size() == dashes) fail("unexpected argument '" + argument + "': see --help");
  const size_t equals = argument.find('=');
  const std::string name = argument.substr(dashes, equals == std::string::npos ? equals : equals - dashes);
  if (Flag* flag = find(flags, name); flag != nullptr) {
    if (equals != std::string::npos) return store(flag, argument.substr(equals + 1));
    if (flag->is_bool()) return store(flag, "true");
    if (*next >= arguments.size()) fail("--" + name + " needs a value");
    return store(flag, arguments[(*next)++]);
  }
  if (equals == std::string::npos && name.rfind("no", 0) == 0) {
    Flag* flag = find(flags, name.substr(2));
    if (flag != nullptr && flag->is_bool()) return store(flag, "false");
  }
  fail("unknown flag '" + argument + "': see --help");
}

void parse(std::vector<Flag>* flags, const std::vector<std::string>& arguments, std::optional<Failure>* failure) {
  for (size_t next = 0; next < arguments.size();) {
    try {
      parse_one(flags, arguments, &next);
    } catch (const Failure& found) {
      if (!*failure) *failure = found;
    }
  }
}

const Flag* first_given(const std::vector<Flag>& flags, const std::vector<std::string>& names) {
  for (const Flag& flag : flags) {
    if (flag.given && std::find(names.begin(), names.end(), flag.name) != names.end()) return &flag;
  }
  return nullptr;
}

// Throws for flags of a run that exclude each other.
void check_run(const std::vector<Flag>& given, const Flags& flags) {
  Carry(flags.carry);
  if (!flags.generate) {
    const Flag* flag = first_given(given, {"stop", "seconds", "tokens_path", "likelihoods", "decode_method",
                                           "prefill_method"});
    if (flag != nullptr) fail("--" + std::string(flag->name) + " belongs to a text: --generate");
    return;
  }
  const Flag* flag = first_given(given, {"carry", "method_index", "input_shape_path", "output_shape_path",
                                         "dump_intermediate_outputs"});
  if (flag != nullptr) fail("--generate and --" + std::string(flag->name) + " exclude each other");
  if (flags.iteration != 1) fail("--iteration: a text is generated again with --seconds");
  parse_token_ids("stop", flags.stop);
}

// Throws for flags of a command line that exclude each other.
void check_together(const std::vector<Flag>& given, const Flags& flags) {
  if (!flags.serve) {
    if (!flags.keep_loaded.empty()) fail("--keep_loaded belongs to a session: --serve");
    return;
  }
  for (const Flag& flag : given) {
    if (flag.given && flag.place == Place::kRun) {
      fail("--" + std::string(flag.name) + " belongs into the line of a job");
    }
  }
  if (!flags.keep_loaded.empty() && flags.backend.heap_profiling_path) {
    // QNN writes the second heap number when the last program is unloaded.
    fail("--keep_loaded and --heap_profiling_path exclude each other");
  }
}

std::string shown(const Flag& flag) {
  const std::string name = "--" + std::string(flag.name);
  if (const auto* const* number = std::get_if<std::optional<int>*>(&flag.target); number != nullptr && **number) {
    return name + "=" + std::to_string(***number);
  }
  if (const auto* const* boolean = std::get_if<std::optional<bool>*>(&flag.target); boolean != nullptr && **boolean) {
    return name + "=" + (***boolean ? "true" : "false");
  }
  if (const auto* const* text = std::get_if<std::optional<std::string>*>(&flag.target); text != nullptr && **text) {
    return name + "=" + ***text;
  }
  return "no " + name;
}

std::string default_text(const Flag& flag) {
  if (const auto* const* string = std::get_if<std::string*>(&flag.target)) {
    return (**string).empty() ? " (default unset)" : " (default " + **string + ")";
  }
  if (const auto* const* number = std::get_if<int*>(&flag.target)) {
    return " (default " + std::to_string(**number) + ")";
  }
  return std::holds_alternative<bool*>(flag.target) ? "" : " (default unset)";
}

}  // namespace

ParsedFlags parse_command_line(const std::vector<std::string>& arguments) {
  ParsedFlags parsed;
  std::vector<Flag> flags = table(&parsed.flags);
  parse(&flags, arguments, &parsed.failure);
  try {
    if (!parsed.failure) check_together(flags, parsed.flags);
    if (!parsed.failure) check_run(flags, parsed.flags);
  } catch (const Failure& failure) {
    parsed.failure = failure;
  }
  return parsed;
}

ParsedFlags parse_job(const std::vector<std::string>& arguments, const BackendFlags& session) {
  ParsedFlags parsed;
  parsed.flags.result_path.clear();
  parsed.flags.performance_output_path.clear();
  std::vector<Flag> flags = table(&parsed.flags);
  parse(&flags, arguments, &parsed.failure);
  Flags of_session;
  of_session.backend = session;
  const std::vector<Flag> started_with = table(&of_session);
  for (size_t i = 0; i < flags.size() && !parsed.failure; ++i) {
    if (!flags[i].given) continue;
    if (flags[i].place == Place::kProcess) {
      parsed.failure = Failure(Stage::kFlags, "--" + std::string(flags[i].name) + " cannot stand in the line of a job");
    } else if (flags[i].place == Place::kBackend && shown(flags[i]) != shown(started_with[i])) {
      parsed.failure = Failure(Stage::kOptions, shown(flags[i]) + " needs a process of its own: this session has " +
                                                    shown(started_with[i]));
    }
  }
  try {
    if (!parsed.failure) check_run(flags, parsed.flags);
  } catch (const Failure& failure) {
    parsed.failure = failure;
  }
  parsed.flags.backend = session;
  return parsed;
}

std::string flags_help() {
  Flags defaults;
  std::string text =
      "farm_runner: executes an ExecuTorch program and writes down what happened.\n"
      "Flags are --name=value or --name value. Exit codes: 0 done, 2 flags, 3 options, 4 load, 5 inputs,\n"
      "6 execute, 7 outputs, 8 etdump, 9 timeout, 10 standard output of a session is gone, 11 ended by a signal that\n"
      "asks for the end.\n\n";
  for (const Flag& flag : table(&defaults)) {
    text += "  --" + std::string(flag.name) + "\n      " + flag.help + default_text(flag) + "\n";
  }
  return text;
}

}  // namespace farm
