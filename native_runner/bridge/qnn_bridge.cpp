// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
//
// Replacement of libQnnHtp.so between an ExecuTorch compiled with QNN 2.37 headers and a newer libQnnHtp.so.
//
// QnnHtpDevice_CustomConfig_t is {uint32 option; union}. In the 2.37 headers the union starts at byte
// 4; newer libraries read it at byte 8, find 0 there and refuse every device ("unknown custom
// config socModel 0", 14001). SDK 2.49 reads byte 4 again; 2.47, 2.48, 2.50 and 2.51 read byte 8.
// This library loads the real one, copies its function table and passes the word at both places. The table of
// an older library is returned unchanged.
//
// The real library is $FARM_QNN_REAL_HTP, else <folder of this library>/real/libQnnHtp.so: a path,
// because glibc identifies libraries by SONAME unless the name has a slash.

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

namespace {

// The oldest tried library with the new layout: SDK 2.47, core API 2.36. Versions between it and SDK 2.37 (core
// API 2.26) were not tried, and their tables are returned unchanged.
constexpr uint32_t kCoreMajor = 2;
constexpr uint32_t kFirstNewLayoutMinor = 36;

// QnnInterface_t: a header, then entry points whose order is part of the ABI. Core API 2.36 has 72 of
// them, later versions append; the supported callers know fewer.
constexpr size_t kEntries = 72;
constexpr size_t kDeviceCreate = 40;

struct Interface {
  uint32_t backend_id;
  const char* provider;
  uint32_t core_version[3];
  uint32_t backend_version[3];
  void* entries[kEntries];
};
static_assert(offsetof(Interface, entries) == 40, "QnnInterface_t has a 40-byte header");

struct DeviceConfig {  // QnnDevice_Config_t
  uint32_t option;
  void* custom;
};
constexpr uint32_t kDeviceConfigCustom = 0;

struct OldCustomConfig {  // QnnHtpDevice_CustomConfig_t, 2.37
  uint32_t option;
  uint32_t soc_model;
};
struct NewCustomConfig {
  uint32_t option;
  uint32_t soc_model_at_4;  // padding for libraries that read byte 8
  uint32_t soc_model;
  uint32_t unused[5];
};
static_assert(offsetof(NewCustomConfig, soc_model_at_4) == 4, "2.49 reads byte 4");
static_assert(offsetof(NewCustomConfig, soc_model) == 8, "newer libraries read byte 8");
constexpr uint32_t kCustomConfigSoc = 0;

using DeviceCreate = uint64_t (*)(void* logger, const DeviceConfig** configs, void** device);
using GetProviders = uint64_t (*)(const Interface*** list, uint32_t* count);

// QNN_COMMON_ERROR_SYSTEM: the caller prints it and fails.
constexpr uint64_t kErrorSystem = 1000;

DeviceCreate real_device_create = nullptr;

uint64_t device_create(void* logger, const DeviceConfig** configs, void** device) {
  std::vector<const DeviceConfig*> list;
  std::vector<DeviceConfig> moved;
  std::vector<NewCustomConfig> customs;
  size_t count = 0;
  while (configs != nullptr && configs[count] != nullptr) ++count;
  moved.reserve(count);  // callers keep addresses of elements: no vector may grow
  customs.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const DeviceConfig* config = configs[i];
    if (config->option == kDeviceConfigCustom && config->custom != nullptr) {
      const auto* old = static_cast<const OldCustomConfig*>(config->custom);
      if (old->option == kCustomConfigSoc) {
        customs.push_back(NewCustomConfig{kCustomConfigSoc, old->soc_model, old->soc_model, {}});
        moved.push_back(DeviceConfig{kDeviceConfigCustom, &customs.back()});
        config = &moved.back();
      }
    }
    list.push_back(config);
  }
  list.push_back(nullptr);
  return real_device_create(logger, configs == nullptr ? nullptr : list.data(), device);
}

std::string real_library_path() {
  if (const char* path = std::getenv("FARM_QNN_REAL_HTP"); path != nullptr && *path != '\0') return path;
  Dl_info self;
  if (dladdr(reinterpret_cast<void*>(&real_library_path), &self) == 0) return "";
  std::string path = self.dli_fname;
  const size_t slash = path.rfind('/');
  return (slash == std::string::npos ? "./" : path.substr(0, slash + 1)) + "real/libQnnHtp.so";
}

struct Bridge {
  GetProviders get_providers = nullptr;
  const Interface** list = nullptr;
  uint32_t count = 0;
  std::vector<Interface> copies;
  std::vector<const Interface*> pointers;

  uint64_t open() {
    const std::string path = real_library_path();
    // DEEPBIND: the real library brings libc++ and libc++abi. In the global scope libstdc++ comes first,
    // and its __dynamic_cast crashes on type information of libc++abi during graph preparation.
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
    if (library == nullptr) {
      std::fprintf(stderr, "farm qnn bridge: cannot load the real library: %s\n", dlerror());
      return kErrorSystem;
    }
    get_providers = reinterpret_cast<GetProviders>(dlsym(library, "QnnInterface_getProviders"));
    if (get_providers == nullptr) {
      std::fprintf(stderr, "farm qnn bridge: %s has no QnnInterface_getProviders\n", path.c_str());
      return kErrorSystem;
    }
    const uint64_t error = get_providers(&list, &count);
    if (error != 0) return error;
    copies.reserve(count);
    for (uint32_t i = 0; i < count; ++i) {
      const Interface* provider = list[i];
      if (provider->core_version[0] == kCoreMajor && provider->core_version[1] >= kFirstNewLayoutMinor) {
        copies.push_back(*provider);
        real_device_create = reinterpret_cast<DeviceCreate>(provider->entries[kDeviceCreate]);
        copies.back().entries[kDeviceCreate] = reinterpret_cast<void*>(&device_create);
        provider = &copies.back();
      }
      pointers.push_back(provider);
    }
    return 0;
  }
};

}  // namespace

extern "C" __attribute__((visibility("default"))) uint64_t QnnInterface_getProviders(
    const Interface*** list, uint32_t* count) {
  if (list == nullptr || count == nullptr) return kErrorSystem;
  // Not destroyed: the table is read until the process ends.
  static Bridge* bridge = new Bridge;
  static std::once_flag once;
  static uint64_t error = 0;
  std::call_once(once, [] { error = bridge->open(); });
  if (error != 0) return error;
  *list = bridge->pointers.data();
  *count = static_cast<uint32_t>(bridge->pointers.size());
  return 0;
}
