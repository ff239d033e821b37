// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <string>
#include <vector>

namespace farm {

// The lines of a file, without \n; a last one that does not end counts when it has text.
std::vector<std::string> split_lines(const std::string& text);

// The pieces between any of `separators`, without the empty ones.
std::vector<std::string> split_any(const std::string& text, const char* separators);

}  // namespace farm
