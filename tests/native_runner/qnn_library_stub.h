// Base of stubs of a QNN library: the functions of QNN's interface, and the real library. A stub
// defines `replace_functions`, which changes the table that callers get.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>

namespace {

constexpr uint64_t kErrorSystem = 1000;
constexpr size_t kEntries = 72;

struct Interface {
  uint32_t backend_id;
  const char* provider;
  uint32_t core_version[3];
  uint32_t backend_version[3];
  void* entries[kEntries];
};
static_assert(offsetof(Interface, entries) == 40, "QnnInterface_t has a 40-byte header");

const Interface* real = nullptr;

void replace_functions(Interface& own);

template <typename Function>
Function original(size_t entry) {
  return reinterpret_cast<Function>(real->entries[entry]);
}

uint64_t load(const Interface*** list) {
  void* library = dlopen(STUB_HTP_LIBRARY, kOpenFlags);
  if (library == nullptr) {
    std::fprintf(stderr, "stub of a QNN library: %s\n", dlerror());
    return kErrorSystem;
  }
  using GetProviders = uint64_t (*)(const Interface***, uint32_t*);
  const auto get_providers = reinterpret_cast<GetProviders>(dlsym(library, "QnnInterface_getProviders"));
  const Interface** providers = nullptr;
  uint32_t count = 0;
  if (get_providers == nullptr || get_providers(&providers, &count) != 0 || count != 1) return kErrorSystem;
  real = providers[0];
  static Interface own = *real;
  replace_functions(own);
  static const Interface* pointers[] = {&own};
  *list = pointers;
  return 0;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) uint64_t QnnInterface_getProviders(
    const Interface*** list, uint32_t* count) {
  static const Interface** own = nullptr;
  static const uint64_t error = load(&own);
  if (error != 0) return error;
  *list = own;
  *count = 1;
  return 0;
}
