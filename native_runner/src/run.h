// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include "backend_options.h"
#include "flags.h"
#include "report.h"

namespace farm {

// What the runs of one process share.
struct Backend {
  ProcessOptions* options = nullptr;
  bool warm = false;  // something keeps the QNN backend up
};

// Loads, executes and writes as `flags` say, filling in `report` on the way. When it returns, every file is
// in its place and the program unloaded. Throws Failure.
void run(const Flags& flags, const Backend& backend, SharedReport* report);

}  // namespace farm
