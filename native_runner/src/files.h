// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "failure.h"

namespace farm {

// All of these throw Failure at `stage`, with the path and the system's reason in the message.

// Size of a regular file, in bytes.
uint64_t file_size(const std::string& path, Stage stage);

// Content of a regular file.
std::string read_text(const std::string& path, Stage stage);

// Content of a regular file that must have `size` bytes, into `data`.
void read_file(const std::string& path, void* data, uint64_t size, Stage stage);

// At most the first `most` bytes of a regular file.
std::string read_beginning(const std::string& path, uint64_t most, Stage stage);

// Passes when a file can be made beside `path`, which may be there already.
void require_writable_file(const std::string& path, Stage stage);

// A reader sees the old file or the whole new one: written under another name, then renamed.
void write_file(const std::string& path, const void* data, size_t size, Stage stage);

// A file that is written piece by piece: readers see the old file or, after `finish`, the whole new one. Throws Failure
// at `stage`.
class FileWriter {
 public:
  FileWriter(std::string path, Stage stage);
  ~FileWriter();
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  void write(const void* data, size_t size);
  void finish();

 private:
  [[noreturn]] void give_up(int error);

  std::string path_;
  std::string written_;  // the name of the file until it is whole
  Stage stage_;
  int descriptor_;
};

// Passes when `path` is a folder that files can be made in.
void require_writable_folder(const std::string& path, Stage stage);

}  // namespace farm
