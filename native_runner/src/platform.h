// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <string>

namespace farm {

// Replaces ExecuTorch's log and abort. Log lines still go to stderr; `on_abort` gets the logged reason and must not
// return.
void install_platform(void (*on_abort)(const std::string& reason));

// Returns the first error that ExecuTorch logged since `forget_errors`, or "". Later errors are consequences of the
// first, which also has more detail than an error code.
std::string first_error();
void forget_errors();

}  // namespace farm
