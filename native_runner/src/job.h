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

// One run of the process: the only one, or a job of a session. Whatever ends it, its result is written and its answer
// given once: by the thread that runs it, by the watchdog, or where ExecuTorch aborts.
class Job {
 public:
  // A single run.
  explicit Job(ParsedFlags parsed);
  // A job of a session.
  Job(ParsedFlags parsed, int64_t number, const Answers* answers);

  // Runs and returns the exit code. `watchdog` may be null when there is no timeout.
  int run(const Backend& backend, Watchdog* watchdog);

  // A job that fails before anything of it is done.
  int refuse();

 private:
  friend void end_current_job(const std::string& message, std::optional<int> exit_code);

  void start();
  // Changes into the working folder, once; false where that cannot be. Under the lock of whoever ends a run.
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

// Ends the process with this failure of the job that runs now. Returns when there is none, or it has ended by itself,
// with its result written and its answer given. Called from any thread: of a backend, for example, that aborts.
void end_current_job(const std::string& message, std::optional<int> exit_code);

}  // namespace farm
