// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <string>

namespace farm {

// Throws Failure at load for a program whose QNN delegates share their weights where that is known to crash: the
// simulator cannot load it, and ExecuTorch (1.5) goes on without a context. The program was verified.
void refuse_shared_weights(const std::string& path);

}  // namespace farm
