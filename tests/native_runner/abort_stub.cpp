// Preloaded stub of an ExecuTorch that aborts after a failed internal check.
#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/platform/log.h>
#include <executorch/runtime/platform/platform.h>

namespace executorch::runtime {

__attribute__((visibility("default"))) Error set_option(const char*, const Span<BackendOption>) {
  ET_LOG(Fatal, "an internal check failed");
  pal_abort();
}

}  // namespace executorch::runtime
