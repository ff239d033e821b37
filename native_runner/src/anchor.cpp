// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "anchor.h"

#include <executorch/extension/data_loader/buffer_data_loader.h>

#include <cstring>
#include <string_view>
#include <utility>

#include "failure.h"
#include "files.h"
#include "platform.h"

namespace farm {

namespace {

using executorch::extension::BufferDataLoader;
using executorch::extension::Module;
using executorch::runtime::Error;

// QnnContextCustomProtocol of ExecuTorch, which no installed header has: magic number (4 bytes), signature (8), size of
// the binary (8). A release that is missing here may have another layout: compare its
// backends/qualcomm/runtime/backends/QnnCustomProtocol.h, then add it.
constexpr std::string_view kKnown[] = {"1.3.", "1.4.", "1.5."};
constexpr uint32_t kMagic = 0x5678ABCD;
constexpr size_t kSize = sizeof(uint32_t) + sizeof(uint64_t);
constexpr size_t kHeader = kSize + sizeof(uint64_t);
// Step of the search for headers; ExecuTorch aligns the data of delegates to a multiple of it.
constexpr size_t kDelegateAlignment = 16;

// Topmost bit of the new signatures. ExecuTorch's are times of compilation in nanoseconds and do not have it.
constexpr uint8_t kTopBit = 0x80;

constexpr bool knows_layout_of(std::string_view version) {
  for (const std::string_view known : kKnown) {
    if (version.substr(0, known.size()) == known) return true;
  }
  return false;
}
static_assert(knows_layout_of("1.5.1+cpu") && !knows_layout_of("1.50.0") && !knows_layout_of("unknown"));
static_assert(kHeader == 20 && kHeader - kSize == sizeof(uint64_t));

// Returns the number of replaced signatures.
size_t change_signatures(std::vector<uint8_t>* program) {
  size_t count = 0;
  for (size_t at = 0; at + kHeader <= program->size(); at += kDelegateAlignment) {
    uint8_t* header = program->data() + at;
    uint32_t magic = 0;
    uint64_t size = 0;
    std::memcpy(&magic, header, sizeof(magic));
    if (magic != kMagic) continue;
    std::memcpy(&size, header + kSize, sizeof(size));
    if (size > program->size() - at - kHeader) continue;
    header[kSize - 1] ^= kTopBit;
    ++count;
  }
  return count;
}

void check(Error error, const std::string& path) {
  if (error == Error::Ok) return;
  throw Failure(Stage::kLoad,
                "cannot load '" + path + "': " + executorch::runtime::to_string(error) + ": " + first_error(),
                static_cast<int64_t>(error));
}

}  // namespace

void Anchor::load(const std::string& path, const executorch::runtime::LoadBackendOptionsMap& options) {
  if constexpr (!knows_layout_of(FARM_EXECUTORCH_VERSION)) {
    throw Failure(Stage::kLoad, "'" + path + "' is not kept: how ExecuTorch " FARM_EXECUTORCH_VERSION
                                " marks QNN context binaries is not known here");
  }
  forget_errors();
  program_.resize(file_size(path, Stage::kLoad));
  read_file(path, program_.data(), program_.size(), Stage::kLoad);
  const size_t signatures = change_signatures(&program_);
  auto module = std::make_unique<Module>(std::make_unique<BufferDataLoader>(program_.data(), program_.size()));
  constexpr auto kVerification = executorch::runtime::Program::Verification::InternalConsistency;
  check(options.size() > 0 ? module->load(options, kVerification) : module->load(kVerification), path);
  const auto name = module->program()->get_method_name(0);
  check(name.error(), path);
  const auto meta = module->method_meta(*name);
  check(meta.error(), path);
  const bool uses_qnn = meta->uses_backend("QnnBackend");
  if (uses_qnn && signatures == 0) {
    // A program without context binaries is prepared on the device; a job with the same program would unload the
    // anchor.
    throw Failure(Stage::kLoad, "'" + path + "' has no QNN context binary: compile it offline");
  }
  check(module->load_method(*name), path);
  module_ = std::move(module);
  holds_qnn_ = uses_qnn;
}

}  // namespace farm
