// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "failure.h"

namespace farm {

// All functions throw Failure at `stage`, with the path and the system's reason in the message.

// Size of a regular file, in bytes.
uint64_t file_size(const std::string& path, Stage stage);

// Content of a regular file.
std::string read_text(const std::string& path, Stage stage);

// Content of a regular file that must have `size` bytes, into `data`.
void read_file(const std::string& path, void* data, uint64_t size, Stage stage);

// At most the first `most` bytes of a regular file.
std::string read_beginning(const std::string& path, uint64_t most, Stage stage);

// Throws unless a file can be made beside `path`, which may exist already.
void require_writable_file(const std::string& path, Stage stage);

// Writes a file under another name and renames it: readers see the old file or the whole new one.
void write_file(const std::string& path, const void* data, size_t size, Stage stage);

// Writer of a file in pieces: readers see the old file or, after `finish`, the whole new one. Throws Failure at
// `stage`.
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
  std::string written_;  // temporary name until `finish`
  Stage stage_;
  int descriptor_;
};

// Throws unless `path` is a folder in which files can be made.
void require_writable_folder(const std::string& path, Stage stage);

}  // namespace farm
