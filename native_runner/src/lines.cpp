// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "lines.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace farm {

namespace {
constexpr size_t kChunk = 64 * 1024;
}

std::optional<LineReader::Line> LineReader::next() {
  Line line;
  bool any = false;
  for (;;) {
    const size_t end = buffer_.find('\n', at_);
    const size_t stop = end == std::string::npos ? buffer_.size() : end;
    if (!line.too_long) line.text.append(buffer_, at_, stop - at_);
    any = any || stop > at_;
    if (line.text.size() > longest_) {
      line.too_long = true;
      line.text.clear();
    }
    if (end != std::string::npos) {
      at_ = end + 1;
      return line;
    }
    if (fill()) continue;
    if (any) return line;
    return std::nullopt;
  }
}

bool LineReader::fill() {
  buffer_.resize(kChunk);
  at_ = 0;
  for (;;) {
    const ssize_t got = ::read(descriptor_, buffer_.data(), buffer_.size());
    if (got >= 0) {
      buffer_.resize(static_cast<size_t>(got));
      return got > 0;
    }
    if (errno == EAGAIN) {
      pollfd writer{descriptor_, POLLIN, 0};
      ::poll(&writer, 1, -1);
    } else if (errno != EINTR) {
      const int error = errno;
      buffer_.clear();
      throw std::system_error(error, std::generic_category(), "standard input");
    }
  }
}

}  // namespace farm
