// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace farm {

// Splits a line into words as a POSIX shell does, by blanks, single quotes, double quotes and backslash; no other
// syntax of a shell is known. Throws Failure at flags for a quote that does not end.
std::vector<std::string> split_words(std::string_view line);

}  // namespace farm
