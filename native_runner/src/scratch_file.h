// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <cstddef>
#include <string>

#include "failure.h"

namespace farm {

// Text that is kept out of memory until it is wanted: in a file without a name, gone with its last user.
class ScratchFile {
 public:
  // `folder` is where the file is; nobody sees it there. Throws Failure at `stage`, as `add` does.
  ScratchFile(const std::string& folder, Stage stage);
  ~ScratchFile();
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;

  // Writes `text` behind what was added: it counts once it is added. One thread writes.
  void write(const std::string& text);
  // Adds what was written last.
  void add();
  // All of it. Whoever tells what happened must come through: where the system fails, nothing, and a line on stderr.
  std::string read() const;
  bool empty() const { return size_ == 0; }

 private:
  std::string folder_;
  Stage stage_;
  int descriptor_;
  size_t size_ = 0;
  size_t written_ = 0;  // behind these
};

}  // namespace farm
