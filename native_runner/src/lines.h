// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace farm {

// Reader of lines of bounded length from a file descriptor.
class LineReader {
 public:
  struct Line {
    std::string text;  // without the \n; empty when too long
    bool too_long = false;
  };

  LineReader(int descriptor, size_t longest) : descriptor_(descriptor), longest_(longest) {}

  // Waits for the next line. Returns nothing at the end of the input, whose last line needs no \n. Throws
  // std::system_error if the input cannot be read.
  std::optional<Line> next();

 private:
  bool fill();

  int descriptor_;
  size_t longest_;
  std::string buffer_;
  size_t at_ = 0;
};

}  // namespace farm
