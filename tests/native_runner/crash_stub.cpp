// Preloaded stub of a backend that crashes.
#include <executorch/runtime/backend/interface.h>

#include <csignal>

namespace executorch::runtime {

__attribute__((visibility("default"))) Error set_option(const char*, const Span<BackendOption>) {
  std::raise(SIGSEGV);
  return Error::Internal;
}

}  // namespace executorch::runtime
