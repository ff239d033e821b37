// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "anchor.h"

#include <executorch/extension/data_loader/buffer_data_loader.h>

#include <cstring>
#include <utility>

#include "failure.h"
#include "files.h"
#include "platform.h"

namespace farm {

namespace {

using executorch::extension::BufferDataLoader;
using executorch::extension::Module;
using executorch::runtime::Error;
using executorch::runtime::Program;

// ExecuTorch 1.5, QnnContextCustomProtocol: magic number (4 bytes), signature (8), size of the binary (8).
constexpr uint32_t kMagic = 0x5678ABCD;
constexpr size_t kSize = 12;
constexpr size_t kHeader = 20;
// ExecuTorch aligns the data of delegates to more than this.
constexpr size_t kAlignment = 16;

// Signatures are times of compilation, in nanoseconds: none has the topmost bit.
constexpr uint8_t kTopBit = 0x80;

// Returns how many there were.
size_t change_signatures(std::vector<uint8_t>* program) {
  size_t count = 0;
  for (size_t at = 0; at + kHeader <= program->size(); at += kAlignment) {
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
  forget_errors();
  program_.resize(file_size(path, Stage::kLoad));
  read_file(path, program_.data(), program_.size(), Stage::kLoad);
  const size_t signatures = change_signatures(&program_);
  auto module = std::make_unique<Module>(std::make_unique<BufferDataLoader>(program_.data(), program_.size()));
  constexpr auto kVerification = Program::Verification::InternalConsistency;
  check(options.size() > 0 ? module->load(options, kVerification) : module->load(kVerification), path);
  const auto name = module->program()->get_method_name(0);
  check(name.error(), path);
  const auto meta = module->method_meta(*name);
  check(meta.error(), path);
  const bool uses_qnn = meta->uses_backend("QnnBackend");
  if (uses_qnn && signatures == 0) {
    // Prepared on the device: a job with the same program would take the anchor down.
    throw Failure(Stage::kLoad, "'" + path + "' has no QNN context binary: compile it offline");
  }
  check(module->load_method(*name), path);
  module_ = std::move(module);
  holds_qnn_ = uses_qnn;
}

}  // namespace farm
