// Stub of a DSP with heap profiling, around the simulator's libQnnHtp.so. Its heap grows and shrinks with the contexts
// of the process, and is reported by QNN's profile events, from which ExecuTorch writes its file.
//
// tests/heap_sdk_stub.py defines STUB_HTP_LIBRARY (the real library) and STUB_SETTINGS, which the variable HEAP_STUB
// replaces. Settings are words:
//   keep=BYTES   every freed context leaves so many bytes allocated
//   refuse=N     the Nth creation of a context fails
//   silent       no event, as from a library that measures no heap
//   swapped      each event has the other's name
//   twice        every event twice

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {
constexpr int kOpenFlags = RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND;
}  // namespace

#include "qnn_library_stub.h"

namespace {

constexpr uint64_t kErrorRefused = 1002;
constexpr uint64_t kIdleBytes = 928212;  // in use without any context

// Positions in QnnInterface_t's table of functions, which is part of QNN's ABI.
enum Entry : size_t {
  kBackendGetBuildId = 4,
  kContextCreateFromBinary = 13,
  kContextFree = 14,
  kProfileGetEvents = 30,
  kProfileGetEventData = 32,
};

struct EventData {  // QnnProfile_EventData_t
  uint32_t type;
  uint32_t unit;
  uint64_t value;
  const char* identifier;
};
static_assert(sizeof(EventData) == 24, "the caller has one on its stack");
constexpr uint32_t kTypeHeap = 0x48454150;  // no id of QNN
constexpr uint32_t kUnitBytes = 2;
constexpr uint64_t kFirstId = uint64_t{kTypeHeap} << 32;  // QNN's ids are addresses, and this is none

std::mutex mutex;
std::map<void*, uint64_t> contexts;  // bytes of each binary
uint64_t heap_bytes = kIdleBytes;
uint64_t creations = 0;
std::vector<EventData> events;                    // all events of the process
std::map<void*, std::vector<uint64_t>> unread;    // ids by profile
std::map<void*, std::vector<uint64_t>> answered;  // ids of the last answer of a profile, which its caller reads

const std::string& settings() {
  static const std::string words = [] {
    const char* given = std::getenv("HEAP_STUB");
    return " " + std::string(given != nullptr ? given : STUB_SETTINGS) + " ";
  }();
  return words;
}

bool is_set(const std::string& word) { return settings().find(" " + word + " ") != std::string::npos; }

uint64_t number(const std::string& name) {
  const size_t place = settings().find(" " + name + "=");
  return place == std::string::npos ? 0 : std::strtoull(settings().c_str() + place + name.size() + 2, nullptr, 10);
}

void report(void* profile, bool before) {
  if (profile == nullptr || is_set("silent")) return;
  const char* name = before != is_set("swapped") ? "DSP:before_context_created" : "DSP:after_context_freed";
  for (int times = is_set("twice") ? 2 : 1; times > 0; --times) {
    unread[profile].push_back(kFirstId + events.size());
    events.push_back(EventData{kTypeHeap, kUnitBytes, heap_bytes, name});
  }
}

uint64_t context_create_from_binary(
    void* backend, void* device, const void** configs, const void* binary, uint64_t size, void** context,
    void* profile) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (++creations == number("refuse")) return kErrorRefused;
  const auto error = original<decltype(&context_create_from_binary)>(kContextCreateFromBinary)(
      backend, device, configs, binary, size, context, profile);
  if (error != 0) return error;
  report(profile, true);
  contexts[*context] = size;
  heap_bytes += size;
  std::fprintf(stderr, "heap stub: %zu contexts%s\n", contexts.size(), profile != nullptr ? ", creation profiled" : "");
  return 0;
}

uint64_t context_free(void* context, void* profile) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto error = original<decltype(&context_free)>(kContextFree)(context, profile);
  const auto found = contexts.find(context);
  if (error != 0 || found == contexts.end()) return error;
  heap_bytes = heap_bytes - found->second + number("keep");
  contexts.erase(found);
  report(profile, false);
  std::fprintf(stderr, "heap stub: %zu contexts%s\n", contexts.size(), profile != nullptr ? ", free profiled" : "");
  return 0;
}

uint64_t profile_get_events(void* profile, const uint64_t** ids, uint32_t* count) {
  const auto error = original<decltype(&profile_get_events)>(kProfileGetEvents)(profile, ids, count);
  if (error != 0) return error;
  const std::lock_guard<std::mutex> lock(mutex);
  std::vector<uint64_t>& all = answered[profile];
  all.assign(*ids, *ids + *count);
  all.insert(all.end(), unread[profile].begin(), unread[profile].end());
  unread[profile].clear();
  *ids = all.data();
  *count = static_cast<uint32_t>(all.size());
  return 0;
}

uint64_t profile_get_event_data(uint64_t id, EventData* data) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (id >= kFirstId && id - kFirstId < events.size()) {
      *data = events[id - kFirstId];
      return 0;
    }
  }
  return original<decltype(&profile_get_event_data)>(kProfileGetEventData)(id, data);
}

// Returns the simulator's version with the name of the stub, which every fingerprint has.
uint64_t backend_get_build_id(const char** id) {
  static std::string own;
  const auto error = original<decltype(&backend_get_build_id)>(kBackendGetBuildId)(id);
  if (error != 0) return error;
  if (own.empty()) own = std::string(*id) + "-heap_stub";
  *id = own.c_str();
  return 0;
}

void replace_functions(Interface& own) {
  own.entries[kBackendGetBuildId] = reinterpret_cast<void*>(&backend_get_build_id);
  own.entries[kContextCreateFromBinary] = reinterpret_cast<void*>(&context_create_from_binary);
  own.entries[kContextFree] = reinterpret_cast<void*>(&context_free);
  own.entries[kProfileGetEvents] = reinterpret_cast<void*>(&profile_get_events);
  own.entries[kProfileGetEventData] = reinterpret_cast<void*>(&profile_get_event_data);
}

}  // namespace
