// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <string>
#include <vector>

namespace farm {

// Returns the lines of a file, without \n; a last line without \n counts if it has text.
std::vector<std::string> split_lines(const std::string& text);

// Returns the pieces between any of `separators`, without empty ones.
std::vector<std::string> split_any(const std::string& text, const char* separators);

}  // namespace farm
