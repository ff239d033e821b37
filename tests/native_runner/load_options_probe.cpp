// Loads a program for XNNPACK with options, as the runner does and in other ways. load_options_stub prints the received
// options.
#include <executorch/extension/module/module.h>
#include <executorch/runtime/platform/runtime.h>

#include <cstdio>
#include <string>
#include <vector>

#include "backend_options.h"
#include "failure.h"

namespace {

using executorch::extension::Module;
using executorch::runtime::Error;
using executorch::runtime::LoadBackendOptionsMap;

constexpr char kXnnpack[] = "XnnpackBackend";

void load(Module& module, const LoadBackendOptionsMap* options = nullptr) {
  module.unload_method("forward");
  const Error error = module.load_method("forward", nullptr, nullptr, options);
  std::fprintf(stderr, "probe: %s\n", error == Error::Ok ? "loaded" : "refused");
}

void add(const std::string& key, const std::string& value) {
  farm::OptionList list;
  try {
    list.add(key, value);
    std::fprintf(stderr, "probe: added\n");
  } catch (const farm::Failure& failure) {
    std::fprintf(stderr, "probe: %s\n", failure.what());
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const std::string scenario = argv[1];
  executorch::runtime::runtime_init();
  Module module(argv[2], Module::LoadMode::File);
  LoadBackendOptionsMap of_program, of_method, of_others;
  farm::OptionList program, method, others;
  if (scenario == "limits") {
    program.add(std::string(63, 'k'), std::string(255, 'v'));
    for (const size_t size : {63, 64}) add(std::string(size, 'k'), "v");
    for (const size_t size : {255, 256}) add("k", std::string(size, 'v'));
  } else {
    program.add("workspace_sharing_mode", 1);
    program.add("weight_cache_enabled", false);
  }
  method.add("workspace_sharing_mode", 2);
  others.add("workspace_sharing_mode", 2);
  if (of_program.set_options(kXnnpack, program.view()) != Error::Ok) return 3;
  if (of_method.set_options(kXnnpack, method.view()) != Error::Ok) return 3;
  if (of_others.set_options("AnotherBackend", others.view()) != Error::Ok) return 3;
  if (module.load(of_program) != Error::Ok) return 4;
  load(module);
  if (scenario == "override") {
    load(module, &of_method);
    load(module, &of_others);
  }
  load(module);
  return 0;
}
