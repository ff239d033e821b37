// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include <executorch/runtime/platform/runtime.h>
#include <unistd.h>

#include <cstdio>
#include <exception>

#include "flags.h"
#include "platform.h"
#include "report.h"
#include "run.h"

namespace {

using farm::Failure;
using farm::Flags;
using farm::Report;

// ExecuTorch's abort hook takes no argument, so what it reports is found here.
Report* current_report = nullptr;
const Flags* current_flags = nullptr;

// Tells stderr and the result file how the run ended, and returns its exit code.
int finish(Report* report, const Flags& flags) {
  try {
    farm::write_report(*report, flags.result_path);
  } catch (const Failure& failure) {
    std::fprintf(stderr, "farm_runner: %s: %s\n", farm::stage_name(failure.stage), failure.what());
    if (!report->failure) return farm::exit_code(failure.stage);
  }
  if (report->failure) {
    std::fprintf(stderr, "farm_runner: %s: %s\n", farm::stage_name(report->failure->stage), report->failure->what());
  }
  return report->exit_code();
}

[[noreturn]] void on_abort(const std::string& reason) {
  const std::string why = reason.empty() ? "for no logged reason" : reason;
  current_report->failure = Failure(current_report->stage, "ExecuTorch aborted: " + why);
  // Not exit(): destructors would run into the state that made ExecuTorch give up.
  _exit(finish(current_report, *current_flags));
}

}  // namespace

int main(int argc, char** argv) {
  const farm::ParsedFlags parsed = farm::parse_flags(argc, argv);
  const Flags& flags = parsed.flags;
  Report report;
  report.failure = parsed.failure;
  if (!report.failure && flags.help) return std::fputs(farm::flags_help().c_str(), stdout) < 0 ? 1 : 0;
  if (!report.failure && flags.version) {
    return std::printf("farm_runner %s (executorch %s)\n", FARM_RUNNER_VERSION, FARM_EXECUTORCH_VERSION) < 0 ? 1 : 0;
  }

  // After a crash there is no result: an older one must not pass for it.
  if (!flags.result_path.empty()) ::unlink(flags.result_path.c_str());
  if (!report.failure) {
    current_report = &report;
    current_flags = &flags;
    farm::install_platform(&on_abort);
    executorch::runtime::runtime_init();
    try {
      farm::run(flags, &report);
    } catch (const Failure& failure) {
      report.failure = failure;
    } catch (const std::exception& error) {
      report.failure = Failure(report.stage, error.what());
    }
  }
  return finish(&report, flags);
}
