// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "scratch_file.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace farm {

ScratchFile::ScratchFile(const std::string& folder, Stage stage) : folder_(folder), stage_(stage) {
  std::string name = folder + "/scratch-XXXXXX";
  descriptor_ = ::mkostemp(name.data(), O_CLOEXEC);
  if (descriptor_ < 0) throw Failure(stage_, "cannot write into folder '" + folder_ + "': " + std::strerror(errno));
  ::unlink(name.c_str());
}

ScratchFile::~ScratchFile() { ::close(descriptor_); }

void ScratchFile::write(const std::string& text) {
  written_ = 0;
  for (size_t done = 0; done < text.size();) {
    const ssize_t put =
        ::pwrite(descriptor_, text.data() + done, text.size() - done, static_cast<off_t>(size_ + done));
    if (put >= 0) {
      done += static_cast<size_t>(put);
    } else if (errno != EINTR) {
      throw Failure(stage_, "cannot write into folder '" + folder_ + "': " + std::strerror(errno));
    }
  }
  written_ = text.size();
}

void ScratchFile::add() {
  size_ += written_;
  written_ = 0;
}

std::string ScratchFile::read() const {
  std::string text(size_, '\0');
  for (size_t done = 0; done < size_;) {
    const ssize_t got = ::pread(descriptor_, text.data() + done, size_ - done, static_cast<off_t>(done));
    if (got > 0) {
      done += static_cast<size_t>(got);
    } else if (got == 0 || errno != EINTR) {
      std::fprintf(stderr, "farm_runner: cannot read again what was written into folder '%s'\n", folder_.c_str());
      return "";
    }
  }
  return text;
}

}  // namespace farm
