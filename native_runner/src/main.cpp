// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include <executorch/runtime/platform/runtime.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backend_options.h"
#include "flags.h"
#include "job.h"
#include "platform.h"
#include "serve.h"
#include "watchdog.h"

namespace {

using farm::Failure;
using farm::Flags;
using farm::ParsedFlags;

[[noreturn]] void on_abort(const std::string& reason) {
  farm::end_current_job("ExecuTorch aborted: " + (reason.empty() ? "for no logged reason" : reason), std::nullopt);
  std::abort();
}

// ExecuTorch's own runner always writes an ETDump, and executes without an input list as well; scripts that call a
// program by its name expect both.
bool stands_in(const char* program) {
  const std::string_view path = program == nullptr ? "" : program;
  return path.substr(path.rfind('/') + 1) == "qnn_executor_runner";
}

int run_single(ParsedFlags parsed) {
  std::optional<farm::ProcessOptions> options;
  farm::Watchdog* watchdog = nullptr;
  if (!parsed.failure) {
    try {
      options.emplace(parsed.flags.backend);
      watchdog = farm::Watchdog::start_for_signals();
    } catch (const Failure& failure) {
      parsed.failure = failure;
    }
  }
  const bool refused = parsed.failure.has_value();
  farm::Job job(std::move(parsed));
  if (refused) return job.refuse();
  farm::Backend backend;
  backend.options = &*options;
  return job.run(backend, watchdog);
}

}  // namespace

int main(int argc, char** argv) {
  ParsedFlags parsed = farm::parse_command_line({argv + (argc > 0 ? 1 : 0), argv + argc});
  Flags& flags = parsed.flags;
  if (!parsed.failure && flags.help) return std::fputs(farm::flags_help().c_str(), stdout) < 0 ? 1 : 0;
  if (!parsed.failure && flags.version) {
    return std::printf("farm_runner %s (executorch %s)\n", FARM_RUNNER_VERSION, FARM_EXECUTORCH_VERSION) < 0 ? 1 : 0;
  }
  flags.stands_in = stands_in(argc > 0 ? argv[0] : nullptr);
  if (!flags.etdump_path && flags.stands_in) flags.etdump_path = "etdump.etdp";

  farm::install_platform(&on_abort);
  executorch::runtime::runtime_init();
  try {
    if (!flags.serve) return run_single(std::move(parsed));
    if (parsed.failure) throw *parsed.failure;
    return farm::serve(flags);
  } catch (const Failure& failure) {
    std::fprintf(stderr, "farm_runner: %s: %s\n", farm::stage_name(failure.stage), failure.what());
    return failure.exit_code;
  } catch (const std::exception& error) {
    // Probably out of memory, outside of a job.
    std::fprintf(stderr, "farm_runner: %s\n", error.what());
    return 1;
  }
}
