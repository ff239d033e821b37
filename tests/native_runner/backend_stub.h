// Base of preloaded stubs around a backend of ExecuTorch: calls that a stub does not override go to the backend.
#pragma once

#include <dlfcn.h>
#include <executorch/runtime/backend/interface.h>

#include <cstdio>
#include <cstring>

class BackendStub : public executorch::runtime::BackendInterface {
 public:
  explicit BackendStub(BackendInterface* real) : real_(real) {}

  bool is_available() const override { return real_->is_available(); }

  executorch::runtime::Result<executorch::runtime::DelegateHandle*> init(
      executorch::runtime::BackendInitContext& context, executorch::runtime::FreeableBuffer* processed,
      executorch::runtime::ArrayRef<executorch::runtime::CompileSpec> specs) const override {
    return real_->init(context, processed, specs);
  }

  executorch::runtime::Error execute(
      executorch::runtime::BackendExecutionContext& context, executorch::runtime::DelegateHandle* handle,
      executorch::runtime::Span<executorch::runtime::EValue*> args) const override {
    return real_->execute(context, handle, args);
  }

  void destroy(executorch::runtime::DelegateHandle* handle) const override { real_->destroy(handle); }

  executorch::runtime::Error set_option(
      executorch::runtime::BackendOptionContext& context,
      const executorch::runtime::Span<executorch::runtime::BackendOption>& options) override {
    return real_->set_option(context, options);
  }

  executorch::runtime::Error get_option(
      executorch::runtime::BackendOptionContext& context,
      executorch::runtime::Span<executorch::runtime::BackendOption>& options) override {
    return real_->get_option(context, options);
  }

 protected:
  BackendInterface* real_;
};

// Registers a backend, with a stub around the one called `name`.
template <typename Stub>
executorch::runtime::Error register_with_stub(const executorch::runtime::Backend& backend, const char* name) {
  using Register = executorch::runtime::Error (*)(const executorch::runtime::Backend&);
  void* found = dlsym(RTLD_NEXT, "_ZN10executorch7runtime16register_backendERKNS0_7BackendE");
  const auto real = reinterpret_cast<Register>(found);
  if (std::strcmp(backend.name, name) != 0) return real(backend);
  return real({backend.name, new Stub(backend.backend)});
}
