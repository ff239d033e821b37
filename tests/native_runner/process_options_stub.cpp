// Preloaded in front of the runner: a stub around QNN that writes to standard error which options are set for the
// process, and hands them on.
#include <dlfcn.h>
#include <executorch/runtime/backend/interface.h>

#include <cstdio>
#include <cstring>

namespace {

using namespace executorch::runtime;

class QnnStub final : public BackendInterface {
 public:
  explicit QnnStub(BackendInterface* real) : real_(real) {}

  bool is_available() const override { return real_->is_available(); }

  Result<DelegateHandle*> init(BackendInitContext& context, FreeableBuffer* processed,
                               ArrayRef<CompileSpec> specs) const override {
    std::fprintf(stderr, "stub: loads\n");
    return real_->init(context, processed, specs);
  }

  Error execute(BackendExecutionContext& context, DelegateHandle* handle, Span<EValue*> args) const override {
    return real_->execute(context, handle, args);
  }

  void destroy(DelegateHandle* handle) const override { real_->destroy(handle); }

  Error set_option(BackendOptionContext& context, const Span<BackendOption>& options) override {
    for (const BackendOption& option : options) {
      if (const int* number = std::get_if<int>(&option.value)) {
        std::fprintf(stderr, "stub: %s=%d\n", option.key, *number);
      }
    }
    return real_->set_option(context, options);
  }

  Error get_option(BackendOptionContext& context, Span<BackendOption>& options) override {
    return real_->get_option(context, options);
  }

 private:
  BackendInterface* real_;
};

}  // namespace

namespace executorch::runtime {

__attribute__((visibility("default"))) Error register_backend(const Backend& backend) {
  void* found = dlsym(RTLD_NEXT, "_ZN10executorch7runtime16register_backendERKNS0_7BackendE");
  const auto real = reinterpret_cast<Error (*)(const Backend&)>(found);
  if (std::strcmp(backend.name, "QnnBackend") != 0) return real(backend);
  return real({backend.name, new QnnStub(backend.backend)});
}

}  // namespace executorch::runtime
