// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "report.h"

#include <cstdio>

#include "files.h"
#include "json.h"

namespace farm {

namespace {

constexpr int64_t kSchema = 1;

void add_specs(Json* json, const std::vector<TensorSpec>& specs) {
  json->array();
  for (const TensorSpec& spec : specs) {
    json->object().key("shape").integers(spec.shape);
    json->key("dtype").string(spec.dtype);
    json->key("nbytes").integer(static_cast<int64_t>(spec.nbytes)).end();
  }
  json->end();
}

void add_failure(Json* json, const std::optional<Failure>& failure) {
  if (!failure) {
    json->null();
    return;
  }
  json->object().key("stage").string(stage_name(failure->stage));
  json->key("message").string(failure->what());
  json->key("code").integer_or_null(failure->code);
  json->key("line").integer_or_null(failure->line).end();
}

void add_inference(Json* json, const Inference& inference) {
  json->object().key("line").integer(inference.line);
  json->key("warm_up_ns").integers(inference.warm_up_ns);
  json->key("iterations_ns").integers(inference.iterations_ns);
  if (inference.differing_count) {
    json->key("differing").object().key("count").integer(*inference.differing_count);
    json->key("executions").integers(inference.differing).end();
  }
  json->end();
}

void add_generated(Json* json, const Generated& generated) {
  json->object().key("line").integer(generated.line);
  json->key("prompt_tokens").integer(static_cast<int64_t>(generated.prompt_tokens));
  json->key("tokens").integers({generated.tokens.begin(), generated.tokens.end()});
  json->key("prefill_ns").integers(generated.prefill_ns);
  json->key("steps_ns").integers(generated.steps_ns);
  json->key("first_token_ns").integer_or_null(generated.first_token_ns);
  json->key("total_ns").integer_or_null(generated.total_ns);
  if (generated.ended != nullptr) json->key("ended").string(generated.ended);
  json->end();
}

// Writes the fields of a run that generates; other runs have no such fields.
void add_texts(Json* json, const Report& report) {
  if (report.method_loads_ns.empty()) return;
  json->key("method_loads_ns").object();
  for (const auto& [method, ns] : report.method_loads_ns) json->key(method).integer(ns);
  json->end();
  json->key("generated").array();
  if (report.texts.over) json->values(report.texts.over->read());
  if (report.texts.current) add_generated(json, *report.texts.current);
  json->end();
}

// Appends a value.
template <typename Add>
void write_value(ScratchFile* file, const Add& add) {
  Json json;
  add(&json);
  file->write(file->empty() ? json.text() : "," + json.text());
}

}  // namespace

void put_away(SharedReport* report, bool in_inferences) {
  Texts texts;
  report->update([&](Report* now) { texts = now->texts; });
  Inference inference;
  if (in_inferences) {
    inference.line = texts.current->line;
    inference.iterations_ns = texts.current->steps_ns;
    if (inference.iterations_ns.empty() && texts.current->total_ns) {
      inference.iterations_ns = {*texts.current->total_ns};
    }
    write_value(texts.inferences.get(), [&](Json* json) { add_inference(json, inference); });
  }
  write_value(texts.over.get(), [&](Json* json) { add_generated(json, *texts.current); });
  report->update([&](Report* now) {
    if (in_inferences) now->texts.inferences->add();
    now->texts.over->add();
    now->texts.current.reset();
    for (const int64_t ns : inference.iterations_ns) now->count(ns);
  });
}

std::string to_json(const Report& report, const std::optional<JobNumber>& job) {
  Json json;
  json.object().key("schema").integer(kSchema);
  if (job) {
    json.key("job").integer(job->number);
    json.key("warm").boolean(report.warm);
    if (job->last) json.key("last").boolean(true);
  }
  json.key("ok").boolean(!report.failure);
  json.key("exit_code").integer(report.exit_code());
  json.key("error");
  add_failure(&json, report.failure);
  json.key("method").string(report.method);
  json.key("verification_ns").integer(report.verification_ns);
  json.key("load_ns").integer(report.load_ns);
  json.key("inputs");
  add_specs(&json, report.inputs);
  json.key("outputs");
  add_specs(&json, report.outputs);
  json.key("inferences").array();
  if (report.texts.inferences) json.values(report.texts.inferences->read());
  for (const Inference& inference : report.inferences) add_inference(&json, inference);
  json.end();
  add_texts(&json, report);
  json.key("peak_memory_bytes").integer_or_null(report.peak_memory_bytes);
  json.key("versions").object().key("executorch").string(FARM_EXECUTORCH_VERSION);
  json.key("runner").string(FARM_RUNNER_VERSION).end();
  json.end();
  return json.text() + "\n";
}

void write_performance(const Report& report, const std::string& path) {
  if (path.empty()) return;
  char text[64];
  const auto count = static_cast<double>(report.executions);
  const double mean_ms = report.executions == 0 ? 0 : static_cast<double>(report.executions_ns) / count / 1e6;
  const int length = std::snprintf(text, sizeof(text), "%.6f", mean_ms);
  write_file(path, text, static_cast<size_t>(length), Stage::kOutputs);
}

void write_report(const Report& report, const std::string& path) {
  if (path.empty()) return;
  const std::string text = to_json(report);
  write_file(path, text.data(), text.size(), Stage::kOutputs);
}

}  // namespace farm
