// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "growing_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace farm {

GrowingFile::GrowingFile(std::string path, Stage stage)
    : path_(std::move(path)), stage_(stage), page_(static_cast<size_t>(::sysconf(_SC_PAGESIZE))) {
  // A mapped file must be readable; a write-only file, such as a pipe, gets system calls.
  descriptor_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor_ < 0) throw Failure(stage_, "cannot write '" + path_ + "': " + std::strerror(errno));
  struct stat status {};
  if (::fstat(descriptor_, &status) == 0 && S_ISREG(status.st_mode)) grow();
}

GrowingFile::~GrowingFile() {
  if (memory_ != nullptr) {
    ::munmap(memory_, page_);
    // If ftruncate fails, blank lines stay.
    if (::ftruncate(descriptor_, static_cast<off_t>(size_)) != 0) errno = 0;
  }
  ::close(descriptor_);
}

void GrowingFile::add(const char* text, size_t size) {
  if (memory_ == nullptr) return write(text, size);
  while (size > 0) {
    if (size_ == begin_ + page_) grow();
    if (memory_ == nullptr) return write(text, size);
    const size_t fitting = std::min(size, begin_ + page_ - size_);
    std::memcpy(memory_ + (size_ - begin_), text, fitting);
    size_ += fitting;
    text += fitting;
    size -= fitting;
  }
}

// Writes blank lines instead of extending the file: a full disk is then an error here, and not a SIGBUS in the mapped
// memory.
void GrowingFile::grow() {
  write(std::string(page_, '\n').data(), page_);
  if (memory_ != nullptr) ::munmap(memory_, page_);
  void* memory = ::mmap(nullptr, page_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, static_cast<off_t>(size_));
  begin_ = size_;
  memory_ = memory == MAP_FAILED ? nullptr : static_cast<char*>(memory);
  if (memory_ != nullptr) return;
  const auto end = static_cast<off_t>(size_);
  if (::ftruncate(descriptor_, end) != 0 || ::lseek(descriptor_, end, SEEK_SET) != end) {
    throw Failure(stage_, "cannot write '" + path_ + "': " + std::strerror(errno));
  }
}

void GrowingFile::write(const char* text, size_t size) {
  for (size_t done = 0; done < size;) {
    const ssize_t put = ::write(descriptor_, text + done, size - done);
    if (put >= 0) {
      done += static_cast<size_t>(put);
    } else if (errno != EINTR) {
      throw Failure(stage_, "cannot write '" + path_ + "': " + std::strerror(errno));
    }
  }
}

}  // namespace farm
