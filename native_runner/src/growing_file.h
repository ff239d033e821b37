// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <cstddef>
#include <string>

#include "failure.h"

namespace farm {

// File that grows by a few bytes at a time. The bytes are written into mapped memory: without a system call each, and
// without loss when the process crashes. The file ends with blank lines until it is closed. Throws Failure at `stage`.
class GrowingFile {
 public:
  GrowingFile(std::string path, Stage stage);
  ~GrowingFile();
  GrowingFile(const GrowingFile&) = delete;
  GrowingFile& operator=(const GrowingFile&) = delete;

  void add(const char* text, size_t size);

 private:
  void grow();
  void write(const char* text, size_t size);

  std::string path_;
  Stage stage_;
  int descriptor_;
  size_t page_;
  char* memory_ = nullptr;  // mapped page; null if the file cannot be mapped
  size_t begin_ = 0;        // offset of the mapped page in the file
  size_t size_ = 0;         // size without the blank lines at the end
};

}  // namespace farm
