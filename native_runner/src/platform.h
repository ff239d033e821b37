// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <string>

namespace farm {

// Takes over ExecuTorch's log and abort. Log lines still go to stderr; `on_abort` gets the last error of
// the log and must not return.
void install_platform(void (*on_abort)(const std::string& last_error));

// The last error that ExecuTorch logged since `forget_last_error`, or "". It says more than an error code.
std::string last_error();
void forget_last_error();

}  // namespace farm
