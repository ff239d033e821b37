// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <string>

namespace farm {

// Takes over ExecuTorch's log and abort. Log lines still go to stderr; `on_abort` gets what the log says
// about the reason and must not return.
void install_platform(void (*on_abort)(const std::string& reason));

// The first error that ExecuTorch logged since `forget_errors`, or "". It says more than an error code, and
// more than the later ones, which tell what the first one led to.
std::string first_error();
void forget_errors();

}  // namespace farm
