// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "serve.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <system_error>

#include "anchor.h"
#include "answers.h"
#include "backend_options.h"
#include "job.h"
#include "json.h"
#include "lines.h"
#include "watchdog.h"
#include "words.h"

namespace farm {

namespace {

constexpr size_t kLongestLine = 1 << 20;

std::string ready_line() {
  Json json;
  json.object().key("schema").integer(1);
  json.key("ready").boolean(true);
  json.key("pid").integer(::getpid());
  json.key("versions").object().key("executorch").string(FARM_EXECUTORCH_VERSION);
  json.key("runner").string(FARM_RUNNER_VERSION).end();
  json.end();
  return json.text() + "\n";
}

ParsedFlags parse_line(const LineReader::Line& line, const BackendFlags& session) {
  ParsedFlags parsed;
  try {
    if (line.too_long) {
      throw Failure(Stage::kFlags, "the job's line has more than " + std::to_string(kLongestLine) + " bytes");
    }
    return parse_job(split_words(line.text), session);
  } catch (const Failure& failure) {
    parsed.failure = failure;
    parsed.flags.result_path.clear();
    parsed.flags.backend = session;
    return parsed;
  }
}

// Folder in which the session was started; the process returns to it after each job.
class StartFolder {
 public:
  StartFolder() : descriptor_(::open(".", O_PATH | O_DIRECTORY | O_CLOEXEC)) {}
  ~StartFolder() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  StartFolder(const StartFolder&) = delete;
  StartFolder& operator=(const StartFolder&) = delete;

  void enter() const {
    if (::fchdir(descriptor_) != 0) {
      throw Failure(Stage::kFlags, std::string("cannot return to the folder of the session: ") + std::strerror(errno));
    }
  }

 private:
  int descriptor_;
};

void begin(int64_t number, const StartFolder& folder, ParsedFlags* parsed) {
  std::fprintf(stderr, "farm_runner: job %lld begins\n", static_cast<long long>(number));
  try {
    folder.enter();
  } catch (const Failure& failure) {
    if (!parsed->failure) parsed->failure = failure;
  }
}

}  // namespace

int serve(const Flags& flags) {
  std::signal(SIGPIPE, SIG_IGN);
  const Answers answers;
  const StartFolder folder;
  ProcessOptions options(flags.backend);
  options.apply();
  Watchdog* watchdog = Watchdog::start(answers.descriptor());

  Anchor anchor;
  if (!flags.keep_loaded.empty()) {
    try {
      anchor.load(flags.keep_loaded, LoadOptions(flags.backend).map());
    } catch (const Failure& failure) {
      // Without it jobs only take longer.
      std::fprintf(stderr, "farm_runner: --keep_loaded: %s\n", failure.what());
    }
  }
  Backend backend;
  backend.options = &options;
  backend.warm = anchor.holds_qnn();

  answers.write(ready_line());
  LineReader lines(STDIN_FILENO, kLongestLine);
  try {
    for (int64_t number = 0;;) {
      const std::optional<LineReader::Line> line = lines.next();
      if (!line) break;
      if (!line->too_long && line->text.find_first_not_of(" \t\r") == std::string::npos) continue;
      ParsedFlags parsed = parse_line(*line, flags.backend);
      begin(number, folder, &parsed);
      const bool refused = parsed.failure.has_value();
      Job job(std::move(parsed), number, &answers);
      refused ? job.refuse() : job.run(backend, watchdog);
      ++number;
    }
  } catch (const std::system_error& error) {
    std::fprintf(stderr, "farm_runner: cannot read %s\n", error.what());
    return exit_code(Stage::kFlags);
  }
  watchdog->stop_watching_reader();
  return 0;
}

}  // namespace farm
