// Preloaded stub around QNN that prints the options of the process to standard error and sets them in QNN.
#include "backend_stub.h"

namespace {

using namespace executorch::runtime;

class QnnStub final : public BackendStub {
 public:
  using BackendStub::BackendStub;

  Result<DelegateHandle*> init(BackendInitContext& context, FreeableBuffer* processed,
                               ArrayRef<CompileSpec> specs) const override {
    std::fprintf(stderr, "stub: loads\n");
    return real_->init(context, processed, specs);
  }

  Error set_option(BackendOptionContext& context, const Span<BackendOption>& options) override {
    for (const BackendOption& option : options) {
      if (const int* number = std::get_if<int>(&option.value)) {
        std::fprintf(stderr, "stub: %s=%d\n", option.key, *number);
      }
    }
    return real_->set_option(context, options);
  }
};

}  // namespace

namespace executorch::runtime {

__attribute__((visibility("default"))) Error register_backend(const Backend& backend) {
  return register_with_stub<QnnStub>(backend, "QnnBackend");
}

}  // namespace executorch::runtime
