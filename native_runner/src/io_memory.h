// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <cstddef>

namespace farm {

// Memory of an input or output: of this process, or allocated by the QNN backend and shared with the DSP (rpcmem).
class IoMemory {
 public:
  // Throws Failure at options if shared memory cannot be allocated, std::bad_alloc for other memory.
  IoMemory(size_t size, bool shared);
  ~IoMemory();
  IoMemory(IoMemory&& other) noexcept;
  IoMemory(const IoMemory&) = delete;
  IoMemory& operator=(const IoMemory&) = delete;
  IoMemory& operator=(IoMemory&&) = delete;

  void* data() const { return data_; }

 private:
  void* data_;
  bool shared_;
};

}  // namespace farm
