// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "run.h"

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <utility>
#include <vector>

#include "beginning.h"
#include "carry.h"
#include "clock.h"
#include "files.h"
#include "generation.h"
#include "inputs.h"
#include "model.h"
#include "outputs.h"
#include "shapes.h"

namespace farm {

namespace {

// Run with its flags, its state and its report.
class Run {
 public:
  Run(const Flags& flags, const Backend& backend, SharedReport* report)
      : flags_(flags), backend_(backend), report_(report), carry_(flags.carry) {}

  void all() {
    look_ahead(flags_, report_);
    report_->enter(Stage::kOptions);
    backend_.options->apply();
    load();
    for (const InputLine& line : lines_) execute(line);
    write_traces();
    report_->enter(Stage::kOutputs);
    write_performance(report_->copy(), flags_.performance_output_path);
    model_.reset();
    program_.reset();
  }

 private:
  void load() {
    const OpenedProgram opened = open_program(flags_, report_);
    program_ = opened.program;
    ModelSettings settings;
    settings.shared_buffer = flags_.shared_buffer;
    if (flags_.dump_intermediate_outputs) settings.debug_bytes = static_cast<size_t>(flags_.debug_buffer_size);
    model_ = std::make_unique<Model>(program_, program_->method(flags_.method_index), settings);
    report_->update([&](Report* report) {
      report->method = model_->method();
      report->inputs = model_->inputs();
      report->outputs = model_->outputs();
    });
    read_shape_files();
    carry_.check(inputs_, model_->outputs());
    read_input_list();

    report_->enter(Stage::kLoad);
    const Clock::time_point method_start = Clock::now();
    model_->load(inputs_);
    const int64_t method_ns = ns_since(method_start);
    report_->update([&](Report* report) {
      report->load_ns = opened.load_ns + method_ns;
      report->warm = backend_.warm;
    });
  }

  void read_shape_files() {
    report_->enter(Stage::kInputs);
    inputs_ = model_->inputs();
    if (!flags_.input_shape_path.empty()) inputs_ = read_shapes(flags_.input_shape_path, inputs_, "input");
    if (!flags_.output_shape_path.empty()) {
      expected_outputs_ = read_shapes(flags_.output_shape_path, model_->outputs(), "output");
    }
    report_->update([&](Report* report) { report->inputs = inputs_; });
  }

  void read_input_list() {
    made_up_ = flags_.stands_in && !inputs_.empty() && access(flags_.input_list_path.c_str(), F_OK) != 0;
    if (!made_up_) {
      lines_ = InputList(flags_.input_list_path).inferences(inputs_);
      return;
    }
    lines_ = {InputLine{}};
    const char* list = flags_.input_list_path.c_str();
    std::fprintf(stderr, "farm_runner: no '%s': executed with inputs of ones, and no output is written\n", list);
  }

  void execute(const InputLine& line) {
    report_->enter(Stage::kInputs);
    if (made_up_) {
      for (size_t i = 0; i < inputs_.size(); ++i) fill_with_ones(model_->input_data(i), inputs_[i]);
    }
    read_inputs(line);
    carry_.give(inputs_, model_.get());
    report_->enter(Stage::kExecute);
    digests_.clear();
    report_->update([&](Report* report) {
      report->inferences.emplace_back();
      report->inferences.back().line = line.number;
    });
    for (int i = 0; i < flags_.warm_up; ++i) execute_once(line, i, &Inference::warm_up_ns);
    for (int i = 0; i < flags_.iteration; ++i) execute_once(line, flags_.warm_up + i, &Inference::iterations_ns);
    require_complete_debug_output(line);
    compare_executions();
    carry_.take(*model_);
    if (made_up_) return;
    report_->enter(Stage::kOutputs);
    const std::vector<TensorSpec> written =
        write_outputs(flags_.output_folder_path, line.number, model_->results(), expected_outputs_);
    if (line.number == 0) report_->update([&](Report* report) { report->outputs = written; });
  }

  void read_inputs(const InputLine& line) {
    for (size_t i = 0; i < line.files.size(); ++i) {
      try {
        read_file(line.files[i], model_->input_data(i), inputs_[i].nbytes, Stage::kInputs);
      } catch (const Failure& failure) {
        throw Failure(Stage::kInputs, failure.what(), std::nullopt, line.number);
      }
    }
  }

  void execute_once(const InputLine& line, int number, std::vector<int64_t> Inference::*times) {
    try {
      const int64_t ns = model_->execute();
      report_->update([&](Report* report) {
        (report->inferences.back().*times).push_back(ns);
        if (times == &Inference::iterations_ns) report->count(ns);
      });
      // Not part of the measured time. A single execution has no other to differ from.
      if (flags_.warm_up > 0 || flags_.iteration > 1) {
        digests_.push_back(digest_outputs(line.number, model_->results(), expected_outputs_));
      }
    } catch (const Failure& failure) {
      throw Failure(failure.stage, std::string(failure.what()) + " (execution " + std::to_string(number) +
                                       " of inference " + std::to_string(line.number) + ", both from 0)",
                    failure.code, line.number);
    }
  }

  // The outputs of the last execution are written.
  void compare_executions() {
    std::vector<int64_t> differing;
    int64_t count = 0;
    for (size_t i = 0; i < digests_.size(); ++i) {
      if (digests_[i] == digests_.back()) continue;
      if (differing.size() < kDifferingShown) differing.push_back(static_cast<int64_t>(i));
      ++count;
    }
    report_->update([&](Report* report) {
      report->inferences.back().differing_count = count;
      report->inferences.back().differing = std::move(differing);
    });
  }

  void require_complete_debug_output(const InputLine& line) {
    const DebugSink* sink = model_->debug_sink();
    if (sink == nullptr || sink->needed() <= sink->limit()) return;
    throw Failure(Stage::kEtdump, "--debug_buffer_size: " + std::to_string(sink->limit()) +
                                      " bytes are too few: the intermediate outputs up to inference " +
                                      std::to_string(line.number) + " have " + std::to_string(sink->needed()),
                  std::nullopt, line.number);
  }

  void write_traces() {
    if (!flags_.trace()) return;
    report_->enter(Stage::kEtdump);
    const std::vector<uint8_t> dump = program_->take_etdump();
    if (!flags_.etdump_file().empty()) write_file(flags_.etdump_file(), dump.data(), dump.size(), Stage::kEtdump);
    if (const DebugSink* sink = model_->debug_sink(); sink != nullptr) {
      write_file(flags_.debug_output_path, sink->content().data(), sink->content().size(), Stage::kEtdump);
    }
  }

  const Flags& flags_;
  const Backend& backend_;
  SharedReport* report_;
  std::shared_ptr<Program> program_;
  std::unique_ptr<Model> model_;
  std::vector<TensorSpec> inputs_;
  std::vector<TensorSpec> expected_outputs_;
  std::vector<InputLine> lines_;
  Carry carry_;
  bool made_up_ = false;  // made-up inputs, without an input list
  std::vector<uint64_t> digests_;  // of all executions of a line
};

}  // namespace

void run(const Flags& flags, const Backend& backend, SharedReport* report) {
  if (flags.generate) {
    generate(flags, backend, report);
  } else {
    Run(flags, backend, report).all();
  }
}

}  // namespace farm
