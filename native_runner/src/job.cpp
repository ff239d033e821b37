// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "job.h"

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <mutex>
#include <utility>

#include "peak_memory.h"

namespace farm {

namespace {

// Lock of the thread that ends a run, held until result and answer are written: a job is destroyed only when no other
// thread ends it. Not destroyed: threads of a backend may abort while the process exits.
std::mutex& ending() {
  static auto* mutex = new std::mutex;
  return *mutex;
}
Job* current = nullptr;  // guarded by `ending`

void print_failure(const Failure& failure) {
  std::fprintf(stderr, "farm_runner: %s: %s\n", stage_name(failure.stage), failure.what());
}

// Removes files of an earlier run: this run may crash before it writes its own.
void remove_old(const std::string& path) {
  if (!path.empty()) ::unlink(path.c_str());
}

}  // namespace

void end_current_job(const std::string& message, std::optional<int> exit_code) {
  const std::lock_guard<std::mutex> lock(ending());
  if (current != nullptr) current->end_process(message, exit_code);
}

Job::Job(ParsedFlags parsed) : flags_(std::move(parsed.flags)) {
  report_.update([&](Report* report) { report->failure = parsed.failure; });
}

Job::Job(ParsedFlags parsed, int64_t number, const Answers* answers) : Job(std::move(parsed)) {
  number_ = number;
  answers_ = answers;
}

int Job::run(const Backend& backend, Watchdog* watchdog) {
  const bool limited = watchdog != nullptr && flags_.timeout_ms > 0;
  // Before the time limit starts: a deadline that expires without a job is lost.
  {
    const std::lock_guard<std::mutex> lock(ending());
    current = this;
  }
  if (limited) {
    const auto limit = std::chrono::milliseconds(flags_.timeout_ms);
    watchdog->arm(Watchdog::Clock::now() + limit, [limit] {
      end_current_job("not finished after " + std::to_string(limit.count()) + " ms", kExitTimeout);
    });
  }
  try {
    start();
    farm::run(flags_, backend, &report_);
  } catch (const Failure& failure) {
    report_.update([&](Report* report) { report->failure = failure; });
  } catch (const std::exception& error) {
    report_.update([&](Report* report) { report->failure = Failure(report->stage, error.what()); });
  }
  const int code = finish();
  if (limited) watchdog->disarm();
  return code;
}

int Job::refuse() {
  try {
    start();
  } catch (const Failure&) {
    // The first failure is reported.
  }
  return finish();
}

void Job::start() {
  // A thread that ends the run in the meantime writes the result to the right path, and no thread removes it.
  const std::lock_guard<std::mutex> lock(ending());
  if (!enter()) {
    throw Failure(Stage::kFlags,
                  "--working_folder: cannot change into '" + flags_.working_folder + "': " + std::strerror(errno));
  }
  remove_old(flags_.result_path);
  remove_old(flags_.tokens_path);
  if (flags_.backend.heap_profiling_path) remove_old(*flags_.backend.heap_profiling_path);
}

bool Job::enter() {
  if (!in_folder_) in_folder_ = flags_.working_folder.empty() || ::chdir(flags_.working_folder.c_str()) == 0;
  return in_folder_;
}

int Job::finish() {
  // The first thread to end the run reports the reason: if another thread has the lock, it ends the process.
  const std::lock_guard<std::mutex> lock(ending());
  current = nullptr;
  return tell(report_.copy(), false);
}

void Job::end_process(const std::string& message, std::optional<int> exit_code) {
  Report report = report_.last();
  report.failure = Failure(report.stage, message);
  if (exit_code) report.failure->exit_code = *exit_code;
  // Not exit(): destructors would meet the broken state, or wait for the thread that hangs.
  _exit(tell(std::move(report), true));
}

int Job::tell(Report report, bool last) {
  report.peak_memory_bytes = peak_memory_bytes();
  // Another thread may end a run before its start.
  if (enter()) {
    try {
      write_report(report, flags_.result_path);
    } catch (const Failure& failure) {
      if (report.failure) print_failure(failure);
      if (!report.failure) report.failure = failure;
    }
  }
  if (report.failure) print_failure(*report.failure);
  if (answers_ == nullptr) return report.exit_code();
  std::fflush(stdout);
  std::fprintf(stderr, "farm_runner: job %lld ends\n", static_cast<long long>(*number_));
  answers_->write(to_json(report, JobNumber{*number_, last}));
  return report.exit_code();
}

}  // namespace farm
