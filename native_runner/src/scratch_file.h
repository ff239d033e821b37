// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <cstddef>
#include <string>

#include "failure.h"

namespace farm {

// Text that is kept in a file instead of memory. The file has no name and is removed with its last user.
class ScratchFile {
 public:
  // Makes the file in `folder`, without a directory entry. Throws Failure at `stage`, as `add` does.
  ScratchFile(const std::string& folder, Stage stage);
  ~ScratchFile();
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;

  // Writes `text` after the added texts; it is part of the file after `add`. Only one thread writes.
  void write(const std::string& text);
  // Adds the last written text.
  void add();
  // Returns all added texts. A report must always be written: on a system error the result is empty, with a line on
  // stderr.
  std::string read() const;
  bool empty() const { return size_ == 0; }

 private:
  std::string folder_;
  Stage stage_;
  int descriptor_;
  size_t size_ = 0;
  size_t written_ = 0;  // bytes after the added ones
};

}  // namespace farm
