// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <cstddef>

namespace farm {

// Memory of one input or output: of this process, or shared with the DSP (rpcmem) where the QNN backend
// allocates it.
class IoMemory {
 public:
  // Throws Failure at options when shared memory is asked for and cannot be had, std::bad_alloc otherwise.
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
