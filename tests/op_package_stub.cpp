// Stub of an op package for HTP: QNN loads it, registers it and validates operators with it, and it computes nothing.
// It is written from the C interface that QNN documents (QnnOpPackage.h, API 1.4) and the entry point of HTP packages
// (op_pkg_init). A kernel takes the C++ headers HTP/core of Qualcomm's SDK. c++ -shared -fPIC makes the library.
//
// PACKAGE is its name; TAG makes another library of the same package. It prints each call to standard error.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <dlfcn.h>

#ifndef TAG
#define TAG "first"
#endif

namespace {

using Result = std::uint64_t;  // Qnn_ErrorHandle_t, 0 is QNN_SUCCESS

struct Version {
  std::uint32_t major, minor, patch;
};

struct Info {  // QnnOpPackage_Info_t
  const char* package_name;
  const char* const* operation_names;
  const void* operation_info;
  std::uint32_t operation_count;
  const void* optimizations;
  std::uint32_t optimization_count;
  const char* sdk_build_id;
  const void* sdk_api_version;
  const void* package_info;
  const void* opset_version;
  std::size_t reserved[12];
};

struct Interface {  // QnnOpPackage_Interface_t, with QnnOpPackage_ImplementationV1_4_t
  Version version;
  Result (*init)(void* infrastructure);
  Result (*terminate)();
  Result (*get_info)(const Info** info);
  Result (*validate)();  // takes a Qnn_OpConfig_t by value and does not read it
  void* create_op_impl;     // never called for HTP
  void* free_op_impl;
  Result (*log_initialize)(void* callback, int level);
  Result (*log_set_level)(int level);
  Result (*log_terminate)();
};

const char* const kOperations[] = {"StubOp"};
const Info kInfo = {PACKAGE, kOperations, nullptr, 1, nullptr, 0, nullptr, nullptr, nullptr, nullptr, {}};

void say(const char* what) {
  Dl_info here{};
  dladdr(reinterpret_cast<const void*>(&kInfo), &here);
  std::fprintf(stderr, "op_package_stub %s: %s from %s\n", TAG, what, here.dli_fname);
}

}  // namespace

extern "C" {

int op_pkg_init(const char** name) {  // PackageOpIf, whose first member is the name
  say("loaded");
  *name = PACKAGE;
  return 0;
}

Result StubInterfaceProvider(Interface* interface) {
  *interface = {
      {1, 4, 0},
      [](void*) -> Result { return 0; },
      []() -> Result { return 0; },
      [](const Info** info) -> Result {
        say("registered");
        *info = &kInfo;
        return 0;
      },
      []() -> Result {
        say("validated");
        return 0;
      },
      nullptr,
      nullptr,
      [](void*, int) -> Result { return 0; },
      [](int) -> Result { return 0; },
      []() -> Result { return 0; },
  };
  return 0;
}

}  // extern "C"
