// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "flags.h"

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <variant>
#include <vector>

namespace farm {

namespace {

using Target = std::variant<bool*, int*, std::string*, std::optional<int>*, std::optional<std::string>*>;

struct Flag {
  const char* name;
  Target target;
  const char* help;
  int least = 0;
  int most = 0;

  bool is_bool() const { return std::holds_alternative<bool*>(target); }
};

std::vector<Flag> table(Flags* flags) {
  return {
      {"model_path", &flags->model_path, "the .pte to run"},
      {"input_list_path", &flags->input_list_path, "one inference per line: raw files separated by one space"},
      {"output_folder_path", &flags->output_folder_path, "existing folder for output_{line}_{index}.raw"},
      {"iteration", &flags->iteration, "measured executions per inference", 1, INT_MAX},
      {"warm_up", &flags->warm_up, "executions before those", 0, INT_MAX},
      {"method_index", &flags->method_index, "which method of the .pte", 0, INT_MAX},
      {"etdump_path", &flags->etdump_path, "write an ETDump here; none is made without this flag"},
      {"performance_output_path", &flags->performance_output_path, "mean time of one execution in ms, a bare number"},
      {"result_path", &flags->result_path, "what happened, as JSON"},
      {"log_level", &flags->log_level, "QNN log level: error 1, warn 2, info 3, verbose 4, debug 5", 1, 5},
      {"htp_performance_mode", &flags->htp_performance_mode,
       "HTP performance: default 0, sustained_high 1, burst 2, high 3, power_saver 4, low_power_saver 5, "
       "high_power_saver 6, low_balanced 7, balanced 8",
       0, 8},
      {"profile_level", &flags->profile_level, "QNN profiling: off 0, basic 1, detailed 2", 0, 2},
      {"version", &flags->version, "print the versions and end"},
      {"help", &flags->help, "print this and end"},
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

void store(const Flag& flag, const std::string& text) {
  if (auto* const* boolean = std::get_if<bool*>(&flag.target)) {
    if (text != "true" && text != "false") fail("--" + std::string(flag.name) + ": '" + text + "' is not true or false");
    **boolean = text == "true";
  } else if (auto* const* number = std::get_if<int*>(&flag.target)) {
    **number = parse_int(flag, text);
  } else if (auto* const* maybe_number = std::get_if<std::optional<int>*>(&flag.target)) {
    **maybe_number = parse_int(flag, text);
  } else if (auto* const* string = std::get_if<std::string*>(&flag.target)) {
    **string = text;
  } else if (auto* const* maybe_string = std::get_if<std::optional<std::string>*>(&flag.target)) {
    **maybe_string = text;
  }
}

const Flag* find(const std::vector<Flag>& flags, const std::string& name) {
  for (const Flag& flag : flags) {
    if (name == flag.name) return &flag;
  }
  return nullptr;
}

// Takes argv[*next] and, for a flag whose value stands apart, the argument after it.
void parse_one(const std::vector<Flag>& flags, int argc, const char* const* argv, int* next) {
  const std::string argument = argv[(*next)++];
  const size_t dashes = argument.rfind("--", 0) == 0 ? 2 : argument.rfind('-', 0) == 0 ? 1 : 0;
  if (dashes == 0 || argument.size() == dashes) fail("unexpected argument '" + argument + "': see --help");
  const size_t equals = argument.find('=');
  const std::string name = argument.substr(dashes, equals == std::string::npos ? equals : equals - dashes);
  if (const Flag* flag = find(flags, name); flag != nullptr) {
    if (equals != std::string::npos) return store(*flag, argument.substr(equals + 1));
    if (flag->is_bool()) return store(*flag, "true");
    if (*next >= argc) fail("--" + name + " needs a value");
    return store(*flag, argv[(*next)++]);
  }
  if (equals == std::string::npos && name.rfind("no", 0) == 0) {
    const Flag* flag = find(flags, name.substr(2));
    if (flag != nullptr && flag->is_bool()) return store(*flag, "false");
  }
  fail("unknown flag '" + argument + "': see --help");
}

std::string default_text(const Flag& flag) {
  if (const auto* const* string = std::get_if<std::string*>(&flag.target)) return " (default " + **string + ")";
  if (const auto* const* number = std::get_if<int*>(&flag.target)) {
    return " (default " + std::to_string(**number) + ")";
  }
  return flag.is_bool() ? "" : " (default unset)";
}

}  // namespace

ParsedFlags parse_flags(int argc, const char* const* argv) {
  ParsedFlags parsed;
  const std::vector<Flag> flags = table(&parsed.flags);
  for (int next = 1; next < argc;) {
    try {
      parse_one(flags, argc, argv, &next);
    } catch (const Failure& failure) {
      if (!parsed.failure) parsed.failure = failure;
    }
  }
  return parsed;
}

std::string flags_help() {
  Flags defaults;
  std::string text =
      "farm_runner: executes an ExecuTorch program and writes down what happened.\n"
      "Flags are --name=value or --name value. Exit codes: 0 done, 2 flags, 3 options, 4 load, 5 inputs,\n"
      "6 execute, 7 outputs, 8 etdump.\n\n";
  for (const Flag& flag : table(&defaults)) {
    text += "  --" + std::string(flag.name) + "\n      " + flag.help + default_text(flag) + "\n";
  }
  return text;
}

}  // namespace farm
