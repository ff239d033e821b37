// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "guesses.h"

#include <algorithm>

namespace farm {

namespace {
constexpr size_t kLongest = 2;
}

std::vector<int32_t> guess(const std::vector<int32_t>& tokens, size_t most) {
  if (most == 0) return {};
  for (size_t length = std::min(kLongest, tokens.size()); length > 0; --length) {
    const auto pattern = tokens.end() - static_cast<std::ptrdiff_t>(length);
    // Skip the end of the sequence itself.
    const auto found = std::find_end(tokens.begin(), tokens.end() - 1, pattern, tokens.end());
    if (found == tokens.end() - 1) continue;
    const auto next = found + static_cast<std::ptrdiff_t>(length);
    return {next, next + std::min(static_cast<std::ptrdiff_t>(most), tokens.end() - next)};
  }
  return {};
}

}  // namespace farm
