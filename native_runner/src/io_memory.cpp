// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "io_memory.h"

#include <dlfcn.h>

#include <cstdlib>
#include <new>
#include <string>

#include "failure.h"

// Functions of ExecuTorch's QNN backend library, whose header is not part of every package. Weak: they are null in a
// runner without that backend.
extern "C" {
__attribute__((weak)) void* QnnExecuTorchAllocCustomMem(size_t bytes, size_t alignment);
__attribute__((weak)) void QnnExecuTorchFreeCustomMem(void* memory);
}

namespace farm {

namespace {

constexpr size_t kMemoryAlignment = 64;

// The backend crashes without this library (ExecuTorch 1.5).
void require_rpcmem() {
  // Not closed: the backend opens the library again.
  if (::dlopen("libcdsprpc.so", RTLD_NOW | RTLD_LOCAL) != nullptr) return;
  const char* why = ::dlerror();
  throw Failure(Stage::kOptions, "--shared_buffer: no memory can be shared with a DSP here: " +
                                     std::string(why == nullptr ? "libcdsprpc.so cannot be loaded" : why));
}

void* allocate_shared(size_t size) {
  if (&QnnExecuTorchAllocCustomMem == nullptr || &QnnExecuTorchFreeCustomMem == nullptr) {
    throw Failure(Stage::kOptions, "--shared_buffer: this runner is built without the QNN backend, which allocates it");
  }
  require_rpcmem();
  void* data = QnnExecuTorchAllocCustomMem(size, kMemoryAlignment);
  if (data == nullptr) {
    throw Failure(Stage::kOptions,
                  "--shared_buffer: the DSP's driver gives no " + std::to_string(size) + " bytes of shared memory");
  }
  return data;
}

void* allocate_own(size_t size) {
  void* data = nullptr;
  // A size of 0 still needs an address. Not aligned_alloc, which Android has only since API level 28.
  if (::posix_memalign(&data, kMemoryAlignment, size == 0 ? 1 : size) != 0) throw std::bad_alloc();
  return data;
}

}  // namespace

IoMemory::IoMemory(size_t size, bool shared)
    : data_(shared ? allocate_shared(size) : allocate_own(size)), shared_(shared) {}

IoMemory::IoMemory(IoMemory&& other) noexcept : data_(other.data_), shared_(other.shared_) { other.data_ = nullptr; }

IoMemory::~IoMemory() {
  if (data_ == nullptr) return;
  if (shared_) {
    QnnExecuTorchFreeCustomMem(data_);
  } else {
    std::free(data_);
  }
}

}  // namespace farm
