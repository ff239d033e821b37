// Stub of QNN's libQnnLpai.so for x86_64: it has LPAI's backend id, versions and behaviour, logs LPAI's custom configs,
// and calls the libQnnHtp.so of this machine for everything else.
//
// The tests define STUB_HTP_LIBRARY (path of libQnnHtp.so), STUB_LOG (log file, one line for each call), STUB_SOC_MODEL
// (QNN's number of the SoC), STUB_UNKNOWN_TYPES (HTP operators that the stub refuses) and STUB_MOST_FPS (frames per
// second at the base clock, 0 for any; core 1 alone reaches half). Constants below are LPAI's in QNN 2.37.

#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

namespace {
// RTLD_GLOBAL, as in ExecuTorch: HTP's own libraries find their symbols in the global scope.
constexpr int kOpenFlags = RTLD_NOW | RTLD_GLOBAL;
}  // namespace

#include "../native_runner/qnn_library_stub.h"

namespace {

constexpr uint32_t kBackendId = 12;
constexpr uint32_t kBackendVersion[3] = {2, 20, 0};

// Positions in QnnInterface_t's table of functions, which is part of QNN's ABI.
enum Entry : size_t {
  kBackendCreate = 1,
  kBackendGetApiVersion = 3,
  kBackendValidateOpConfig = 7,
  kContextCreate = 9,
  kContextCreateFromBinary = 13,
  kGraphCreate = 15,
  kGraphSetConfig = 17,
  kGraphFinalize = 19,
  kGraphRetrieve = 20,
  kDeviceCreate = 40,
};

// Common beginning of Qnn{Backend,Context,Graph,Device}_Config_t: the option, and a pointer for option 0.
struct Config {
  uint32_t option;
  void* custom;
};
constexpr uint32_t kCustom = 0;

struct LpaiCustomConfig {
  uint32_t option;
  void* config;
};
constexpr uint32_t kHardware = 0;
constexpr uint32_t kPerformance = 201;
constexpr uint32_t kCoreAffinity = 301;
constexpr uint32_t kPrepare = 10001;

struct SocConfig {  // QnnHtpDevice_CustomConfig_t of QNN 2.37, which the bridge translates.
  uint32_t option;
  uint32_t soc_model;
};

struct OpConfig {  // Qnn_OpConfig_t, version 1
  uint32_t version;
  const char* name;
  const char* package;
  const char* type;
  uint64_t rest[6];  // numbers and addresses of parameters, inputs and outputs
};
static_assert(sizeof(OpConfig) == 80, "it travels on the stack, whole");
constexpr const char* kUnknownTypes[] = {STUB_UNKNOWN_TYPES};
constexpr uint64_t kErrorOpNotSupported = 3110;

constexpr uint64_t kErrorGraphGeneral = 1000;

// Settings of a graph on which its possible rate depends.
struct Settings {
  uint64_t fps = 1;
  uint64_t ftrt_ratio = 10;
  bool real_time = true;
  uint32_t core_selection = 0;
};

std::mutex mutex;
std::set<void*> retrieved;
std::map<void*, Settings> settings;

// ftrt_ratio is the factor of the base clock in tenths.
bool is_feasible(const Settings& asked) {
  const uint64_t share = asked.core_selection == 2 ? 2 : 1;
  return STUB_MOST_FPS == 0 || !asked.real_time || asked.fps * share * 10 <= STUB_MOST_FPS * asked.ftrt_ratio;
}

void note(const char* format, ...) {
  char line[512];
  va_list arguments;
  va_start(arguments, format);
  int size = std::vsnprintf(line, sizeof line - 1, format, arguments);
  va_end(arguments);
  if (size < 0) return;
  if (size > static_cast<int>(sizeof line) - 2) size = sizeof line - 2;
  line[size++] = '\n';
  const int file = open(STUB_LOG, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (file < 0) return;
  if (write(file, line, static_cast<size_t>(size)) != size) std::perror("lpai stub: " STUB_LOG);
  close(file);
}

const char* program() {
  static char name[64] = "";
  if (name[0] == '\0') {
    const int file = open("/proc/self/comm", O_RDONLY | O_CLOEXEC);
    const ssize_t size = file < 0 ? -1 : read(file, name, sizeof name - 1);
    if (file >= 0) close(file);
    if (size > 0) name[size - 1] = '\0';
  }
  return name;
}

// Logs configs of LPAI by name, and unknown ones by number.
void note_configs(const char* call, const Config* const* configs) {
  for (size_t i = 0; configs != nullptr && configs[i] != nullptr; ++i) {
    if (configs[i]->option != kCustom || configs[i]->custom == nullptr) {
      note("%s %s option=%u", program(), call, configs[i]->option);
      continue;
    }
    const auto* custom = static_cast<const LpaiCustomConfig*>(configs[i]->custom);
    const auto* words = static_cast<const uint32_t*>(custom->config);
    if (custom->option == kHardware && words != nullptr) {
      note("%s %s target=%u hardware=%u", program(), call, words[0], words[1]);
    } else if (custom->option == kPerformance && words != nullptr) {
      note("%s %s fps=%u ftrt_ratio=%u client_perf_type=%u", program(), call, words[0], words[1], words[2]);
    } else if (custom->option == kCoreAffinity && words != nullptr) {
      note("%s %s affinity=%u core_selection=%u", program(), call, words[0], words[1]);
    } else if (custom->option == kPrepare) {
      note("%s %s prepare", program(), call);
    } else {
      note("%s %s custom=%u", program(), call, custom->option);
    }
  }
}

// Callers of LPAI make no device on a host; HTP needs a device with the SoC.
void* device() {
  static void* handle = [] {
    SocConfig soc{0, STUB_SOC_MODEL};
    Config config{kCustom, &soc};
    const Config* configs[] = {&config, nullptr};
    void* made = nullptr;
    const auto error = original<uint64_t (*)(void*, const Config**, void**)>(kDeviceCreate)(nullptr, configs, &made);
    if (error != 0) note("%s device_create error=%lu", program(), static_cast<unsigned long>(error));
    return made;
  }();
  return handle;
}

uint64_t backend_create(void* logger, const Config** configs, void** backend) {
  note_configs("backend_create", configs);
  return original<decltype(&backend_create)>(kBackendCreate)(logger, nullptr, backend);
}

struct ApiVersion {
  uint32_t core[3];
  uint32_t backend[3];
};

uint64_t backend_get_api_version(ApiVersion* version) {
  const auto error = original<decltype(&backend_get_api_version)>(kBackendGetApiVersion)(version);
  if (error == 0) {
    for (int i = 0; i < 3; ++i) version->backend[i] = kBackendVersion[i];
  }
  return error;
}

uint64_t backend_validate_op_config(void* backend, OpConfig config) {
  for (const char* type : kUnknownTypes) {
    if (config.type != nullptr && std::strcmp(config.type, type) == 0) return kErrorOpNotSupported;
  }
  return original<decltype(&backend_validate_op_config)>(kBackendValidateOpConfig)(backend, config);
}

uint64_t context_create(void* backend, void*, const Config** configs, void** context) {
  note_configs("context_create", configs);
  return original<decltype(&context_create)>(kContextCreate)(backend, device(), nullptr, context);
}

uint64_t context_create_from_binary(
    void* backend, void*, const Config** configs, const void* binary, uint64_t size, void** context, void* profile) {
  note_configs("context_create_from_binary", configs);
  return original<decltype(&context_create_from_binary)>(kContextCreateFromBinary)(
      backend, device(), nullptr, binary, size, context, profile);
}

uint64_t graph_create(void* context, const char* name, const Config** configs, void** graph) {
  note_configs("graph_create", configs);
  return original<decltype(&graph_create)>(kGraphCreate)(context, name, nullptr, graph);
}

uint64_t graph_set_config(void* graph, const Config** configs) {
  note_configs("graph_set_config", configs);
  const std::lock_guard<std::mutex> lock(mutex);
  Settings& asked = settings[graph];
  for (size_t i = 0; configs != nullptr && configs[i] != nullptr; ++i) {
    if (configs[i]->option != kCustom || configs[i]->custom == nullptr) continue;
    const auto* custom = static_cast<const LpaiCustomConfig*>(configs[i]->custom);
    const auto* words = static_cast<const uint32_t*>(custom->config);
    if (words == nullptr) continue;
    if (custom->option == kPerformance) {
      asked.fps = words[0];
      asked.ftrt_ratio = words[1];
      asked.real_time = words[2] == 1;
    } else if (custom->option == kCoreAffinity) {
      asked.core_selection = words[1];
    }
  }
  return 0;
}

uint64_t graph_retrieve(void* context, const char* name, void** graph) {
  const auto error = original<decltype(&graph_retrieve)>(kGraphRetrieve)(context, name, graph);
  if (error == 0) {
    const std::lock_guard<std::mutex> lock(mutex);
    retrieved.insert(*graph);
    settings[*graph] = {};
  }
  return error;
}

// LPAI also finalizes graphs from a binary, which HTP refuses. Real-time graphs beyond the possible rate are refused at
// that call.
uint64_t graph_finalize(void* graph, void* profile, void* signal) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (retrieved.count(graph) != 0) {
      const bool feasible = is_feasible(settings[graph]);
      note("%s graph_finalize%s", program(), feasible ? "" : " refused");
      return feasible ? 0 : kErrorGraphGeneral;
    }
  }
  return original<decltype(&graph_finalize)>(kGraphFinalize)(graph, profile, signal);
}

uint64_t device_create(void*, const Config** configs, void** handle) {
  note_configs("device_create", configs);
  *handle = device();
  return *handle == nullptr ? kErrorSystem : 0;
}

void replace_functions(Interface& own) {
  own.backend_id = kBackendId;
  own.provider = "STUB_LPAI";
  for (int i = 0; i < 3; ++i) own.backend_version[i] = kBackendVersion[i];
  own.entries[kBackendCreate] = reinterpret_cast<void*>(&backend_create);
  own.entries[kBackendGetApiVersion] = reinterpret_cast<void*>(&backend_get_api_version);
  own.entries[kBackendValidateOpConfig] = reinterpret_cast<void*>(&backend_validate_op_config);
  own.entries[kContextCreate] = reinterpret_cast<void*>(&context_create);
  own.entries[kContextCreateFromBinary] = reinterpret_cast<void*>(&context_create_from_binary);
  own.entries[kGraphCreate] = reinterpret_cast<void*>(&graph_create);
  own.entries[kGraphSetConfig] = reinterpret_cast<void*>(&graph_set_config);
  own.entries[kGraphRetrieve] = reinterpret_cast<void*>(&graph_retrieve);
  own.entries[kGraphFinalize] = reinterpret_cast<void*>(&graph_finalize);
  own.entries[kDeviceCreate] = reinterpret_cast<void*>(&device_create);
}

}  // namespace
