// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "failure.h"
#include "scratch_file.h"
#include "tensors.h"

namespace farm {

struct Inference {
  int64_t line = 0;
  std::vector<int64_t> warm_up_ns;
  std::vector<int64_t> iterations_ns;
  // Executions, warm-up included and counted from 0, with other outputs than the last execution: all are counted, the
  // first kDifferingShown are listed. Absent while the line runs.
  std::optional<int64_t> differing_count;
  std::vector<int64_t> differing;
};

constexpr size_t kDifferingShown = 32;

// Text that a program generated after one prompt.
struct Generated {
  int64_t line = 0;
  size_t prompt_tokens = 0;
  std::vector<int32_t> tokens;
  std::vector<int64_t> prefill_ns;  // of each call with tokens of the prompt
  std::vector<int64_t> steps_ns;    // of each later call
  std::optional<int64_t> first_token_ns;  // from the first call to the first chosen token
  std::optional<int64_t> total_ns;        // from the first call to the last chosen token
  const char* ended = nullptr;            // reason of the end; null while the text is generated
};

// Texts of a run that generates. Finished texts are kept as JSON in a file until a report is written, so that the
// length of the run does not change the measured memory.
struct Texts {
  std::shared_ptr<ScratchFile> inferences;
  std::shared_ptr<ScratchFile> over;
  std::optional<Generated> current;
};

// Report of a run, filled in step by step, so that the report of a failure has all earlier steps.
struct Report {
  Stage stage = Stage::kFlags;  // current stage
  std::optional<Failure> failure;
  std::string method;
  int64_t verification_ns = 0;
  int64_t load_ns = 0;  // without verification
  bool warm = false;  // the QNN backend was started before the program was loaded
  std::vector<TensorSpec> inputs;
  std::vector<TensorSpec> outputs;
  std::vector<Inference> inferences;
  Texts texts;
  std::vector<std::pair<std::string, int64_t>> method_loads_ns;  // only for a program that generates
  std::optional<int64_t> peak_memory_bytes;  // greatest of the process so far

  // Times of all measured executions.
  int64_t executions = 0;
  int64_t executions_ns = 0;

  int exit_code() const { return failure ? failure->exit_code : 0; }

  void count(int64_t ns) {
    ++executions;
    executions_ns += ns;
  }

};

// Report that one thread fills in while another thread may end the run.
class SharedReport {
 public:
  template <typename Change>
  void update(const Change& change) {
    const std::lock_guard<std::mutex> lock(mutex_);
    change(&report_);
  }
  void enter(Stage stage) {
    update([&](Report* report) { report->stage = stage; });
  }
  Report copy() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return report_;
  }
  // Returns the final report: threads that change it later wait until the process ends.
  Report last() {
    mutex_.lock();
    return report_;
  }

 private:
  mutable std::mutex mutex_;
  Report report_;
};

// Moves the current text to the finished texts. `in_inferences`: also to the inferences, for readers of these alone.
// Only for the thread that fills in the report; the report is unlocked while the file is written. Throws Failure at
// outputs; the text is still the current one then.
void put_away(SharedReport* report, bool in_inferences);

// Job of a session that a report answers; the process ends after the last answer.
struct JobNumber {
  int64_t number = 0;
  bool last = false;
};

// Returns the report as one line of JSON. The layout is in docs/reference/native_runner.md.
std::string to_json(const Report& report, const std::optional<JobNumber>& job = std::nullopt);

// Writes the mean time as ExecuTorch's scripts read it: a bare number, milliseconds. Throws Failure at outputs.
void write_performance(const Report& report, const std::string& path);

// Throws Failure at outputs.
void write_report(const Report& report, const std::string& path);

}  // namespace farm
