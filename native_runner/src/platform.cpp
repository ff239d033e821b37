// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "platform.h"

#include <executorch/runtime/platform/platform.h>

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <mutex>

namespace farm {

namespace {

// Not destroyed: backends log from their own threads and from static destructors.
struct Memory {
  std::mutex mutex;
  std::string first_error;
};
Memory& memory() {
  static auto* instance = new Memory;
  return *instance;
}

void (*abort_handler)(const std::string&) = nullptr;

const char* base_name(const char* path) {
  const char* base = path;
  for (const char* at = path; *at != '\0'; ++at) {
    if (*at == '/') base = at + 1;
  }
  return base;
}

void emit_log_message(et_timestamp_t, et_pal_log_level_t level, const char* filename, const char*, size_t line,
                      const char* message, size_t length) {
  std::fprintf(stderr, "%c %s:%zu] %.*s\n", static_cast<char>(level), base_name(filename), line,
               static_cast<int>(length), message);
  const std::lock_guard<std::mutex> lock(memory().mutex);
  // The fatal message is the last one and names the failed check.
  if (level == kFatal || (level == kError && memory().first_error.empty())) {
    memory().first_error.assign(message, length);
  }
}

void on_pal_abort() {
  if (abort_handler != nullptr) abort_handler(first_error());
  std::abort();
}

}  // namespace

void install_platform(void (*on_abort)(const std::string& reason)) {
  abort_handler = on_abort;
  executorch::runtime::register_pal(executorch::runtime::PalImpl::create(
      nullptr, &on_pal_abort, nullptr, nullptr, &emit_log_message, nullptr, nullptr, __FILE__));
}

std::string first_error() {
  const std::lock_guard<std::mutex> lock(memory().mutex);
  return memory().first_error;
}

void forget_errors() {
  const std::lock_guard<std::mutex> lock(memory().mutex);
  memory().first_error.clear();
}

}  // namespace farm
