// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "run.h"

#include <chrono>

#include "backend_options.h"
#include "files.h"
#include "inputs.h"
#include "model.h"
#include "outputs.h"

namespace farm {

namespace {

void execute_line(const Flags& flags, const InputLine& line, Model* model, Report* report) {
  report->stage = Stage::kInputs;
  std::vector<std::vector<uint8_t>> bytes = read_inputs(line, model->inputs());
  report->stage = Stage::kExecute;
  report->inferences.push_back({line.number, {}, {}});
  Inference& inference = report->inferences.back();
  try {
    model->bind_inputs(&bytes);
    for (int i = 0; i < flags.warm_up; ++i) inference.warm_up_ns.push_back(model->execute());
    for (int i = 0; i < flags.iteration; ++i) inference.iterations_ns.push_back(model->execute());
  } catch (const Failure& failure) {
    const size_t done = inference.warm_up_ns.size() + inference.iterations_ns.size();
    throw Failure(failure.stage, std::string(failure.what()) + " (execution " + std::to_string(done) + " of inference " +
                                     std::to_string(line.number) + ", both from 0)",
                  failure.code, line.number);
  }
  report->stage = Stage::kOutputs;
  const std::vector<TensorSpec> written = write_outputs(flags.output_folder_path, line.number, model->results());
  if (line.number == 0) report->outputs = written;
}

}  // namespace

void run(const Flags& flags, Report* report) {
  // What can be known to fail is looked at before the load, which may take a minute for a large model.
  report->stage = Stage::kLoad;
  file_size(flags.model_path, Stage::kLoad);
  report->stage = Stage::kInputs;
  const std::vector<InputLine> lines = read_input_list(flags.input_list_path);
  report->stage = Stage::kOutputs;
  require_writable_folder(flags.output_folder_path, Stage::kOutputs);

  report->stage = Stage::kOptions;
  apply_backend_options(flags);

  report->stage = Stage::kLoad;
  const bool trace = flags.etdump_path && !flags.etdump_path->empty();
  const auto start = std::chrono::steady_clock::now();
  Model model(flags.model_path, flags.method_index, trace);
  report->load_ns =
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count();
  report->method = model.method();
  report->inputs = model.inputs();
  report->outputs = model.outputs();

  report->stage = Stage::kInputs;
  check_inputs(flags.input_list_path, lines, model.inputs());
  for (const InputLine& line : lines) execute_line(flags, line, &model, report);

  if (trace) {
    report->stage = Stage::kEtdump;
    const std::vector<uint8_t> dump = model.take_etdump();
    write_file(*flags.etdump_path, dump.data(), dump.size(), Stage::kEtdump);
  }
  report->stage = Stage::kOutputs;
  write_performance(*report, flags.performance_output_path);
}

}  // namespace farm
