// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace farm {

// The words of a line as a POSIX shell splits it: blanks between them, single quotes, double quotes and
// backslash, and nothing else of a shell. Throws Failure at flags for a quote that does not end.
std::vector<std::string> split_words(std::string_view line);

}  // namespace farm
