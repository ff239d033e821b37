// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

namespace farm {

namespace {

[[noreturn]] void fail(Stage stage, const std::string& what, const std::string& path, int error) {
  throw Failure(stage, what + " '" + path + "': " + std::strerror(error));
}

struct Descriptor {
  explicit Descriptor(int opened) : number(opened) {}
  ~Descriptor() {
    if (number >= 0) ::close(number);
  }
  Descriptor(Descriptor&& other) noexcept : number(other.number) { other.number = -1; }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int number;
};

}  // namespace

uint64_t file_size(const std::string& path, Stage stage) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) fail(stage, "cannot read", path, errno);
  if (!S_ISREG(status.st_mode)) throw Failure(stage, "cannot read '" + path + "': not a regular file");
  return static_cast<uint64_t>(status.st_size);
}

std::string read_text(const std::string& path, Stage stage) {
  std::string text(file_size(path, stage), '\0');
  read_file(path, text.data(), text.size(), stage);
  return text;
}

namespace {

// Opens a regular file and sets its size.
Descriptor open_regular(const std::string& path, uint64_t* size, Stage stage) {
  // O_NONBLOCK: opening a pipe would wait for its other end; regular files ignore the flag.
  Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.number < 0) fail(stage, "cannot read", path, errno);
  struct stat status {};
  if (::fstat(file.number, &status) != 0) fail(stage, "cannot read", path, errno);
  if (!S_ISREG(status.st_mode)) throw Failure(stage, "cannot read '" + path + "': not a regular file");
  *size = static_cast<uint64_t>(status.st_size);
  return file;
}

void read_bytes(const Descriptor& file, const std::string& path, void* data, uint64_t size, Stage stage) {
  auto* bytes = static_cast<uint8_t*>(data);
  for (uint64_t done = 0; done < size;) {
    const ssize_t got = ::read(file.number, bytes + done, size - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(stage, "cannot read", path, errno);
    if (got == 0) throw Failure(stage, "'" + path + "' ended after " + std::to_string(done) + " bytes");
    done += static_cast<uint64_t>(got);
  }
}

// Returns errno, or 0.
int write_bytes(int descriptor, const void* data, size_t size) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  for (size_t done = 0; done < size;) {
    const ssize_t put = ::write(descriptor, bytes + done, size - done);
    if (put >= 0) {
      done += static_cast<size_t>(put);
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

}  // namespace

void read_file(const std::string& path, void* data, uint64_t size, Stage stage) {
  uint64_t actual = 0;
  const Descriptor file = open_regular(path, &actual, stage);
  if (actual != size) {
    throw Failure(stage, "'" + path + "' has " + std::to_string(actual) + " bytes, expected " + std::to_string(size));
  }
  read_bytes(file, path, data, size, stage);
}

std::string read_beginning(const std::string& path, uint64_t most, Stage stage) {
  uint64_t size = 0;
  const Descriptor file = open_regular(path, &size, stage);
  std::string text(std::min(size, most), '\0');
  read_bytes(file, path, text.data(), text.size(), stage);
  return text;
}

FileWriter::FileWriter(std::string path, Stage stage)
    : path_(std::move(path)), written_(path_ + ".tmp"), stage_(stage) {
  descriptor_ = ::open(written_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor_ < 0) fail(stage_, "cannot write", path_, errno);
}

FileWriter::~FileWriter() {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  // `finish` was not called: remove the partial file.
  ::unlink(written_.c_str());
}

void FileWriter::write(const void* data, size_t size) {
  if (const int error = write_bytes(descriptor_, data, size); error != 0) give_up(error);
}

void FileWriter::finish() {
  if (std::rename(written_.c_str(), path_.c_str()) != 0) give_up(errno);
  ::close(descriptor_);
  descriptor_ = -1;
}

void FileWriter::give_up(int error) { fail(stage_, "cannot write", path_, error); }

void write_file(const std::string& path, const void* data, size_t size, Stage stage) {
  FileWriter file(path, stage);
  file.write(data, size);
  file.finish();
}

void require_writable_file(const std::string& path, Stage stage) {
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
  struct stat status {};
  int error = 0;
  if (::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode)) {
    error = EISDIR;
  } else if (::access(folder.c_str(), W_OK | X_OK) != 0) {
    error = errno;
  }
  if (error != 0) fail(stage, "cannot write", path, error);
}

void require_writable_folder(const std::string& path, Stage stage) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) fail(stage, "cannot write into folder", path, errno);
  if (!S_ISDIR(status.st_mode)) fail(stage, "cannot write into folder", path, ENOTDIR);
  if (::access(path.c_str(), W_OK | X_OK) != 0) fail(stage, "cannot write into folder", path, errno);
}

}  // namespace farm
