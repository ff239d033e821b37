// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <string>

namespace farm {

// Throws Failure at load for a verified program whose QNN delegates share weights, on the simulator: it cannot load
// them, and ExecuTorch (1.5) continues without a context and crashes.
void refuse_shared_weights(const std::string& path);

}  // namespace farm
