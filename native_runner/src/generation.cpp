// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "generation.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "beginning.h"
#include "clock.h"
#include "decoder.h"
#include "files.h"
#include "growing_file.h"
#include "guesses.h"
#include "inputs.h"
#include "logits.h"
#include "scratch_file.h"
#include "token_files.h"

namespace farm {

namespace {

constexpr const char* kPrefillMethod = "prefill_forward";
constexpr const char* kEndNew = "new";
constexpr const char* kEndStop = "stop";
constexpr const char* kEndContext = "context";
constexpr const char* kEndSeconds = "seconds";

// Writer of generated tokens, which writes each token at once.
class TokenFile {
 public:
  explicit TokenFile(const std::string& path) {
    if (!path.empty()) file_ = std::make_unique<GrowingFile>(path, Stage::kOutputs);
  }

  void add(int64_t line, int32_t token) {
    if (!file_) return;
    // to_chars is far quicker than printf with cold caches of the processor.
    char text[48];
    // Each number leaves room for the separator.
    char* end = std::to_chars(text, text + 24, line).ptr;
    *end++ = ' ';
    end = std::to_chars(end, std::end(text) - 1, token).ptr;
    *end++ = '\n';
    file_->add(text, static_cast<size_t>(end - text));
  }

 private:
  std::unique_ptr<GrowingFile> file_;
};

class GenerationRun {
 public:
  GenerationRun(const Flags& flags, const Backend& backend, SharedReport* report)
      : flags_(flags), backend_(backend), report_(report), stop_(parse_token_ids("stop", flags.stop)) {}

  void all() {
    look_ahead(flags_, report_);
    report_->enter(Stage::kOutputs);
    TokenFile tokens(flags_.tokens_path);
    report_->update([&](Report* report) {
      report->texts.inferences = std::make_shared<ScratchFile>(flags_.output_folder_path, Stage::kOutputs);
      report->texts.over = std::make_shared<ScratchFile>(flags_.output_folder_path, Stage::kOutputs);
    });
    report_->enter(Stage::kOptions);
    backend_.options->apply();
    load();
    report_->enter(Stage::kExecute);
    warm_up();
    for (const Prompt& prompt : prompts_) score(prompt);
    generate_all(&tokens);
    write_trace();
    report_->enter(Stage::kOutputs);
    write_performance(report_->copy(), flags_.performance_output_path);
    prefill_.reset();
    decode_.reset();
    program_.reset();
  }

 private:
  void load() {
    const OpenedProgram opened = open_program(flags_, report_);
    program_ = opened.program;
    ModelSettings settings;
    settings.shared_buffer = flags_.shared_buffer;
    settings.inputs_stay = true;
    decode_ = describe(flags_.decode_method, settings);
    const std::vector<std::string> methods = program_->methods();
    const std::string prefill = flags_.prefill_method.value_or(kPrefillMethod);
    const bool is_there = std::find(methods.begin(), methods.end(), prefill) != methods.end();
    if (!prefill.empty() && (is_there || flags_.prefill_method)) {
      prefill_ = describe(prefill, settings);
      require_same_caches(prefill_->layout(), decode_->layout());
    }
    report_->update([&](Report* report) { report->method = decode_->layout().method; });
    read_lines();

    report_->enter(Stage::kLoad);
    int64_t load_ns = opened.load_ns;
    for (Decoder* method : {prefill_.get(), decode_.get()}) {
      if (method == nullptr) continue;
      const int64_t ns = method->load();
      load_ns += ns;
      report_->update([&](Report* report) { report->method_loads_ns.emplace_back(method->layout().method, ns); });
    }
    report_->update([&](Report* report) {
      report->load_ns = load_ns;
      report->warm = backend_.warm;
    });
  }

  std::unique_ptr<Decoder> describe(const std::string& method, const ModelSettings& settings) {
    const std::vector<std::string> methods = program_->methods();
    if (std::find(methods.begin(), methods.end(), method) == methods.end()) {
      std::string names;
      for (const std::string& name : methods) {
        if (name.rfind("get_", 0) != 0) names += (names.empty() ? "" : ", ") + name;
      }
      throw Failure(Stage::kLoad, "--generate: the program has no method '" + method + "', only: " + names);
    }
    return std::make_unique<Decoder>(program_, method, settings);
  }

  void read_lines() {
    report_->enter(Stage::kInputs);
    const DecoderLayout& layout = decode_->layout();
    prompts_ = read_prompts(InputList(flags_.input_list_path).lines(), layout.vocabulary, layout.context);
    report_->update([&](Report* report) {
      for (const size_t count : prompts_.front().file_tokens) {
        report->inputs.push_back(
            {{static_cast<int64_t>(count)}, "int32", count * sizeof(int32_t), sizeof(int32_t)});
      }
    });
    const bool scores = std::any_of(prompts_.begin(), prompts_.end(), [](const Prompt& one) { return one.has_scored; });
    if (!scores || decode_->logits().has_unit()) return;
    throw Failure(Stage::kInputs, "logits are wanted, and the program does not say their scale (get_logits_scale)");
  }

  void warm_up() {
    for (Decoder* method : {prefill_.get(), decode_.get()}) {
      for (int i = 0; method != nullptr && i < flags_.warm_up; ++i) method->feed({0}, 0, 1);
    }
  }

  void clear() {
    if (prefill_) prefill_->clear();
    decode_->clear();
  }

  // Copies new positions of a call of `from` into the caches of all methods that are called later.
  void remember(const Decoder& from, size_t done, size_t count) {
    if (&from == prefill_.get()) from.remember(done, count, prefill_.get());
    from.remember(done, count, decode_.get());
  }

  template <typename Action>
  void of_line(int64_t line, const Action& action) {
    try {
      action();
    } catch (const Failure& failure) {
      throw Failure(failure.stage, std::string(failure.what()) + " (line " + std::to_string(line) + ", from 0)",
                    failure.code, line);
    }
  }

  void score(const Prompt& prompt) {
    if (!prompt.has_scored) return;
    of_line(prompt.line, [&] {
      const size_t by_prefill = std::min(prompt.tokens.size(), prompt.scored.size());
      std::vector<TensorSpec> written = {write_logits(prompt, prefill_ ? by_prefill : 0, 0)};
      // Scored texts are long: a second pass by decode alone would take most of the time.
      if (prefill_ && !flags_.likelihoods) written.push_back(write_logits(prompt, 0, 1));
      if (prompt.line == 0) report_->update([&](Report* report) { report->outputs = written; });
    });
  }

  // Computes the first `by_prefill` positions by the prefill method, the rest by the decode method.
  TensorSpec write_logits(const Prompt& prompt, size_t by_prefill, int index) {
    report_->enter(Stage::kExecute);
    clear();
    const size_t vocabulary = decode_->layout().vocabulary;
    const size_t columns = flags_.likelihoods ? sizeof(Likelihood) / sizeof(float) : vocabulary;
    const std::string name = "output_" + std::to_string(prompt.line) + "_" + std::to_string(index) + ".raw";
    FileWriter file(flags_.output_folder_path + "/" + name, Stage::kOutputs);
    std::vector<float> row(vocabulary);
    for (size_t done = 0; done < prompt.scored.size();) {
      Decoder& method = done < by_prefill ? *prefill_ : *decode_;
      const size_t count = method.takes(done, done < by_prefill ? by_prefill : prompt.scored.size());
      method.feed(prompt.scored, done, count);
      for (size_t i = 0; i < count; ++i) {
        method.logits().to_float(method.logits_of(done + i), row.data());
        const Likelihood scored = flags_.likelihoods ? likelihood(prompt.scored, done + i, row) : Likelihood{};
        file.write(flags_.likelihoods ? &scored.next : row.data(), columns * sizeof(float));
      }
      remember(method, done, count);
      done += count;
    }
    row.assign(columns, 0.0F);
    for (size_t i = prompt.scored.size(); i < prompt.rows; ++i) file.write(row.data(), columns * sizeof(float));
    file.finish();
    return {{static_cast<int64_t>(prompt.rows), static_cast<int64_t>(columns)},
            "float32",
            prompt.rows * columns * sizeof(float),
            sizeof(float)};
  }

  // Returns the values that --likelihoods writes for a position; zeros for the last one, which has no next token.
  static Likelihood likelihood(const std::vector<int32_t>& sequence, size_t position,
                               const std::vector<float>& logits) {
    if (position + 1 == sequence.size()) return {};
    return likelihood_of(logits.data(), logits.size(), sequence[position + 1]);
  }

  // Generates after all prompts, then repeats until --seconds are over. The first round has no time limit.
  void generate_all(TokenFile* tokens) {
    report_->enter(Stage::kExecute);
    const Clock::time_point start = Clock::now();
    std::optional<Clock::time_point> end;
    if (flags_.seconds) end = start + std::chrono::seconds(*flags_.seconds);
    for (bool first = true; first || (end && Clock::now() < *end); first = false) {
      for (const Prompt& prompt : prompts_) {
        if (!first && Clock::now() >= *end) return;
        of_line(prompt.line, [&] {
          generate(prompt, tokens, first ? std::nullopt : end);
          report_->enter(Stage::kOutputs);
          put_away(report_, first);
          report_->enter(Stage::kExecute);
        });
      }
    }
  }

  void generate(const Prompt& prompt, TokenFile* tokens, std::optional<Clock::time_point> end) {
    clear();
    sequence_.clear();
    // Reserve the greatest size, so that no memory is moved while times are measured.
    sequence_.reserve(decode_->layout().context + decode_->layout().width + 1);
    sequence_ = prompt.tokens;
    tokens_ = tokens;
    end_ = end;
    line_ = prompt.line;
    chosen_ = 0;
    report_->update([&](Report* report) {
      Generated& generated = report->texts.current.emplace();
      generated.line = prompt.line;
      generated.prompt_tokens = prompt.tokens.size();
      const size_t most = std::min(static_cast<size_t>(*flags_.generate), decode_->layout().context);
      generated.tokens.reserve(most);
      generated.steps_ns.reserve(most);
    });

    start_ = Clock::now();
    const size_t length = prompt.tokens.size();
    Decoder& reader = prefill_ ? *prefill_ : *decode_;
    for (size_t done = 0; done < length;) {
      const size_t count = reader.takes(done, length);
      const int64_t ns = reader.feed(sequence_, done, count);
      done += count;
      if (done < length) {
        report_->update([&](Report* report) { report->texts.current->prefill_ns.push_back(ns); });
      } else {
        choose(reader.logits().greedy(reader.logits_of(length - 1)), &Generated::prefill_ns, ns);
      }
      remember(reader, done - count, count);
    }
    // The caches have all tokens of the sequence but the last.
    while (ended_ == nullptr) step();
    report_->update([&](Report* report) { report->texts.current->ended = ended_; });
    ended_ = nullptr;
  }

  // Makes one call with the last token and, if the method is wider, guesses of the next tokens. A guess that equals the
  // likeliest token of the call is a further token, and its logits give the next one.
  void step() {
    const size_t done = sequence_.size() - 1;
    const size_t room = decode_->takes(done, decode_->layout().context) - 1;
    const std::vector<int32_t> guesses = room == 0 ? std::vector<int32_t>{} : guess(sequence_, room);
    sequence_.insert(sequence_.end(), guesses.begin(), guesses.end());
    const int64_t ns = decode_->feed(sequence_, done, 1 + guesses.size());
    sequence_.resize(done + 1);
    for (size_t i = 0; ended_ == nullptr; ++i) {
      const int32_t token = decode_->logits().greedy(decode_->logits_of(done + i));
      choose(token, &Generated::steps_ns, i == 0 ? std::optional(ns) : std::nullopt);
      if (i == guesses.size() || guesses[i] != token) break;
    }
    // Without the last token, which no call has taken yet.
    remember(*decode_, done, sequence_.size() - 1 - done);
  }

  // `ns` is the time of the call and is added to `times`; absent for a further token of the same call.
  void choose(int32_t token, std::vector<int64_t> Generated::*times, std::optional<int64_t> ns) {
    const Clock::time_point now = Clock::now();
    const int64_t total_ns = ns_between(start_, now);
    sequence_.push_back(token);
    ++chosen_;
    report_->update([&](Report* report) {
      Generated& generated = *report->texts.current;
      if (ns) (generated.*times).push_back(*ns);
      generated.tokens.push_back(token);
      if (!generated.first_token_ns) generated.first_token_ns = total_ns;
      generated.total_ns = total_ns;
    });
    tokens_->add(line_, token);
    if (std::find(stop_.begin(), stop_.end(), token) != stop_.end()) {
      ended_ = kEndStop;
    } else if (chosen_ == *flags_.generate) {
      ended_ = kEndNew;
    } else if (sequence_.size() > decode_->layout().context) {
      ended_ = kEndContext;
    } else if (end_ && now >= *end_) {
      ended_ = kEndSeconds;
    }
  }

  void write_trace() {
    if (flags_.etdump_file().empty()) return;
    report_->enter(Stage::kEtdump);
    const std::vector<uint8_t> dump = program_->take_etdump();
    write_file(flags_.etdump_file(), dump.data(), dump.size(), Stage::kEtdump);
  }

  const Flags& flags_;
  const Backend& backend_;
  SharedReport* report_;
  const std::vector<int32_t> stop_;
  std::shared_ptr<Program> program_;
  std::unique_ptr<Decoder> prefill_;  // null if the program has none
  std::unique_ptr<Decoder> decode_;
  std::vector<Prompt> prompts_;

  // Values of the current prompt.
  std::vector<int32_t> sequence_;
  TokenFile* tokens_ = nullptr;
  std::optional<Clock::time_point> end_;
  Clock::time_point start_;
  int64_t line_ = 0;
  int chosen_ = 0;
  const char* ended_ = nullptr;
};

}  // namespace

void generate(const Flags& flags, const Backend& backend, SharedReport* report) {
  GenerationRun(flags, backend, report).all();
}

}  // namespace farm
