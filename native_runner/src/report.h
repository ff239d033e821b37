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
  // Executions, warm-up included and counted from 0, whose outputs are not those of the last: all are counted, the
  // first kDifferingShown are listed. Absent while the line runs.
  std::optional<int64_t> differing_count;
  std::vector<int64_t> differing;
};

constexpr size_t kDifferingShown = 32;

// What a program that generates said to one prompt.
struct Generated {
  int64_t line = 0;
  size_t prompt_tokens = 0;
  std::vector<int32_t> tokens;
  std::vector<int64_t> prefill_ns;  // of each call that took tokens of the prompt
  std::vector<int64_t> steps_ns;    // of each call after those
  std::optional<int64_t> first_token_ns;  // from the first call until a token was chosen
  std::optional<int64_t> total_ns;        // until the last one was
  const char* ended = nullptr;            // by what; null until then
};

// The texts of a run that generates. Those that are over are out of memory, as values of JSON, until a report is put
// together: how long it goes on does not tell in the memory that is measured.
struct Texts {
  std::shared_ptr<ScratchFile> inferences;
  std::shared_ptr<ScratchFile> over;
  std::optional<Generated> current;
};

// What happened, filled in as it happens, so that a failure still tells what went before.
struct Report {
  Stage stage = Stage::kFlags;  // the one that runs now
  std::optional<Failure> failure;
  std::string method;
  int64_t verification_ns = 0;
  int64_t load_ns = 0;  // without the verification
  bool warm = false;  // the QNN backend was up already when the program was loaded
  std::vector<TensorSpec> inputs;
  std::vector<TensorSpec> outputs;
  std::vector<Inference> inferences;
  Texts texts;
  std::vector<std::pair<std::string, int64_t>> method_loads_ns;  // of a program that generates
  std::optional<int64_t> peak_memory_bytes;  // of the process so far

  // Of all measured executions.
  int64_t executions = 0;
  int64_t executions_ns = 0;

  int exit_code() const { return failure ? failure->exit_code : 0; }

  void count(int64_t ns) {
    ++executions;
    executions_ns += ns;
  }

};

// A report that one thread fills in while another may have to end the run.
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
  // As it stays until the process ends: whoever would change it from now on waits for that.
  Report last() {
    mutex_.lock();
    return report_;
  }

 private:
  mutable std::mutex mutex_;
  Report report_;
};

// Puts the current text with those that are over. `in_inferences`: also among the inferences, for whoever knows of these
// alone. For the thread that fills in the report; it is not held while a file is written. Throws Failure at outputs: the
// text is still the current one then.
void put_away(SharedReport* report, bool in_inferences);

// Which job of a session a report is the answer to; the process ends after the last one.
struct JobNumber {
  int64_t number = 0;
  bool last = false;
};

// One line. The layout is in docs/reference/native_runner.md.
std::string to_json(const Report& report, const std::optional<JobNumber>& job = std::nullopt);

// Mean time as ExecuTorch's scripts read it: a bare number, milliseconds. Throws Failure at outputs.
void write_performance(const Report& report, const std::string& path);

// Throws Failure at outputs.
void write_report(const Report& report, const std::string& path);

}  // namespace farm
