// Preloaded stub around XNNPACK that prints the options of each load to standard error. STUB_KNOWS=nothing: no options;
// STUB_KNOWS=numbers: boolean options are numbers. A file `refuse_init` in the current folder ends one load with an
// error, after the options were read, and is removed.
#include "backend_stub.h"

#include <cstdlib>
#include <string>

namespace {

using namespace executorch::runtime;

class XnnpackStub final : public BackendStub {
 public:
  using BackendStub::BackendStub;

  Result<DelegateHandle*> init(BackendInitContext& context, FreeableBuffer* processed,
                               ArrayRef<CompileSpec> specs) const override {
    std::fprintf(stderr, "stub: %zu options\n", context.runtime_specs().size());
    for (const BackendOption& option : context.runtime_specs()) {
      if (const auto boolean = context.get_runtime_spec<bool>(option.key); boolean.ok()) {
        std::fprintf(stderr, "stub: bool %s=%s\n", option.key, *boolean ? "true" : "false");
      } else if (const auto number = context.get_runtime_spec<int>(option.key); number.ok()) {
        std::fprintf(stderr, "stub: int %s=%d\n", option.key, *number);
      } else if (const auto text = context.get_runtime_spec<const char*>(option.key); text.ok()) {
        std::fprintf(stderr, "stub: text %s=%s\n", option.key, *text);
      }
    }
    if (std::remove("refuse_init") == 0) return Error::DelegateInvalidCompatibility;
    return real_->init(context, processed, specs);
  }

  Error get_option(BackendOptionContext& context, Span<BackendOption>& options) override {
    const char* knows = std::getenv("STUB_KNOWS");
    if (knows == nullptr) return real_->get_option(context, options);
    if (std::string(knows) == "numbers") {
      for (BackendOption& option : options) option.value = 1;
    }
    return Error::Ok;
  }
};

}  // namespace

namespace executorch::runtime {

__attribute__((visibility("default"))) Error register_backend(const Backend& backend) {
  return register_with_stub<XnnpackStub>(backend, "XnnpackBackend");
}

}  // namespace executorch::runtime
