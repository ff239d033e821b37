// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "text.h"

namespace farm {

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t at = 0; at < text.size();) {
    const size_t end = text.find('\n', at);
    lines.push_back(text.substr(at, end - at));
    at = end == std::string::npos ? text.size() : end + 1;
  }
  return lines;
}

std::vector<std::string> split_any(const std::string& text, const char* separators) {
  std::vector<std::string> pieces;
  size_t at = 0;
  while ((at = text.find_first_not_of(separators, at)) != std::string::npos) {
    const size_t end = text.find_first_of(separators, at);
    pieces.push_back(text.substr(at, end - at));
    at = end == std::string::npos ? text.size() : end;
  }
  return pieces;
}

}  // namespace farm
