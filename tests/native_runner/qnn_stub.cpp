// Stub of a libQnnHtp.so of any version: CORE_MINOR is its core API. Its device_create returns
// (word at byte 8 of the custom config) << 32 | (word at byte 4).
#include <cstdint>

#ifndef BUILD_ID
#define BUILD_ID "v2.stub"
#endif

namespace {

struct Interface {
  uint32_t backend_id;
  const char* provider;
  uint32_t core_version[3];
  uint32_t backend_version[3];
  void* entries[72];
};

struct Config {
  uint32_t option;
  void* custom;
};

uint64_t get_build_id(const char** id) {
  *id = BUILD_ID;
  return 0;
}

uint64_t device_create(void*, const Config** configs, void**) {
  if (configs == nullptr || configs[0] == nullptr) return 0;
  const auto* words = static_cast<const uint32_t*>(configs[0]->custom);
  return static_cast<uint64_t>(words[2]) << 32 | words[1];
}

}  // namespace

extern "C" uint64_t QnnInterface_getProviders(const Interface*** list, uint32_t* count) {
  static Interface only{6, "STUB", {2, CORE_MINOR, 0}, {5, 0, 0}, {}};
  static const Interface* providers[] = {&only};
  only.entries[4] = reinterpret_cast<void*>(&get_build_id);
  only.entries[40] = reinterpret_cast<void*>(&device_create);
  *list = providers;
  *count = 1;
  return 0;
}
