// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "answers.h"
#include "flags.h"
#include "report.h"
#include "run.h"
#include "watchdog.h"

namespace farm {

// Run of the process: the only one, or a job of a session. Its result and its answer are written exactly once: by the
// thread that runs it, by the watchdog, or by the handler of ExecuTorch's abort.
class Job {
 public:
  // Makes a single run.
  explicit Job(ParsedFlags parsed);
  // Makes a job of a session.
  Job(ParsedFlags parsed, int64_t number, const Answers* answers);

  // Runs and returns the exit code. `watchdog` may be null without a timeout.
  int run(const Backend& backend, Watchdog* watchdog);

  // Ends a job that fails before its first step.
  int refuse();

 private:
  friend void end_current_job(const std::string& message, std::optional<int> exit_code);

  void start();
  // Changes into the working folder, once; returns false on failure. The caller has the lock that ends a run.
  bool enter();
  int finish();
  [[noreturn]] void end_process(const std::string& message, std::optional<int> exit_code);
  int tell(Report report, bool last);

  Flags flags_;
  std::optional<int64_t> number_;
  const Answers* answers_ = nullptr;
  SharedReport report_;
  bool in_folder_ = false;
};

// Ends the process with a failure of the current job. Returns if there is no job, or if the job has ended by itself
// with result and answer. May be called by any thread, such as a thread of a backend that aborts.
void end_current_job(const std::string& message, std::optional<int> exit_code);

}  // namespace farm
