// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <cstddef>
#include <string>

#include "failure.h"

namespace farm {

// A file that grows by a few bytes at a time. They are written into memory that it shares with the system: no call of
// the system for each, and nothing of it is lost when the process crashes. Until it is closed it ends with blank lines.
// Throws Failure at `stage`.
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
  char* memory_ = nullptr;  // of the page that is written; null where the file cannot be mapped
  size_t begin_ = 0;        // of that page in the file
  size_t size_ = 0;         // without what fills it up
};

}  // namespace farm
